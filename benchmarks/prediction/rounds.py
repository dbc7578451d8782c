"""Rounds: rates measured, every plan run; and again; and measured once more.

A shared host can become half as fast from one second to the next: the steps of one run, one after the other, lie 15 %
above and below their median. A step that is foretold with the rates of one moment and runs in another is then wrong for
a reason that is not the prediction's. So the runs of a round are foretold with the rates measured before them and with
those measured after them, and the mean counts; a run has enough steps for a median that some slow ones do not move; and
what counts of a plan is the median of its rounds. Nothing of a run is in what is foretold.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.prediction.record import Figures, Run
from benchmarks.prediction.zoo import Entry
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.plans import Plan

if TYPE_CHECKING:
    from forebay.profiler.capture import Captured
    from forebay.trace import Trace

__all__ = ["ROUNDS", "Foretold", "Ran", "beside", "between", "foretell", "measure", "measure_again", "run"]

ROUNDS = 4
WARM_STEPS, STEPS = 2, 5
OP_SECONDS = 6.0
LATER_ROUNDS = 4
"""Of a measurement of the disk between runs."""


@dataclass(frozen=True)
class Foretold:
    """What is predicted of a plan; ``measured_share`` of the seconds comes from ops that were measured."""

    figures: Figures
    measured_share: float


@dataclass(frozen=True)
class Ran:
    """What was measured of a plan in a round, and its steps in seconds."""

    figures: Figures
    seconds: tuple[float, ...]


def measure(captured: Captured, disk: str | None = None) -> Machine:
    """The machine now: the rates of its lanes, of the disk of the folder ``disk`` if one is named, and each distinct op
    of ``captured`` alone."""
    from forebay.profiler.probe import probe

    return _with_ops(captured, probe("cpu", disk=disk, refresh=True))


def measure_again(captured: Captured, machine: Machine) -> Machine:
    """``machine`` a while later: each distinct op of ``captured`` anew, and the disk, if there is one. The other lanes
    take so little of a step that their rates are those of before."""
    from forebay.device import open_device
    from forebay.profiler.disk_rates import measure_disk
    from forebay.profiler.effort import CPU_EFFORT

    if machine.disk is not None:
        device = open_device("cpu")
        try:
            found = measure_disk(device, machine.disk.path, replace(CPU_EFFORT, rounds=LATER_ROUNDS))
        finally:
            device.close()
        machine = replace(machine, disk=found.disk)
    return _with_ops(captured, machine)


def _with_ops(captured: Captured, machine: Machine) -> Machine:
    """``machine`` with each distinct op of ``captured`` alone, as it is now."""
    import torch

    from forebay.profiler.stopwatch import ColdStopwatch
    from forebay.profiler.timing import TimingPolicy, time_ops

    policy = TimingPolicy(total=OP_SECONDS)
    bare = replace(machine, op_seconds={})
    return time_ops(captured.trace, captured.calls, bare, torch.device("cpu"), ColdStopwatch(), policy)


def foretell(trace: Trace, machine: Machine, plan: Plan) -> Foretold:
    """``plan`` on ``machine``, without running it."""
    from forebay.planning import predict

    foretold, forecast = predict(trace, machine, plan)
    peaks = foretold.peaks
    figures = Figures(peaks.get(Tier.DEVICE, 0), peaks.get(Tier.HOST, 0), forecast.step_seconds)
    return Foretold(figures, forecast.measured_share)


def between(before: Foretold, after: Foretold) -> Foretold:
    """What is foretold of a run between two measurements of the machine: bytes do not differ, of seconds the mean."""
    seconds = (before.figures.step_seconds + after.figures.step_seconds) / 2
    measured_share = min(before.measured_share, after.measured_share)
    return Foretold(replace(before.figures, step_seconds=seconds), measured_share)


def run(entry: Entry, plan: Plan) -> Ran:
    """``plan`` for a few steps."""
    import torch

    import forebay

    model, batch = entry.build(), entry.batch()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = forebay.prepare(model, optimizer, batch, device_memory=plan.budget.device, plan=plan)
    try:
        for _ in range(WARM_STEPS + STEPS):
            # The output has a name, as a plan assumes: it lives on while the next forward runs.
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report = forebay.report(model)
    finally:
        forebay.close(model)
        gc.collect()
    seconds = report.timeline.step_seconds[WARM_STEPS:]
    peaks = report.measured_peaks()
    return Ran(Figures(peaks[Tier.DEVICE], peaks[Tier.HOST], median(seconds)), tuple(seconds))


def beside(entry: Entry, level: str, plan: Plan, rounds: Sequence[tuple[Foretold, Ran]]) -> Run:
    """The rounds of one plan as one line: the largest peaks measured, the medians of the seconds."""
    foretold, ran = ([pair[side].figures for pair in rounds] for side in (0, 1))  # type: ignore[union-attr]
    return Run(
        model=entry.name,
        kind=entry.kind,
        level=level,
        budget=plan.budget.device,
        policy=plan.planner,
        plan=plan.reasons[0] if plan.reasons else "",
        promised=plan.device,
        predicted=Figures(foretold[0].device, foretold[0].host, median(one.step_seconds for one in foretold)),
        measured=Figures(
            max(one.device for one in ran), max(one.host for one in ran), median(one.step_seconds for one in ran)
        ),
        seconds=tuple(seconds for _, each in rounds for seconds in each.seconds),
        measured_share=min(each.measured_share for each, _ in rounds),
        ratios=tuple(one.figures.step_seconds / other.figures.step_seconds for one, other in rounds),
    )
