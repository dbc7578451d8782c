"""The plans that are run: made for every budget from one trace, in a process that ends before anything is timed.

Series
    ``auto``            what a user gets: activations, parameters and states are planned together.
    ``auto-activations`` parameters, gradients and states stay on the device, as in the rivals: of what ``auto`` decided
                        for the activations under any of the budgets, the fastest that fits then.
    ``auto-compiled``   ``auto`` for the model whose blocks are compiled one by one, beside rivals that are compiled: of
                        all their activation memory budgets, and of none, the one with which the step is foretold to
                        be the fastest.
    policies            each baseline of ``forebay.planners`` with all the device memory that it asks for.

The loop takes one backward a step, for everyone, and the plans are made for such a loop (``accumulates=False``): the
peaks of rivals, which are budgets here, are those of this loop too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.activations.models import ZooModel
from benchmarks.prediction.record import Figures
from forebay.budgets import Budget
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.plans import Plan

if TYPE_CHECKING:
    from forebay.planners import Bench
    from forebay.planners.parts import Level
    from forebay.trace import Trace

__all__ = [
    "AUTO",
    "BESIDE_COMPILED",
    "COMPILED_AUTO",
    "HERE",
    "POLICIES",
    "Candidate",
    "candidates",
    "fastest",
    "never_slower",
    "same_plan",
    "shares_beside",
]

AUTO, HERE, COMPILED_AUTO = "auto", "auto-activations", "auto-compiled"
BESIDE_COMPILED = "as compile"
"""Begins the labels of budgets that are the peaks of compiled rivals."""
POLICIES = ("recompute", "offload-all")
PLENTY = 64 << 30
"""Bytes: more than any of the models takes."""


@dataclass(frozen=True)
class Candidate:
    """A plan of one ``series`` for a budget of ``nbytes`` (None: all that it asks for), called ``label``, and what is
    foretold of it; or why there is none. ``share`` is the activation memory budget that blocks are compiled with."""

    series: str
    label: str
    nbytes: int | None
    plan: Plan | None = None
    predicted: Figures | None = None
    refusal: str = ""
    share: float = 1.0

    @property
    def name(self) -> str:
        """Unique within a model."""
        return f"{self.series} {self.label}"


def candidates(
    model: ZooModel, batch: int, machine: Machine, budgets: Sequence[tuple[str, int]], timing_seconds: float
) -> tuple[Candidate, ...]:
    """Every series under ``budgets`` (label, bytes); where all of them are peaks of compiled rivals, only that beside
    these. Ops are timed one by one for ``timing_seconds`` beforehand, compiled blocks as they are."""
    import torch

    from forebay.profiler.as_compiled import as_compiled
    from forebay.profiler.capture import capture
    from forebay.profiler.stopwatch import ColdStopwatch
    from forebay.profiler.timing import TimingPolicy, time_ops

    def timed(built: torch.nn.Module) -> tuple[Trace, Machine]:
        values = model.batch(batch, 0, "cpu", seed=0)
        captured = as_compiled(built, "cpu", lambda: capture(built, values, "adamw", "cpu"))
        policy = TimingPolicy(total=timing_seconds)
        known = replace(machine, op_seconds={**machine.op_seconds, **captured.seconds})
        return captured.trace, time_ops(
            captured.trace, captured.calls, known, torch.device("cpu"), ColdStopwatch(), policy
        )

    compiled = [one for one in budgets if one[0].startswith(BESIDE_COMPILED)]
    others = [one for one in budgets if one not in compiled]
    found: list[Candidate] = []
    if others or not compiled:
        found += _all(*timed(model.build(0, "cpu")), budgets)
    tried: list[Candidate] = []
    for share in shares_beside([label for label, _ in compiled]):
        torch.compiler.reset()
        trace, known = timed(model.build_compiled(0, "cpu", share))
        tried += [replace(_auto(trace, known, COMPILED_AUTO, *budget), share=share) for budget in compiled]
    return (*found, *fastest(tried))


def shares_beside(labels: Sequence[str]) -> list[float]:
    """The activation memory budgets of the compiled rivals whose peaks are the budgets called ``labels``, and none (1),
    the largest first; nothing where there are no such rivals."""
    shares = {float(label.removeprefix(BESIDE_COMPILED)) for label in labels}
    return sorted(shares | {1.0}, reverse=True) if shares else []


def fastest(tried: Sequence[Candidate]) -> Iterator[Candidate]:
    """Of those of ``tried`` for one budget the one that is foretold to be the fastest, the first of equals."""
    for label in dict.fromkeys(one.label for one in tried):
        own = [one for one in tried if one.label == label]
        yield min(own, key=lambda one: math.inf if one.predicted is None else one.predicted.step_seconds)


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether a run of one is a run of the other."""
    return _decided(one) == _decided(other)


def _decided(plan: Plan) -> tuple[object, ...]:
    return plan.placements, plan.streaming, plan.recompute, plan.activations, plan.compiled


def _all(trace: Trace, machine: Machine, budgets: Sequence[tuple[str, int]]) -> Iterator[Candidate]:
    from forebay.planners import PLANNERS, make_plan

    for policy in POLICIES:
        if policy in PLANNERS:
            yield _foretold(
                trace, machine, policy, "", None, lambda bench, policy=policy: make_plan(bench.problem, policy, bench)
            )
    levels: dict[Level, None] = {}
    for candidate in never_slower([_auto(trace, machine, AUTO, label, nbytes) for label, nbytes in budgets]):
        if candidate.plan is not None:
            levels[_level(candidate.plan)] = None
        yield candidate
    for label, nbytes in budgets:
        yield _foretold(trace, machine, HERE, label, nbytes, lambda bench: _here(bench, list(levels)))


def _auto(trace: Trace, machine: Machine, series: str, label: str, nbytes: int) -> Candidate:
    from forebay.planners import make_plan

    return _foretold(trace, machine, series, label, nbytes, lambda bench: make_plan(bench.problem, AUTO, bench))


def never_slower(asked: Sequence[Candidate]) -> Iterator[Candidate]:
    """``asked`` for several budgets, each with the plan for less where that is faster."""
    from forebay.planners.sweep import no_slower

    seconds = [None if one.predicted is None else one.predicted.step_seconds for one in asked]
    for place, own in zip(no_slower([one.nbytes or PLENTY for one in asked], seconds), asked, strict=True):
        found = asked[place]
        yield replace(own, plan=found.plan, predicted=found.predicted, refusal=found.refusal)


def _foretold(
    trace: Trace,
    machine: Machine,
    series: str,
    label: str,
    nbytes: int | None,
    make: Callable[[Bench], Plan],
) -> Candidate:
    """The plan that ``make`` finds, checked and simulated."""
    from forebay.planners import Bench
    from forebay.planning import predict, problem_of

    budget = Budget(PLENTY if nbytes is None else nbytes)
    bench = Bench(problem_of(trace, machine, budget, accumulates=False))
    try:
        plan = make(bench)
    except DoesNotFit as refusal:
        return Candidate(series, label, nbytes, refusal=str(refusal).partition(". What would fit: ")[0])
    timeline, forecast = predict(trace, machine, plan, bench)
    peaks = timeline.peaks
    figures = Figures(peaks.get(Tier.DEVICE, 0), peaks.get(Tier.HOST, 0), forecast.step_seconds)
    return Candidate(series, label, nbytes, plan, figures)


def _level(plan: Plan) -> Level:
    from forebay.planners.parts import Draft

    return Draft.of(plan).level


def _here(bench: Bench, levels: Sequence[Level]) -> Plan:
    """The fastest of ``levels`` with everything else on the device. Raises ``DoesNotFit``."""
    from forebay.planners.parts import all_resident

    drafts = [all_resident(bench.model, level) for level in levels]
    fitting = [draft for draft in drafts if bench.fits_device(draft)]
    if not fitting:
        needed = min(map(bench.device, drafts), default=0)
        raise DoesNotFit(
            f"parameters, gradients and states stay on the device and need {needed} bytes with the fewest activations",
            tier=Tier.DEVICE.value,
            needed=needed,
            allowed=bench.problem.limit(Tier.DEVICE),
        )
    return bench.timed(bench.plan(HERE, min(fitting, key=bench.seconds)))
