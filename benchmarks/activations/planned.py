"""The plans that are run: made for every budget from one trace, in a process that ends before anything is timed.

Series
    ``auto``            what a user gets: activations, parameters and states are planned together.
    ``auto-activations`` parameters, gradients and states stay on the device, as in the rivals: of what ``auto`` decided
                        for the activations under any of the budgets, the fastest that fits then.
    policies            each baseline of ``forebay.planners`` with all the device memory that it asks for.
"""

from __future__ import annotations

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

__all__ = ["AUTO", "HERE", "POLICIES", "Candidate", "candidates", "never_slower", "same_plan"]

AUTO, HERE = "auto", "auto-activations"
POLICIES = ("recompute", "offload-all")
PLENTY = 64 << 30
"""Bytes: more than any of the models takes."""


@dataclass(frozen=True)
class Candidate:
    """A plan of one ``series`` for a budget of ``nbytes`` (None: all that it asks for), called ``label``, and what is
    foretold of it; or why there is none."""

    series: str
    label: str
    nbytes: int | None
    plan: Plan | None = None
    predicted: Figures | None = None
    refusal: str = ""

    @property
    def name(self) -> str:
        """Unique within a model."""
        return f"{self.series} {self.label}"


def candidates(
    model: ZooModel, batch: int, machine: Machine, budgets: Sequence[tuple[str, int]], timing_seconds: float
) -> tuple[Candidate, ...]:
    """Every series under ``budgets`` (label, bytes). Ops are timed one by one for ``timing_seconds`` beforehand."""
    import torch

    from forebay.profiler.capture import capture
    from forebay.profiler.stopwatch import ColdStopwatch
    from forebay.profiler.timing import TimingPolicy, time_ops

    captured = capture(model.build(0, "cpu"), model.batch(batch, 0, "cpu", seed=0), "adamw", "cpu")
    policy = TimingPolicy(total=timing_seconds)
    machine = time_ops(captured.trace, captured.calls, machine, torch.device("cpu"), ColdStopwatch(), policy)
    return tuple(_all(captured.trace, machine, budgets))


def same_plan(one: Plan, other: Plan) -> bool:
    """Whether a run of one is a run of the other."""
    return _decided(one) == _decided(other)


def _decided(plan: Plan) -> tuple[object, ...]:
    return plan.placements, plan.streaming, plan.recompute, plan.activations


def _all(trace: Trace, machine: Machine, budgets: Sequence[tuple[str, int]]) -> Iterator[Candidate]:
    from forebay.planners import PLANNERS, make_plan

    for policy in POLICIES:
        if policy in PLANNERS:
            yield _foretold(
                trace, machine, policy, "", None, lambda bench, policy=policy: make_plan(bench.problem, policy, bench)
            )
    levels: dict[Level, None] = {}
    for candidate in never_slower(
        [
            _foretold(trace, machine, AUTO, label, nbytes, lambda bench: make_plan(bench.problem, AUTO, bench))
            for label, nbytes in budgets
        ]
    ):
        if candidate.plan is not None:
            levels[_level(candidate.plan)] = None
        yield candidate
    for label, nbytes in budgets:
        yield _foretold(trace, machine, HERE, label, nbytes, lambda bench: _here(bench, list(levels)))


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

    bench = Bench(problem_of(trace, machine, Budget(PLENTY if nbytes is None else nbytes)))
    try:
        plan = make(bench)
    except DoesNotFit as refusal:
        return Candidate(series, label, nbytes, refusal=str(refusal).partition(". What would fit: ")[0])
    timeline, forecast = predict(trace, machine, plan, bench)
    peaks = {usage.tier: usage.peak for usage in timeline.tiers}
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
