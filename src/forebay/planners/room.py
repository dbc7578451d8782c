"""A plan that leaves room in its budgets for several micro-batches that pass the model together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from forebay.errors import DoesNotFit, NoRoomTogether
from forebay.lowering import accumulation_of
from forebay.memory import Tier
from forebay.planners.activations.choosing import leanest, narrow
from forebay.planners.bench import Bench
from forebay.planners.nearest import with_larger
from forebay.planners.problem import Problem
from forebay.planners.shapes import least_device, levels
from forebay.plans import Plan
from forebay.units import format_apart, format_bytes

__all__ = ["Make", "Room", "leave_room"]

Make = Callable[[Problem, Bench], Plan]
"""A planner with its name."""

TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.DISK)

ROUNDS: Final = 6
"""Plans that are made in search of one that leaves enough room, the first one with all that is allowed."""

CLOSE: Final = 1 / 32
"""A plan is good enough when the next one that would be asked for had this share more of the budget at most, or when
the micro-batches leave no more than this share of it."""

FAST: Final = 0.01
"""A plan is good enough, too, when one with more, and without enough room, is no faster by more than this share."""

EDGE: Final = 1 / 8
"""Of the shares that are still in question, this part at either end is not asked for: a figure that hardly changes
would lead there again and again."""


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

    Raises ``NoRoomTogether`` where there is none but for one, ``DoesNotFit`` where there is none for one either,
    ``ConfigError`` where activations are unknown (no batch was given).
    """
    problem = replace(problem, micro_batches=micro_batches)
    if micro_batches > 1 and problem.trace is None:
        raise problem.unknown("what several micro-batches take is known only with a batch")
    bench = alone_bench = Bench(problem)
    plan = alone = make(problem, bench)
    taken = _taken(problem, plan, micro_batches, bench)
    over = {tier: share for tier, share in taken.items() if share > 1}
    if not over:
        return Room(_told(plan, micro_batches, bench), bench, alone, bench)
    found = None if _never(problem, micro_batches, bench) else _within(problem, micro_batches, make, alone, bench, over)
    if found is None:
        found = _leanest(problem, make, bench, over) or (plan, bench)
        taken = _taken(problem, found[0], micro_batches, found[1])
        if max(taken.values()) > 1:
            raise _refusal(problem, micro_batches, taken, alone)
    plan, bench = found
    return Room(_told(replace(plan, budget=problem.budget), micro_batches, bench), bench, alone, alone_bench)


def _within(
    problem: Problem, micro_batches: int, make: Make, alone: Plan, known: Bench, over: Mapping[Tier, float]
) -> tuple[Plan, Bench] | None:
    """A plan for a share of what is allowed that leaves room in all of it, and the bench that it was made on; None if
    none is found. ``alone`` is the plan for all of it, made on ``known``; ``over`` are the tiers that have no room
    under that, and how many times all of it is taken.

    With less a plan keeps less, so that each micro-batch takes less; with too little there is no plan.
    """
    found, fastest = None, alone.step_seconds or 0.0
    most_over = max(over.values())
    low, high = 0.0, _needed(problem, alone, over)
    # With as much as ``alone`` needs it would be the answer again.
    share = 1 / most_over if 1 / most_over < high else high / most_over
    below, above = 0.0, most_over  # what is taken with these shares, in parts of what is allowed
    scaled = set(over)
    for _ in range(ROUNDS - 1):
        asked = _scaled(problem, share, scaled)
        bench = known.with_limits(asked)
        try:
            plan = make(asked, bench)
        except DoesNotFit:
            low, below = share, 0.0
        else:
            taken = _taken(problem, plan, micro_batches, bench)
            most = max(taken[tier] for tier in scaled)
            if max(taken.values()) > 1:
                scaled |= {tier for tier in TIERS if taken[tier] > 1}
                high, above = min(share, _needed(problem, plan, scaled)), max(taken.values())
                fastest = plan.step_seconds or 0.0
            else:
                low, below, found = share, most, (plan, bench)
                if most >= 1 - CLOSE:
                    break
        if found is not None and (high - low < CLOSE or (found[0].step_seconds or 0.0) <= fastest * (1 + FAST)):
            break
        # Where all but half of what may be left would be taken, if it grew evenly.
        part = (1 - CLOSE / 2 - below) / (above - below) if below else 0.5
        share = low + max(0.0, high - low) * min(1 - EDGE, max(EDGE, part))
    return found


def _leanest(problem: Problem, make: Make, known: Bench, tiers: Collection[Tier]) -> tuple[Plan, Bench] | None:
    """The plan for the least of ``tiers`` that ``make`` makes one with, and the bench that it was made on; None where
    that takes more of a tier than is allowed. ``_within`` may miss it: it is the only plan for just so much."""
    asked = _scaled(problem, 0.0, tiers)
    for _ in range(len(TIERS) + 1):  # what each tier needs is known once it has refused
        bench = known.with_limits(asked)
        try:
            return make(asked, bench), bench
        except DoesNotFit as error:
            tier = Tier(error.tier)
            if error.needed > problem.limit(tier):
                break
            asked = with_larger(asked, tier, error.needed)
    return None


def _needed(problem: Problem, plan: Plan, tiers: Collection[Tier]) -> float:
    """The least share of what is allowed of ``tiers`` with which ``plan`` could be made: with that or more it is, or a
    better one."""
    needs = {Tier.DEVICE: plan.device, Tier.HOST: plan.host, Tier.DISK: plan.disk}
    return max(needs[tier] / max(1, problem.limit(tier)) for tier in tiers)


def _never(problem: Problem, micro_batches: int, bench: Bench) -> bool:
    """Whether the device has no room for the micro-batches under any draft that holds the least at one time, nor even
    with the least that any of them takes for one and the least that any takes for each further one."""
    trace = problem.trace
    if trace is None:
        return False
    drafts = (least_device(bench, [level]) for level in (*map(narrow, leanest(bench)), *levels(bench)))
    needs = [accumulation_of(trace, bench.plan("", draft), liveness=bench.liveness) for draft in drafts]
    streamed = [need for need in needs if need is not None]
    if len(streamed) < len(needs) or not streamed:
        return False
    least = min(n.device for n in streamed) + (micro_batches - 1) * min(n.device_further for n in streamed)
    return least > problem.limit(Tier.DEVICE)


def _scaled(problem: Problem, share: float, tiers: Collection[Tier]) -> Problem:
    """The problem with that share of what is allowed of ``tiers``."""
    limits = {t: max(1, int(problem.limit(t) * share)) if t in tiers else problem.limit(t) for t in TIERS}
    budget = problem.budget.with_planned_device(limits[Tier.DEVICE])
    return replace(problem, budget=budget, host_limit=limits[Tier.HOST], disk_limit=limits[Tier.DISK])


def _taken(problem: Problem, plan: Plan, micro_batches: int, bench: Bench) -> dict[Tier, float]:
    """How many times what is allowed of each tier the micro-batches take; 0 where they go one by one anyway."""
    needs = None if problem.trace is None else accumulation_of(problem.trace, plan, liveness=bench.liveness)
    if needs is None or micro_batches == 1:
        return dict.fromkeys(TIERS, 0.0)
    return {tier: needs.needed(tier, micro_batches) / max(1, problem.limit(tier)) for tier in TIERS}


def _told(plan: Plan, micro_batches: int, bench: Bench) -> Plan:
    trace = bench.problem.trace
    needs = None if trace is None else accumulation_of(trace, plan, liveness=bench.liveness)
    if needs is None or micro_batches == 1:
        return plan
    device = format_bytes(needs.needed(Tier.DEVICE, micro_batches))
    reason = f"leaves room for {micro_batches} micro-batches that pass the model together: {device} on the device"
    return replace(plan, reasons=(*plan.reasons, reason))


def _refusal(problem: Problem, micro_batches: int, taken: Mapping[Tier, float], alone: Plan) -> NoRoomTogether:
    tier = max(taken, key=lambda one: taken[one])
    allowed = problem.limit(tier)
    needed = int(taken[tier] * allowed) + 1
    shown = format_apart(needed, allowed)
    return NoRoomTogether(
        f"no plan leaves room for {micro_batches} micro-batches at a time; use fewer, or none. {tier.value}: they take "
        f"up to {shown[0]} and {shown[1]} are allowed",
        tier=tier.value,
        needed=needed,
        allowed=allowed,
        alone=alone,
    )
