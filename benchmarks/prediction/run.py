"""Foretells a model's plans and runs them: one process a model, so that no run inherits another's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.case import BenchmarkError
from benchmarks.host import ROOT, hardware
from benchmarks.prediction.record import COMMAND, Comparison, Run
from benchmarks.prediction.rounds import ROUNDS, Foretold, Ran, beside, between, foretell, measure, run
from benchmarks.prediction.zoo import ZOO, Entry
from benchmarks.provenance import Timing
from forebay.budgets import Budget
from forebay.machine import Machine
from forebay.plans import Plan
from forebay.records import dump, load

if TYPE_CHECKING:
    from forebay.trace import Trace

__all__ = ["compare", "main"]

PLENTY = 8 << 30
"""Bytes: more than any model of the zoo takes."""

POLICIES = ("resident", "stream", "recompute", "stream-recompute")
"""Beside ``auto``, for the order of policies."""


@dataclass(frozen=True)
class _Runs:
    runs: tuple[Run, ...]


def compare(names: list[str], *, say: Callable[[str], None]) -> Comparison:
    """Runs the models of the zoo called ``names`` (all, if empty). A model that fails is named in the result."""
    entries = [entry for entry in ZOO if not names or entry.name in names]
    unknown = set(names) - {entry.name for entry in ZOO}
    if unknown:
        raise BenchmarkError(f"no model {', '.join(sorted(unknown))}; there are {', '.join(e.name for e in ZOO)}")
    timing = Timing(COMMAND + "".join(f" {name}" for name in names))
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
        for one in made:
            say(
                f"  {one.level:8} {one.policy:16} step {one.predicted.step_seconds:.3f} for "
                f"{one.measured.step_seconds:.3f} s ({one.step_error:+.1%}), device {one.device_error:+.2%}, host "
                f"{one.host_error:+.2%}; {one.plan}"
            )
    origin, here = timing.ended(), hardware(with_gpu=False)
    machine = f"{here.cpu}, {here.cores} cores"
    return Comparison(**origin, machine=machine, runs=tuple(runs), failed=tuple(failed))


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
    """All plans of ``entry``, each foretold and run once in every round. The first rates decide the plans."""
    from forebay.profiler.capture import capture

    captured = capture(entry.build(), entry.batch(), "adamw", "cpu")
    trace, machine = captured.trace, measure(captured)
    plans = list(_plans(trace, machine))
    pairs: list[list[tuple[Foretold, Ran]]] = [[] for _ in plans]
    before = [foretell(trace, machine, plan) for _, plan in plans]
    for _ in range(ROUNDS):
        ran = [run(entry, plan) for _, plan in plans]
        machine = measure(captured)
        after = [foretell(trace, machine, plan) for _, plan in plans]
        for found, *foretold, one in zip(pairs, before, after, ran, strict=True):
            found.append((between(*foretold), one))
        before = after
    for (level, plan), found in zip(plans, pairs, strict=True):
        yield beside(entry, level, plan, found)


def _plans(trace: Trace, machine: Machine) -> Iterator[tuple[str, Plan]]:
    """``auto`` with plenty, half and the least of device memory, and with plenty, where all of them fit, the other
    policies too if they give another plan; each with the name of its budget."""
    for level, nbytes in _levels(trace, machine):
        seen = []
        for policy in ("auto", *POLICIES) if level == "plenty" else ("auto",):
            plan = _plan(trace, machine, nbytes, policy)
            what = None if plan is None else (plan.placements, plan.streaming, plan.recompute, plan.activations)
            if plan is not None and what not in seen:
                seen.append(what)
                yield level, plan


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


if __name__ == "__main__":
    main(sys.argv[1])
