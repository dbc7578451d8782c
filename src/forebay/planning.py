"""From a trace, a machine and a budget to a report: plan, check, simulate, phases. Prints nothing, loads no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf

from forebay.arenas import arenas
from forebay.budgets import Budget, expect_disk
from forebay.calls import CHECKSUMS
from forebay.checking import check
from forebay.collector import collector_paused
from forebay.errors import (
    BudgetExceeded,
    CannotServe,
    DoesNotFit,
    ForebayError,
    ModelError,
    NoRoomTogether,
    PlanInvalid,
)
from forebay.figures import with_figures
from forebay.loss import Cut
from forebay.lowering import device_bound, lower
from forebay.machine import Machine
from forebay.memory import Tier, TierUsage
from forebay.phases import PhasePeaks, phases
from forebay.planners import Bench, Problem, alternatives, make_plan, make_room
from forebay.planners.parts import Draft, gives_up_nothing
from forebay.planners.room import Room
from forebay.planners.speculation import second_copies
from forebay.plans import Plan, Update, UpdateTime
from forebay.reporting.forecast import AccumulationForecast, Alternative, PlanReport, StepForecast
from forebay.simulation import Costs, Forecast, by_turns, in_turn, play, summarise, together
from forebay.timeline import Timeline
from forebay.trace import Footprint, Trace
from forebay.units import format_apart, format_bytes, format_seconds

__all__ = ["SEVERAL", "assess", "choose_plan", "choose_report", "problem_of"]

SEVERAL = "a loop of several backwards a step (--accumulate; what forebay.prepare plans for unless accumulates=False)"
"""What plans of one backward a step are not for, in words."""

GROWS = 16
"""One part in so many is more than the need for memory grows by when pieces of a loss become as large as they are under
a budget that meets it: a piece is a 64th of that at most, and its gradient as much."""

MOST_ALTERNATIVES = 4
"""Alternatives that a report names."""


def problem_of(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    compress: int = 0,
    update: UpdateTime = "step",
    disk_copies: int = 1,
    checksums: bool = CHECKSUMS,
    accumulates: bool = True,
) -> Problem:
    """What a planner is asked: ``trace`` on ``machine`` within ``budget``. What it leaves open is what is there.
    ``compress``, ``update``, ``disk_copies``, ``checksums``, ``accumulates``: see ``Problem``. Raises ``ConfigError``
    for ``checksums`` without a disk."""
    expect_disk(budget.disk, checksums=checksums)
    on_disk = 0
    if budget.disk is not None and machine.disk is not None:
        on_disk = machine.disk.capacity if budget.disk.nbytes is None else budget.disk.nbytes
    return Problem(
        model=trace.model,
        footprint=Footprint(0, 0, measured=False),  # the trace says it
        budget=budget,
        host_limit=machine.host_capacity if budget.host is None else budget.host,
        disk_limit=on_disk,
        state_names=trace.state_names,
        # On the cpu the update and the compute share the cores: beside each other both are slower.
        overlap_update=trace.device != "cpu",
        trace=trace,
        machine=machine,
        compress=compress,
        update=update,
        disk_copies=disk_copies,
        checksums=checksums,
        accumulates=accumulates,
    )


NOTABLE = 100
"""An output is spoken of where it is at least this part of the device's peak."""


def assess(
    model: str,
    trace: Trace,
    machine: Machine,
    budget: Budget,
    policy: str = "auto",
    notes: tuple[str, ...] = (),
    cut: Cut | None = None,
    compress: int = 0,
    micro_batches: int = 1,
    update: UpdateTime = "step",
    checksums: bool = CHECKSUMS,
) -> PlanReport:
    """Whether ``trace`` can be trained on ``machine`` within ``budget``, how, and how fast.

    ``model`` is its name in the report, ``notes`` what the report shall say beside. ``cut`` is how ``trace`` computes
    the loss, None: from all logits at once. ``compress``, ``update``, ``checksums``: see ``Problem``. There is room for
    ``micro_batches`` that pass the model together; with one, a step is one backward (``Problem.accumulates``). It is
    checked before it is reported. Raises ``UsageError`` for input that cannot be used, and ``ForebayError`` where that
    check finds a fault.
    """
    with collector_paused():
        several = micro_batches > 1
        problem = problem_of(trace, machine, budget, compress, update, checksums=checksums, accumulates=several)
        allowed = {tier: problem.limit(tier) for tier in Tier}
        if not machine.pinned_capacity:
            del allowed[Tier.PINNED]  # this device needs none
        notes = (*notes, *_less_than_allowed(budget, machine), *trace.notes)
        start = time.perf_counter()
        try:
            room = make_room(problem, policy, micro_batches, lambda asked, bench: make_plan(asked, policy, bench))
        except DoesNotFit as refusal:
            report = PlanReport(model, machine.name, policy, allowed, time.perf_counter() - start, notes=notes)
            return replace(report, alternatives=_nearest(refusal), reasons=(_why(refusal),))
        report = PlanReport(model, machine.name, room.plan.planner, allowed, time.perf_counter() - start, notes=notes)
        return _filled(report, room, trace, machine, cut, micro_batches)


def _filled(
    report: PlanReport, room: Room, trace: Trace, machine: Machine, cut: Cut | None, micro_batches: int
) -> PlanReport:
    """``report``, which has no plan yet, with the one of ``room``."""
    bench, notes, allowed = room.bench, report.notes, report.budgets
    plan = replace(room.plan, fingerprint=trace.fingerprint)
    timeline, forecast = _own(plan.planner, lambda: predict(trace, machine, plan, bench))
    peaks = timeline.peaks
    found = phases(trace, plan, {tier: peaks.get(tier, 0) for tier in Tier})
    plan = replace(plan, step_seconds=forecast.step_seconds)
    settled = with_figures(trace, machine, plan, liveness=bench.liveness, micro_batches=micro_batches)
    accumulation = None if micro_batches == 1 else _accumulated(settled, room, micro_batches)
    if accumulation is not None and settled.accumulation is None:
        notes = (*notes, "nothing streams: forebay.accumulate is the loop over the micro-batches")
    elif accumulation is not None and (why := in_turn(trace)):
        notes = (*notes, f"forward {why}: together too, micro-batches pass it one by one, as in the loop")
    if cut is not None:
        settled = cut.of(settled)
    return replace(
        report,
        plan=settled,
        step=_step(forecast),
        tiers=tuple(_limited(usage, allowed) for usage in timeline.tiers),
        second_copies=second_copies(bench, Draft.of(plan)),
        phases=found,
        accumulation=accumulation,
        alternatives=_instead(bench, plan),
        reasons=settled.reasons,
        notes=(
            *notes,
            *forecast.notes,
            *settled.notes,
            *_passing(found, allowed[Tier.HOST]),
            *_unheld(bench.problem, plan),
            *_kept_in_place(bench.problem, plan),
            *_named(trace, peaks),
            *_once(bench, plan),
        ),
    )


def _accumulated(plan: Plan, room: Room, micro_batches: int) -> AccumulationForecast:
    """What the micro-batches take together under ``plan``, that of ``room`` with its figures, and one by one under the
    plan that has all the room for one at a time."""
    costs, liveness, needs = room.bench.costs, room.bench.liveness, plan.accumulation
    alone = plan
    if room.alone_bench is not room.bench:
        alone = with_figures(costs.trace, costs.machine, room.alone, liveness=room.alone_bench.liveness)
    loop = by_turns(alone, costs, micro_batches, liveness=liveness)
    found = loop if needs is None else together(plan, costs, micro_batches, liveness=liveness)
    peaks = plan.peaks(micro_batches)
    return AccumulationForecast(micro_batches, found.seconds, found.moved, peaks, loop.seconds, loop.moved)


def choose_plan(
    plain: Callable[[], Plan], chunked: Callable[[Cut, float], Plan], find: Callable[[int | None], Cut | str]
) -> Plan:
    """The plan of ``plain``, or the one of ``chunked`` where it gains by that and gives the same bits.

    ``chunked`` is told of how many seconds a step has to take less for its plan to be of use. ``find`` says how the
    loss would be cut under so many bytes of the device (None: those allowed), or why not. It is not asked, and
    ``chunked`` is not made, where that could gain nothing; nor is ``chunked`` where the bits are not known to be the
    same: whoever wants it asks for it. Raises what ``plain`` raises where there is no plan.
    """
    try:
        first = plain()
    except CannotServe:
        raise  # whatever the loss takes
    except DoesNotFit as refusal:
        cut = find(None)
        if isinstance(cut, str):
            raise
        if not cut.exact:
            text = f"{refusal}; loss='chunked' takes {format_bytes(cut.piece)} of logits at a time instead of "
            text += f"{format_bytes(cut.logits)}, and may round otherwise"
            raise DoesNotFit(
                text, tier=refusal.tier, needed=refusal.needed, allowed=refusal.allowed, nearest=refusal.nearest
            ) from refusal
        try:
            return chunked(cut, inf)
        except ModelError:  # the model's loss is not one to be cut
            raise refusal from None
        except NoRoomTogether as other:
            # One at a time fits: which of the two plans that is for is the same question.
            if isinstance(refusal, NoRoomTogether) and not _is_faster(other.alone, refusal.alone):
                raise refusal from None
            raise
        except DoesNotFit as other:
            raise _when_allowed(refusal, other, cut, chunked, find) from None
    if gives_up_nothing(first) or isinstance(cut := find(None), str) or not cut.exact:
        return first
    try:
        second = chunked(cut, _to_beat(first))
    except (DoesNotFit, ModelError):
        return first
    return second if _is_faster(second, first) else first


def _when_allowed(
    plain: DoesNotFit,
    pieces: DoesNotFit,
    cut: Cut,
    chunked: Callable[[Cut, float], Plan],
    find: Callable[[int | None], Cut | str],
) -> DoesNotFit:
    """What is to be answered where neither all logits at once (``plain``) nor pieces as in ``cut`` have room: who
    allows what ``pieces`` asks for is given larger pieces, or none."""
    if pieces.tier != Tier.DEVICE.value:
        return pieces
    larger = find(pieces.needed + pieces.needed // GROWS)
    if isinstance(larger, str):
        return plain
    if larger.piece == cut.piece:
        return pieces
    try:
        chunked(larger, inf)
    except DoesNotFit as more:
        return more
    return pieces


def _to_beat(plan: Plan) -> float:
    """Seconds of a step that a search compares with those of its drafts: of several micro-batches it knows none."""
    return inf if plan.accumulation is not None or plan.step_seconds is None else plan.step_seconds


def _is_faster(plan: Plan, other: Plan) -> bool:
    return (_seconds(plan) or inf) < (_seconds(other) or 0.0)


def _seconds(plan: Plan) -> float | None:
    """Of a step of as many micro-batches as the plan was asked for."""
    count = 1 if plan.accumulation is None else plan.accumulation.micro_batches
    return plan.seconds_of_step(count, count)


def _in_pieces(plain: PlanReport, chunked: PlanReport, cut: Cut) -> Iterator[Alternative]:
    """What would do for ``chunked``, which does not fit either: the nearest, and tiles, if ``plain`` has them not."""
    rounded = "" if cut.exact else " (it may round otherwise)"
    known = {other.words for other in plain.alternatives}
    for number, other in enumerate(chunked.alternatives):
        if other.words not in known and (number == 0 or "--tile " in other.words):
            yield replace(other, words=f"--loss chunked{rounded} with {other.words}")


def choose_report(plain: PlanReport, chunked: PlanReport, cut: Cut) -> PlanReport:
    """The report that a user is given of the two: ``chunked`` where it gains and gives the same bits; else ``plain``,
    with the other one as an alternative if it gains."""
    spent = plain.solve_seconds + chunked.solve_seconds
    seconds = [inf if report.seconds is None else report.seconds for report in (plain, chunked)]
    if not plain.fits and not chunked.fits:
        return replace(plain, solve_seconds=spent, alternatives=(*plain.alternatives, *_in_pieces(plain, chunked, cut)))
    if not chunked.fits or seconds[1] >= seconds[0]:
        return replace(plain, solve_seconds=spent)
    if cut.exact:
        why = "with all logits at once nothing fits" if not plain.fits else f"it would be {format_seconds(seconds[0])}"
        why = f"the loss in pieces is chosen by itself: {why}" + (" a step with all at once" if plain.fits else "")
        return replace(chunked, solve_seconds=spent, reasons=(*chunked.reasons, why))
    words = (
        f"--loss chunked: {format_seconds(seconds[1])} a step, {format_bytes(chunked.peak(Tier.DEVICE))} on the device"
    )
    peaks = {tier: chunked.peak(tier) for tier in Tier}
    other = Alternative(f"{words}; it may round otherwise", seconds[1], peaks)
    return replace(plain, solve_seconds=spent, alternatives=(other, *plain.alternatives))


def predict(trace: Trace, machine: Machine, plan: Plan, bench: Bench | None = None) -> tuple[Timeline, Forecast]:
    """What happens under ``plan``, proven to be right, and the same in a few figures.

    ``bench`` is the one that made the plan, if the caller has it: what it has proven and played is not done again.
    Raises what ``checking.check`` raises.
    """
    if bench is None:
        program, costs = lower(trace, plan), Costs(trace, machine, plan.streaming.masters)
        timeline = play(program, costs, settled=not plan.streaming.overlap_update)
        check(trace, machine, plan, program)
        return timeline, summarise(timeline, program, costs)
    bench.prove(plan)
    program, timeline = bench.played(plan)
    return timeline, summarise(timeline, program, bench.costs)


def _own(policy: str, prediction: Callable[[], tuple[Timeline, Forecast]]) -> tuple[Timeline, Forecast]:
    """The prediction for a plan that was made here: what is wrong with it is not the user's to put right."""
    try:
        return prediction()
    except (PlanInvalid, DoesNotFit, BudgetExceeded) as error:
        raise ForebayError(
            f"this is a fault of forebay: the plan that policy {policy} made was rejected when checked: {error}. "
            f"Another policy may work; please report the command and this message"
        ) from error


def _step(forecast: Forecast) -> StepForecast:
    return StepForecast(
        seconds=forecast.step_seconds,
        low=forecast.low,
        high=forecast.high,
        tokens_per_second=forecast.tokens_per_second,
        limit_seconds=forecast.limit_seconds,
        binding=forecast.binding,
        limits=forecast.limits,
        busy=forecast.busy,
        moved=forecast.moved,
        disk_written=forecast.disk_written,
        measured_share=forecast.measured_share,
    )


def _limited(usage: TierUsage, allowed: Mapping[Tier, int]) -> TierUsage:
    return replace(usage, limit=allowed.get(usage.tier))


def _nearest(refusal: DoesNotFit) -> tuple[Alternative, ...]:
    return tuple(Alternative(remedy.words) for remedy in refusal.nearest[:MOST_ALTERNATIVES])


def _why(refusal: DoesNotFit) -> str:
    """The refusal without what would fit: that has a place of its own."""
    return str(refusal).partition(". What would fit: ")[0] if refusal.nearest else str(refusal)


def _instead(bench: Bench, plan: Plan) -> tuple[Alternative, ...]:
    found = alternatives(bench.problem, plan, bench)[:MOST_ALTERNATIVES]
    return tuple(Alternative(other.words, other.step_seconds, other.peaks) for other in found)


def _less_than_allowed(budget: Budget, machine: Machine) -> tuple[str, ...]:
    """What the budget allows and the machine does not have."""
    asked = [
        ("device memory", budget.device, machine.device_capacity),
        ("host memory", budget.host, machine.host_capacity),
    ]
    if budget.disk is not None and machine.disk is not None:
        asked.append(("disk", budget.disk.nbytes, machine.disk.capacity))
    return tuple(
        f"{format_bytes(wanted)} of {what} are allowed and {machine.name} has {format_bytes(there)}"
        for what, wanted, there in asked
        if wanted is not None and wanted > there
    )


def _passing(found: Mapping[str, PhasePeaks], allowed: int) -> tuple[str, ...]:
    """Which phases pass bytes through more of the host than is ``allowed``."""
    over = {name: peaks.host + peaks.beside - allowed for name, peaks in found.items()}
    over = {name: nbytes for name, nbytes in over.items() if nbytes > 0}
    if not over:
        return ()
    named = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in over.items())
    return (
        f"for a moment some phases take more of the host than is allowed: {named}; no budget counts it: lower "
        f"host_memory by as much to stay below",
    )


def _unheld(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """That checksums were asked for and ``plan`` has nothing that they are of."""
    if not problem.checksums or any(p.on_disk for p in plan.placements):
        return ()
    return ("no parameters and no states are on disk: checksums have nothing to hold",)


def _kept_in_place(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """What of the disk it takes that no save copies what ``plan`` has there."""
    if not any(p.on_disk for p in plan.placements) or plan.updated(Update.STORAGE):
        return ()
    streaming = replace(plan.streaming, disk_copies=2)
    needed = arenas(problem.model, plan.placements, streaming, problem.state_names).disk
    asked, allowed = format_apart(needed, problem.limit(Tier.DISK))
    where = "saved on its way (forebay train --run --save-every, crash_safe)"
    if needed > problem.limit(Tier.DISK):
        return (f"{where} it copies what is on disk: to leave that there would take {asked} and {allowed} are allowed",)
    return (f"{where} it takes {asked} of the disk, and no save copies what is there",)


def _named(trace: Trace, peaks: Mapping[Tier, int]) -> tuple[str, ...]:
    """What a loop holds of the step before by naming its output, where that is something."""
    nbytes = trace.held_nbytes
    if nbytes * NOTABLE < peaks.get(Tier.DEVICE, 0):
        return ()
    words = "is for a loop that still names a step's output while the next forward runs (output = model(**batch))"
    return (f"{format_bytes(nbytes)} of the device {words}; forebay train lets go of it before",)


def _once(bench: Bench, plan: Plan) -> tuple[str, ...]:
    """What ``plan``, for a loop of one backward a step, lacks for one of several, where that is something."""
    if plan.accumulates:
        return ()
    further = device_bound(bench.costs.trace, replace(plan, accumulates=True), liveness=bench.liveness) - plan.device
    if further * NOTABLE < plan.device:
        return ()
    return (f"{SEVERAL} takes {format_bytes(further)} more of the device: gradients that stay, beside all activations",)
