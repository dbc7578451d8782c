"""A plan that leaves room in its budgets for several micro-batches that pass the model together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from forebay.errors import ConfigError, DoesNotFit
from forebay.lowering import accumulation_of
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.units import format_apart, format_bytes

__all__ = ["Room", "leave_room"]

Make = Callable[[Problem, Bench], Plan]
"""A planner with its name."""

TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.DISK)

ROUNDS: Final = 7
"""Plans that are made in search of one that leaves enough room, the first one with all that is allowed."""

CLOSE: Final = 1 / 32
"""A plan is good enough when the next one that would be asked for had this share more of the budget at most."""


@dataclass(frozen=True)
class Room:
    """``plan`` leaves room for so many micro-batches as were asked for; ``alone`` is the one that has all that is
    allowed for a single one. Each with the bench that it was made on; where ``alone`` leaves room they are the same."""

    plan: Plan
    bench: Bench
    alone: Plan
    alone_bench: Bench


def leave_room(problem: Problem, micro_batches: int, make: Make) -> Room:
    """The plan that ``make`` makes for ``problem``, with room for ``micro_batches`` of ``forebay.accumulate``.

    Raises ``DoesNotFit`` where there is none, ``ConfigError`` where activations are unknown (no batch was given).
    """
    if micro_batches < 1:
        raise ConfigError(f"micro_batches must be 1 or more, got {micro_batches}")
    if micro_batches > 1 and problem.trace is None:
        raise ConfigError("what several micro-batches take is known only with a batch: give prepare one")
    bench = alone_bench = Bench(problem)
    plan = alone = make(problem, bench)
    over = _over(problem, plan, micro_batches, bench)
    if not over:
        return Room(_told(plan, micro_batches, bench), bench, alone, bench)
    # With less a plan keeps less, so that each micro-batch takes less; with too little there is no plan.
    low, high, share, found = 0.0, 1.0, 1 / max(over.values()), None
    for _ in range(ROUNDS - 1):
        asked = _scaled(problem, share, over)
        bench = Bench(asked)
        try:
            plan = make(asked, bench)
        except DoesNotFit:
            low = share
        else:
            more = _over(problem, plan, micro_batches, bench)
            if more:
                high, over = share, {**over, **more}
            else:
                low, found = share, (plan, bench)
        if found is not None and high - low < CLOSE:
            break
        share = (low + high) / 2
    if found is None:
        raise _refusal(problem, micro_batches, over)
    plan, bench = found
    return Room(_told(replace(plan, budget=problem.budget), micro_batches, bench), bench, alone, alone_bench)


def _scaled(problem: Problem, share: float, tiers: Collection[Tier]) -> Problem:
    """The problem with that share of what is allowed of ``tiers``."""
    limits = {t: max(1, int(problem.limit(t) * share)) if t in tiers else problem.limit(t) for t in TIERS}
    budget = replace(problem.budget, device=limits[Tier.DEVICE])
    return replace(problem, budget=budget, host_limit=limits[Tier.HOST], disk_limit=limits[Tier.DISK])


def _over(problem: Problem, plan: Plan, micro_batches: int, bench: Bench) -> dict[Tier, float]:
    """The tiers that have no room for the micro-batches, and how many times what is allowed these take."""
    needs = None if problem.trace is None else accumulation_of(problem.trace, plan, liveness=bench.liveness)
    if needs is None or micro_batches == 1:
        return {}
    taken = {tier: needs.needed(tier, micro_batches) for tier in TIERS}
    return {t: taken[t] / max(1, problem.limit(t)) for t in TIERS if taken[t] > problem.limit(t)}


def _told(plan: Plan, micro_batches: int, bench: Bench) -> Plan:
    trace = bench.problem.trace
    needs = None if trace is None else accumulation_of(trace, plan, liveness=bench.liveness)
    if needs is None or micro_batches == 1:
        return plan
    device = format_bytes(needs.needed(Tier.DEVICE, micro_batches))
    reason = f"leaves room for {micro_batches} micro-batches that pass the model together: {device} on the device"
    return replace(plan, reasons=(*plan.reasons, reason))


def _refusal(problem: Problem, micro_batches: int, over: dict[Tier, float]) -> DoesNotFit:
    tier = max(over, key=lambda one: over[one])
    allowed = problem.limit(tier)
    needed = int(over[tier] * allowed) + 1
    shown = format_apart(needed, allowed)
    return DoesNotFit(
        f"no plan leaves room for {micro_batches} micro-batches at a time; use fewer, or none. {tier.value}: they take "
        f"up to {shown[0]} and {shown[1]} are allowed",
        tier=tier.value,
        needed=needed,
        allowed=allowed,
    )
