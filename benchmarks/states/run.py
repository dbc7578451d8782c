"""Plans of all policies for states, each foretold, run, and foretold again with the rates that were there afterwards.

A shared host can become half as fast from one second to the next, and so can its disk. So all plans run in rounds, one
after the other, and what most of a step's seconds are from, ops and the disk, is measured anew behind each round: what
counts in a round is the mean of what the measurements before and behind it foretell (as in ``prediction.rounds``), and
of the rounds the median.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Final

from benchmarks.case import BenchmarkError, among
from benchmarks.host import ROOT
from benchmarks.prediction.rounds import measure, measure_again
from benchmarks.prediction.zoo import ZOO, Entry
from benchmarks.provenance import Timing
from benchmarks.states.record import LEVELS, Comparison, Figures, Refused, Run, Same
from forebay.budgets import Budget, DiskBudget
from forebay.errors import DoesNotFit, ForebayError
from forebay.figures import with_figures
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import INEXACT, STATES, make_plan
from forebay.planning import problem_of
from forebay.plans import Plan
from forebay.records import dump, load
from forebay.simulation import simulate
from forebay.timeline import Timeline, busy_of, typical_seconds
from forebay.units import GiB

if TYPE_CHECKING:
    import torch

    from forebay.reporting.run import RunReport
    from forebay.trace import Trace

__all__ = ["MODELS", "compare", "main"]

MODELS: Final = ("llama-16m", "t5-18m", "mixtral-24m")
"""Of the zoo: a decoder, an encoder-decoder, a mixture of experts."""

POLICIES: Final = ("auto", *STATES, *INEXACT)

GROUPED: Final = {"harmony": 2, "mobius": 2}
"""Micro-batches of those who have nothing to group in fewer."""

WARM_STEPS, STEPS = 2, 4
"""Where blocks are updated in turns there are so many more that both are whole rounds."""
LR = 1e-5

ROOMY = 1.25
"""Of the least device memory with which ``zero-offload``, which keeps all parameters there, can do: what is given."""

PLENTY = 8 * GiB
"""More than any of the models takes."""


@dataclass(frozen=True)
class _Part:
    """What the process of one model answers."""

    kind: str
    runs: tuple[Run, ...]
    refused: tuple[Refused, ...]
    same: tuple[Same, ...]


@dataclass(frozen=True)
class _Ran:
    """One run of a plan."""

    report: RunReport
    losses: tuple[float, ...]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Of the steps that count."""
        return self.report.timeline.step_seconds[_steps(self.report.plan)[0] :]

    @property
    def typical_seconds(self) -> float:
        """Of one of them."""
        return typical_seconds(self.step_seconds, self.report.plan.streaming.update_every)


@dataclass(frozen=True)
class _Asked:
    """The plan of ``policy`` within the budgets called ``level``."""

    level: str
    policy: str
    plan: Plan
    micro_batches: int


def compare(
    name: str,
    policies: Sequence[str],
    levels: Sequence[str],
    folder: Path,
    command: str,
    rounds: int,
    say: Callable[[str], None],
) -> Comparison:
    """The model called ``name`` under ``policies`` within the budgets of ``levels`` (none: all), in a process of its
    own, its disk in ``folder``."""
    among("model", [name], MODELS)
    chosen, within = among("policy", policies, POLICIES), among("memory", levels, LEVELS)
    if rounds < 1:
        raise BenchmarkError(f"there is 1 round or more, got {rounds}")
    timing = Timing(command)
    told = [name, str(folder), str(rounds), ",".join(within), *chosen]
    arguments = [sys.executable, "-m", "benchmarks.states.run", *told]
    # It says on stderr how far it is: that takes minutes.
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{name} failed, for the reason above")
    part = load(_Part, done.stdout.strip().splitlines()[-1])
    for run in part.runs:
        say(in_words(run))
    for other in part.same:
        say(f"  {other.level:5} {other.policy:24} the plan of {' '.join(reversed(other.run))}")
    for one in part.refused:
        say(f"  {one.level:5} {one.policy:24} {one.reason}")
    found = {"runs": part.runs, "refused": part.refused, "same": part.same}
    return Comparison(**timing.ended(), model=name, kind=part.kind, **found)


def in_words(run: Run) -> str:
    """A line about ``run``."""
    rounds = ", ".join(f"{ratio - 1:+.0%}" for ratio in run.ratios)
    equal = "" if run.as_plain else ", other losses than plain PyTorch's"
    return (
        f"  {run.level:5} {run.policy:24} {run.predicted.step_seconds:.3f} s foretold, {run.measured.step_seconds:.3f} "
        f"measured ({run.error:+.1%}; rounds {rounds}){equal}"
    )


def main(name: str, folder: str, rounds: int, levels: Sequence[str], policies: Sequence[str]) -> None:
    """All runs of one model; the last line of the output is their JSON."""
    entry = next(entry for entry in ZOO if entry.name == name)
    print(json.dumps(json.loads(dump(_part(entry, folder, rounds, levels, policies)))))


def _part(entry: Entry, folder: str, rounds: int, levels: Sequence[str], policies: Sequence[str]) -> _Part:
    """All plans of ``entry``, each foretold and run once in every round. The first rates decide the plans."""
    from forebay.profiler.capture import capture

    captured = capture(entry.build(), entry.batch(), "adamw", "cpu")
    trace, machine = captured.trace, measure(captured, folder)
    refused: list[Refused] = []
    same: list[Same] = []
    asked = list(_plans(trace, machine, folder, levels, policies, refused, same))
    plain = {count: _plain(entry, count) for count in {one.micro_batches for one in asked}}
    first = [simulate(trace, machine, one.plan, micro_batches=1) for one in asked]
    foretold, ran = [[_seconds(trace, machine, one) for one in asked]], []
    for _ in range(rounds):
        ran.append([_run(entry, *each, folder) for each in zip(asked, foretold[-1], strict=True)])
        machine = measure_again(captured, machine)
        foretold.append([_seconds(trace, machine, one) for one in asked])
    around = [[mean(pair) for pair in zip(*moments, strict=True)] for moments in pairwise(foretold)]
    rows = zip(asked, first, zip(*around, strict=True), zip(*ran, strict=True), strict=True)
    runs = [_beside(*row, plain[row[0].micro_batches]) for row in rows]
    return _Part(entry.kind, tuple(runs), tuple(refused), tuple(same))


def _plans(
    trace: Trace,
    machine: Machine,
    folder: str,
    levels: Sequence[str],
    policies: Sequence[str],
    refused: list[Refused],
    same: list[Same],
) -> Iterator[_Asked]:
    """The plans of ``policies`` within the budgets of ``levels``; those that are the same are there once, under the
    name that came first."""
    try:
        make_plan(problem_of(trace, machine, Budget(1)), "zero-offload")
        raise BenchmarkError("zero-offload fits on a device of one byte")
    except DoesNotFit as refusal:
        device = int(ROOMY * refusal.needed)
    disk = DiskBudget(folder, PLENTY // 4)
    ample = Budget(device, PLENTY, None, disk)
    host = make_plan(problem_of(trace, machine, ample), "zero-infinity").host - trace.model.parameter_nbytes
    budgets = dict(zip(LEVELS, (ample, replace(ample, host=host)), strict=True))
    seen: list[tuple[object, tuple[str, str]]] = []
    for level, budget in ((level, budgets[level]) for level in levels):
        for policy in policies:
            count = GROUPED.get(policy, 1)
            try:
                plan = _planned(trace, machine, budget, policy, count)
            except DoesNotFit as refusal:
                refused.append(Refused(level, policy, str(refusal)))
                continue
            what = count, plan.placements, plan.streaming, plan.recompute, plan.activations
            first = next((key for known, key in seen if known == what), None)
            if first is not None:
                same.append(Same(level, policy, first))
                continue
            seen.append((what, (level, policy)))
            yield _Asked(level, policy, plan, count)


def _planned(trace: Trace, machine: Machine, budget: Budget, policy: str, micro_batches: int) -> Plan:
    """Raises ``DoesNotFit``. A plan with delayed updates delays them in the steps that are timed."""
    import forebay

    plan = forebay.plan(trace, machine, budget, policy, micro_batches=micro_batches)
    if plan.streaming.delay_after is None:
        return plan
    return replace(plan, streaming=replace(plan.streaming, delay_after=WARM_STEPS - 1))


def _seconds(trace: Trace, machine: Machine, asked: _Asked) -> float:
    """What a step under the plan takes on ``machine``."""
    plan, count = replace(asked.plan, step_seconds=None), asked.micro_batches
    seconds = with_figures(trace, machine, plan, micro_batches=count).seconds_of_step(count, count)
    if seconds is None:
        raise BenchmarkError(f"nothing is foretold of {asked.policy}")
    return seconds


def _steps(plan: Plan) -> tuple[int, int]:
    """How many steps are taken before those that count, and how many count."""
    every = plan.streaming.update_every
    return -(-WARM_STEPS // every) * every, -(-STEPS // every) * every


def _run(entry: Entry, asked: _Asked, foretold: float, folder: str) -> _Ran:
    """The plan for a few steps; says on stderr what it took beside what was ``foretold`` at first."""
    import torch

    import forebay

    model, batch, budget, count = entry.build(), entry.batch(), asked.plan.budget, asked.micro_batches
    made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    disk = None if budget.disk is None else f"{folder}:{budget.disk.nbytes}"
    budgets = {"device_memory": budget.device, "host_memory": budget.host, "disk": disk}
    model, optimizer = forebay.prepare(
        model, made, batch, **budgets, plan=asked.plan, device="cpu", micro_batches=count
    )
    losses = []
    try:
        for _ in range(sum(_steps(asked.plan))):
            losses.append(_take(model, batch, count))
            optimizer.step()
            optimizer.zero_grad()
        forebay.synchronize(model)
        report = forebay.report(model)
    finally:
        forebay.close(model)
        gc.collect()
    ran = _Ran(report, tuple(losses))
    took = ran.typical_seconds
    print(f"  {asked.level} {asked.policy}: {foretold:.3f} s foretold, {took:.3f} s", file=sys.stderr, flush=True)
    return ran


def _take(model: torch.nn.Module, batch: dict[str, torch.Tensor], micro_batches: int) -> float:
    """Forward and backward of a step; returns the loss."""
    import forebay

    if micro_batches == 1:
        # The output has a name, as a plan assumes: it lives on while backward runs.
        output = model(**batch)
        output.loss.backward()
        return float(output.loss.detach())
    losses = forebay.accumulate(model, [batch] * micro_batches, lambda model, batch: model(**batch).loss)
    return sum(float(loss) for loss in losses)


def _plain(entry: Entry, micro_batches: int) -> tuple[float, ...]:
    """The losses of plain PyTorch."""
    import torch

    model, batch = entry.build(), entry.batch()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, fused=True), []
    for _ in range(WARM_STEPS + STEPS):
        losses.append(_take(model, batch, micro_batches))
        optimizer.step()
        optimizer.zero_grad()
    return tuple(losses)


def _beside(
    asked: _Asked, first: Timeline, foretold_seconds: Sequence[float], rounds: Sequence[_Ran], plain: tuple[float, ...]
) -> Run:
    """The rounds of one plan, each with its seconds foretold, as one line: the largest peaks measured, the medians
    of the seconds."""
    plan, count = asked.plan, asked.micro_batches
    reports = [ran.report for ran in rounds]
    peaks = plan.peaks(count)
    foretold = first.peaks if count == 1 else peaks
    measured = {tier: max(report.measured_peaks().get(tier, 0) for report in reports) for tier in Tier}
    seconds = [ran.typical_seconds for ran in rounds]
    return Run(
        level=asked.level,
        policy=asked.policy,
        device=plan.budget.device,
        host=plan.budget.host or 0,
        micro_batches=count,
        promised=(peaks[Tier.DEVICE], peaks[Tier.HOST], peaks[Tier.DISK]),
        predicted=_figures(median(foretold_seconds), foretold),
        measured=_figures(median(seconds), measured),
        seconds=tuple(one for ran in rounds for one in ran.step_seconds),
        ratios=tuple(own / told for own, told in zip(seconds, foretold_seconds, strict=True)),
        busy=_busy(first, reports[-1].timeline) if count == 1 else {},
        exact=not plan.changes_numbers,
        as_plain=all(ran.losses[: len(plain)] == plain for ran in rounds),
    )


def _figures(seconds: float, peaks: dict[Tier, int]) -> Figures:
    return Figures(seconds, peaks.get(Tier.DEVICE, 0), peaks.get(Tier.HOST, 0), peaks.get(Tier.DISK, 0))


def _busy(foretold: Timeline, measured: Timeline) -> dict[str, tuple[float, float]]:
    """Of every lane with anything to do in the last step the seconds in which it had."""
    sides = []
    for timeline in (foretold, measured):
        start, end = timeline.steps()[-1]
        inside = [
            replace(event, start=max(event.start, start), end=min(event.end, end))
            for event in timeline.events
            if event.end > start and event.start < end
        ]
        sides.append(busy_of(inside))
    return {lane.value: (sides[0][lane], sides[1][lane]) for lane in sides[0] if sides[0][lane] or sides[1][lane]}


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","), sys.argv[5:])
    except ForebayError as error:
        sys.exit(str(error))
