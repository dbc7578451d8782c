"""``forebay compare``: policies side by side on one model, with one device budget or several, predicted and run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.budgets import Budget
from forebay.cli.plan import PlanSettings, capture_step, chosen_machine, disk_budget, with_ops
from forebay.collector import collector_paused
from forebay.errors import ConfigError, DoesNotFit, UnitError
from forebay.reporting.comparison import LINKS, Candidate, Measured
from forebay.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from forebay.machine import Machine
    from forebay.plans import Plan, UpdateTime
    from forebay.trace import Trace

__all__ = ["Comparison", "Run", "compare", "compare_policies", "parse_budgets"]

Run = Callable[["Plan", Budget], Measured]
"""Trains a few steps under a plan within a budget, and gives everything back."""


def silent(line: str) -> None:
    """Tells nobody."""


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


def compare(
    settings: PlanSettings,
    budgets: Sequence[int],
    *,
    states: bool,
    measure: bool = False,
    tell: Callable[[str], None] = silent,
) -> Comparison:
    """Every policy for model states and ``auto``, or every policy if not ``states``, with each of ``budgets`` (bytes of
    device memory; none: what ``settings`` say, or what the machine has). That a policy does not fit is an answer too.
    With ``measure`` each policy that fits is run here as well, one after the other; ``tell`` hears of each.
    Raises a ``UsageError`` for what cannot be used."""
    from forebay.planners import PLANNERS, STATES
    from forebay.recipes.tasks import sample

    if measure and settings.machine is not None:
        raise ConfigError(
            f"--measure runs the policies on this machine and --machine {settings.machine} asks about another; leave "
            f"one of them out"
        )
    folder = disk_budget(settings)
    machine, notes = chosen_machine(settings, folder)
    found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype)
    captured, name = capture_step(settings, found, machine, None)
    on, timed = (machine, ()) if settings.machine is not None else with_ops(captured, machine)
    devices = budgets or (machine.device_capacity if settings.device_memory is None else settings.device_memory,)
    asked = [Budget(device, settings.host_memory, None, folder) for device in devices]
    policies = ("auto", *STATES) if states else tuple(PLANNERS)
    run: Run | None = None
    unrun: tuple[str, ...] = ()
    if measure:
        from forebay.cli.trial import Trials

        trials = Trials(settings, machine.device_kind)
        tell("running plain PyTorch")
        why = trials.run_plain(captured.trace, on)
        run, unrun = trials.run, (why,) if why else ()
    many, update = settings.accumulate, settings.update
    candidates = compare_policies(captured.trace, on, asked, policies, many, run, tell, update)
    return Comparison(f"{name} on {machine.name}", candidates, (*unrun, *notes, *timed, *captured.trace.notes))


def compare_policies(
    trace: Trace,
    machine: Machine,
    budgets: Sequence[Budget],
    policies: Sequence[str],
    micro_batches: int = 1,
    run: Run | None = None,
    tell: Callable[[str], None] = silent,
    update: UpdateTime = "step",
) -> tuple[Candidate, ...]:
    """``policies`` on ``trace`` and ``machine`` within each of ``budgets``, in this order, for a step of
    ``micro_batches`` that pass the model together. ``run`` is given the plan of each that fits, before the next one is
    asked; ``tell`` hears whose it is. ``update``: see ``Problem``."""
    found = []
    for budget in budgets:
        for policy in policies:
            with collector_paused():
                candidate, plan = _candidate(trace, machine, budget, policy, micro_batches, update)
            if plan is not None and run is not None:
                tell(f"running {policy} with {format_bytes(budget.device)} on the device")
                candidate = replace(candidate, measured=run(plan, budget))
            found.append(candidate)
    return tuple(found)


def _candidate(
    trace: Trace, machine: Machine, budget: Budget, policy: str, micro_batches: int, update: UpdateTime
) -> tuple[Candidate, Plan | None]:
    from forebay.figures import with_figures
    from forebay.planners import make_plan
    from forebay.planners.room import leave_room
    from forebay.planning import predict, problem_of
    from forebay.simulation import by_turns, together

    # Each has benches of its own: what another policy has simulated on one would count as found by this one.
    problem, start = problem_of(trace, machine, budget, update=update), time.perf_counter()
    try:
        room = leave_room(problem, micro_batches, lambda asked, bench: make_plan(asked, policy, bench))
    except DoesNotFit as refusal:
        return Candidate(policy, budget.device, time.perf_counter() - start, reason=str(refusal)), None
    solved = time.perf_counter() - start
    plan, bench = room.plan, room.bench
    timeline, forecast = predict(trace, machine, plan, bench)
    seconds, moved = forecast.step_seconds, forecast.moved
    peaks = {usage.tier: usage.peak for usage in timeline.tiers}
    if micro_batches > 1:
        plan = with_figures(trace, machine, plan, liveness=bench.liveness, micro_batches=micro_batches)
        passing = by_turns if plan.accumulation is None else together
        passes = passing(plan, bench.costs, micro_batches, liveness=bench.liveness)
        seconds, moved, peaks = passes.seconds, passes.moved, plan.peaks(micro_batches)
    candidate = Candidate(
        policy=policy,
        budget=budget.device,
        solve_seconds=solved,
        step_seconds=seconds,
        peaks=peaks,
        moved={lane: moved.get(lane, 0) for lane in LINKS},
        exact=not plan.changes_numbers,
    )
    return candidate, plan
