"""``forebay compare``: policies side by side on one model, with one device budget or several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.cli.plan import PlanSettings, capture_step, chosen_machine, disk_budget, with_ops
from forebay.collector import collector_paused
from forebay.errors import ConfigError, DoesNotFit, UnitError
from forebay.plans import Budget
from forebay.reporting.comparison import LINKS, Candidate
from forebay.units import parse_bytes

if TYPE_CHECKING:
    from forebay.machine import Machine
    from forebay.trace import Trace

__all__ = ["Comparison", "compare", "compare_policies", "parse_budgets"]


@dataclass(frozen=True)
class Comparison:
    """What ``forebay compare`` answers; ``title`` says of which model and machine, ``notes`` how the figures came
    about."""

    title: str
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()


def parse_budgets(text: str | None) -> tuple[int, ...]:
    """Device budgets in bytes, written as sizes with commas between them. Raises ``ConfigError``."""
    if text is None:
        return ()
    try:
        found = tuple(dict.fromkeys(parse_bytes(part) for part in text.split(",")))
    except UnitError as error:
        raise ConfigError(f"--budgets: {error}") from None
    if min(found) <= 0:
        raise ConfigError(f"--budgets: a device budget is more than 0 bytes, got {text!r}")
    return found


def compare(settings: PlanSettings, budgets: Sequence[int], *, states: bool) -> Comparison:
    """Every policy for model states and ``auto``, or every policy if not ``states``, with each of ``budgets`` (bytes of
    device memory; none: what ``settings`` say, or what the machine has). That a policy does not fit is an answer too.
    Raises a ``UsageError`` for what cannot be used."""
    from forebay.planners import PLANNERS, STATES
    from forebay.recipes.tasks import sample

    folder = disk_budget(settings)
    machine, notes = chosen_machine(settings, folder)
    found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype)
    captured, name = capture_step(settings, found, machine, None)
    on, timed = (machine, ()) if settings.machine is not None else with_ops(captured, machine)
    devices = budgets or (machine.device_capacity if settings.device_memory is None else settings.device_memory,)
    asked = [Budget(device, settings.host_memory, None, folder) for device in devices]
    policies = ("auto", *STATES) if states else tuple(PLANNERS)
    candidates = compare_policies(captured.trace, on, asked, policies)
    return Comparison(f"{name} on {machine.name}", candidates, (*notes, *timed, *captured.trace.notes))


def compare_policies(
    trace: Trace, machine: Machine, budgets: Sequence[Budget], policies: Sequence[str]
) -> tuple[Candidate, ...]:
    """``policies`` on ``trace`` and ``machine`` within each of ``budgets``, in this order."""
    with collector_paused():
        return tuple(_candidate(trace, machine, budget, policy) for budget in budgets for policy in policies)


def _candidate(trace: Trace, machine: Machine, budget: Budget, policy: str) -> Candidate:
    from forebay.planners import Bench, make_plan
    from forebay.planning import predict, problem_of

    # A bench of its own: what another policy has simulated on it would count as found by this one.
    bench, start = Bench(problem_of(trace, machine, budget)), time.perf_counter()
    try:
        plan = make_plan(bench.problem, policy, bench)
    except DoesNotFit as refusal:
        return Candidate(policy, budget.device, time.perf_counter() - start, reason=str(refusal))
    solved = time.perf_counter() - start
    timeline, forecast = predict(trace, machine, plan, bench)
    return Candidate(
        policy=policy,
        budget=budget.device,
        solve_seconds=solved,
        step_seconds=forecast.step_seconds,
        peaks={usage.tier: usage.peak for usage in timeline.tiers},
        moved={lane: forecast.moved.get(lane, 0) for lane in LINKS},
        exact=not plan.changes_numbers,
    )
