"""The best plans of another kind, beside the one that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from forebay.errors import ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners.auto import searched
from forebay.planners.bench import Bench
from forebay.planners.policies import recompute, resident, stream, stream_recompute
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.units import format_bytes, format_seconds

__all__ = ["Alternative", "alternatives"]

MOST = 3
"""How many alternatives are named."""


@dataclass(frozen=True)
class Alternative:
    """Another plan that keeps every budget: the seconds of its step, its peaks in bytes, and a line in words."""

    plan: Plan
    step_seconds: float
    peaks: dict[Tier, int]
    words: str


def alternatives(problem: Problem, plan: Plan) -> tuple[Alternative, ...]:
    """The three fastest plans of another kind than ``plan``, the fastest first; fewer where fewer fit.

    Kinds differ in what recomputes (nothing, something, everything that may), in whether blocks stay on the device,
    and in whether something is on disk. Raises ``ConfigError`` for a problem without a trace.
    """
    if problem.trace is None:
        raise ConfigError("plans are compared by their simulated step; give a batch")
    bench = Bench(problem)
    found: dict[tuple[object, ...], Plan] = {}
    for other in _others(bench):
        kind = _kind(bench, other)
        if kind != _kind(bench, plan) and (kind not in found or _seconds(other) < _seconds(found[kind])):
            found[kind] = other
    fastest = sorted(found.values(), key=_seconds)[:MOST]
    return tuple(_alternative(other, plan) for other in fastest)


def _others(bench: Bench) -> Iterator[Plan]:
    """Every kind that fits."""
    problem = bench.problem
    able = bench.recomputable
    makers: list[Callable[[], Plan]] = [
        partial(policy, problem, bench) for policy in (resident, recompute, stream, stream_recompute)
    ]
    makers.append(partial(searched, bench, "auto without recomputation", [()]))
    if able:
        makers.append(partial(searched, bench, "auto with recomputation", [able]))
    for make in makers:
        try:
            yield make()
        except DoesNotFit:
            continue


def _kind(bench: Bench, plan: Plan) -> tuple[object, ...]:
    """What makes a plan different to its user."""
    resident = sum(p.resident for p in plan.placements)
    able = len(bench.recomputable)
    return (
        "all" if resident == len(plan.placements) else "some" if resident else "none",
        "all" if plan.recompute and len(plan.recompute) == able else "some" if plan.recompute else "none",
        plan.disk > 0,
    )


def _seconds(plan: Plan) -> float:
    return float("inf") if plan.step_seconds is None else plan.step_seconds


def _alternative(other: Plan, plan: Plan) -> Alternative:
    peaks = {Tier.DEVICE: other.device, Tier.HOST: other.host, Tier.PINNED: other.pinned, Tier.DISK: other.disk}
    seconds = _seconds(other)
    resident = sum(p.resident for p in other.placements)
    words = f"{other.planner}: {format_seconds(seconds)} a step"
    if plan.step_seconds:
        words += f" ({seconds / plan.step_seconds:.2f} times as long)"
    shown = (Tier.DEVICE, Tier.HOST, Tier.DISK)
    parts = [f"{format_bytes(peaks[tier])} on the {tier.value}" for tier in shown if peaks[tier]]
    words += f", {', '.join(parts)}; {resident} of {len(other.placements)} blocks stay on the device"
    if other.recompute:
        words += f", {len(other.recompute)} recompute"
    return Alternative(other, seconds, peaks, words)
