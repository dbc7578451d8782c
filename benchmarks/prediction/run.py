"""Foretells a model's plans and runs them: one process a model, so that no run inherits another's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.case import BenchmarkError
from benchmarks.host import ROOT, CpuMeter, code, hardware, versions
from benchmarks.prediction.record import Comparison, Figures, Run
from benchmarks.prediction.steady import measure, plain_seconds
from benchmarks.prediction.zoo import ZOO, Entry
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.plans import Budget, Plan
from forebay.records import dump, load

if TYPE_CHECKING:
    from forebay.trace import Trace

__all__ = ["compare", "main"]

WARM_STEPS, STEPS = 2, 5
PLENTY = 8 << 30
"""Bytes: more than any model of the zoo takes."""

POLICIES = ("resident", "stream", "recompute", "stream-recompute")
"""Beside ``auto``, for the order of policies."""


@dataclass(frozen=True)
class _Runs:
    runs: tuple[Run, ...]


def compare(names: list[str], *, say: Callable[[str], None]) -> Comparison:
    """Runs the models of the zoo called ``names`` (all, if empty). A model that fails is named in the result."""
    import torch

    entries = [entry for entry in ZOO if not names or entry.name in names]
    unknown = set(names) - {entry.name for entry in ZOO}
    if unknown:
        raise BenchmarkError(f"no model {', '.join(sorted(unknown))}; there are {', '.join(e.name for e in ZOO)}")
    meter, date, before = CpuMeter(), datetime.now(UTC), code()
    runs: list[Run] = []
    failed: list[str] = []
    for entry in entries:
        say(f"{entry.name}:")
        try:
            made = _in_a_process(entry)
        except BenchmarkError as error:
            failed.append(str(error))
            say(f"  {error}")
            continue
        runs += made
        for run in made:
            say(
                f"  {run.level:8} {run.policy:16} step {run.predicted.step_seconds:.3f} for "
                f"{run.measured.step_seconds:.3f} s ({run.step_error:+.1%}), plain {run.drift or 0:+.1%}, device "
                f"{run.device_error:+.2%}, host {run.host_error:+.2%}; {run.plan}"
            )
    here = hardware(False)
    if code() != before:
        raise BenchmarkError("sources or commit changed during the run; run it again, in a checkout nobody edits")
    return Comparison(
        date=date,
        command="scripts/bench predict" + "".join(f" {name}" for name in names),
        hardware=here,
        versions=versions(),
        threads=torch.get_num_threads(),
        other_cores=meter.others(),
        code=before,
        machine=f"{here.cpu}, {here.cores} cores",
        runs=tuple(runs),
        failed=tuple(failed),
    )


def _in_a_process(entry: Entry) -> tuple[Run, ...]:
    command = [sys.executable, "-m", "benchmarks.prediction.run", entry.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{entry.name} failed: {done.stderr.strip().splitlines()[-1]}")
    return load(_Runs, done.stdout.strip().splitlines()[-1]).runs


def main(name: str) -> None:
    """All runs of one model; the last line of the output is their JSON."""
    entry = next(entry for entry in ZOO if entry.name == name)
    print(json.dumps(json.loads(dump(_Runs(tuple(_runs(entry)))))))


def _runs(entry: Entry) -> Iterator[Run]:
    """``auto`` with plenty, half and the least of device memory, and with plenty, where all of them fit, the other
    policies too if they give another plan."""
    from forebay.profiler.capture import capture

    captured = capture(entry.build(), entry.batch(), "adamw", "cpu")
    trace, known = captured.trace, measure(entry, captured)
    before = known.after
    for level, nbytes in _levels(trace, known.machine):
        seen = []
        for policy in ("auto", *POLICIES) if level == "plenty" else ("auto",):
            plan = _plan(trace, known.machine, nbytes, policy)
            what = None if plan is None else (plan.placements, plan.streaming, plan.recompute, plan.activations)
            if plan is None or what in seen:
                continue
            seen.append(what)
            run = _run(entry, trace, known.machine, level, plan)
            after = plain_seconds(entry)
            yield replace(run, drift=known.drift((before + after) / 2))
            before = after


def _plan(trace: Trace, machine: Machine, nbytes: int, policy: str) -> Plan | None:
    from forebay.errors import DoesNotFit
    from forebay.planners import make_plan
    from forebay.planning import problem_of

    try:
        return make_plan(problem_of(trace, machine, Budget(nbytes)), policy)
    except DoesNotFit:
        return None


def _levels(trace: Trace, machine: Machine) -> Iterator[tuple[str, int]]:
    """The device budgets."""
    from forebay.errors import DoesNotFit
    from forebay.planners import make_plan
    from forebay.planning import problem_of

    plenty = make_plan(problem_of(trace, machine, Budget(PLENTY)), "resident").device
    try:
        least = make_plan(problem_of(trace, machine, Budget(1 << 16)), "auto").device
    except DoesNotFit as refusal:
        least = next(remedy.needed for remedy in refusal.nearest if remedy.what == "device")
    yield "plenty", PLENTY
    yield "half", (plenty + least) // 2
    yield "least", int(least * 1.02)


def _run(entry: Entry, trace: Trace, machine: Machine, level: str, plan: Plan) -> Run:
    """Foretells ``plan``, runs it, and puts both beside each other."""
    import torch

    import forebay
    from forebay.planning import predict

    foretold, forecast = predict(trace, machine, plan)
    peaks = {usage.tier: usage.peak for usage in foretold.tiers}
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
    seconds = report.timeline.step_seconds[WARM_STEPS:]
    measured = report.measured_peaks()
    return Run(
        model=entry.name,
        kind=entry.kind,
        level=level,
        budget=plan.budget.device,
        policy=plan.planner,
        plan=plan.reasons[0] if plan.reasons else "",
        promised=plan.device,
        predicted=Figures(peaks.get(Tier.DEVICE, 0), peaks.get(Tier.HOST, 0), forecast.step_seconds),
        measured=Figures(measured[Tier.DEVICE], measured[Tier.HOST], median(seconds)),
        seconds=tuple(seconds),
        measured_share=forecast.measured_share,
    )


if __name__ == "__main__":
    main(sys.argv[1])
