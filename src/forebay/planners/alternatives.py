"""The best plans of another kind, beside the one that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from forebay.errors import ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners.auto import searched
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT, Draft, Level
from forebay.planners.policies import POLICIES, settled
from forebay.planners.problem import Problem
from forebay.planners.reasons import kept, recomputed
from forebay.plans import Plan, Update
from forebay.units import format_bytes, format_seconds

__all__ = ["Alternative", "alternatives"]

MOST = 3
"""How many alternatives are named."""

ALIKE = 0.02
"""Figures that differ by no more than this share are the same: a prediction is off by more."""


@dataclass(frozen=True)
class Alternative:
    """Another plan that keeps every budget: the seconds of its step, its peaks in bytes, and a line in words."""

    plan: Plan
    step_seconds: float
    peaks: dict[Tier, int]
    words: str


def alternatives(problem: Problem, plan: Plan, bench: Bench | None = None) -> tuple[Alternative, ...]:
    """The three fastest plans of another kind than ``plan``, the fastest first; fewer where fewer fit.

    Kinds differ in what recomputes (nothing, something, everything that may), in whether blocks stay on the device,
    in whether something is on disk, in whether activations leave the device, and in whether there are second copies for
    updates ahead of their step, which only ``plan`` itself may have. One whose figures are those of ``plan``, or of a
    faster one, says nothing new and is left out. ``bench`` is that on which ``plan`` was made, if the caller has it:
    its sizes and simulations are used again. Raises ``ConfigError`` for a problem without a trace.
    """
    if problem.trace is None:
        raise ConfigError("plans are compared by their simulated step; give a batch")
    bench = bench or Bench(problem)
    mine = _kind(bench, Draft.of(plan))
    found: dict[tuple[object, ...], Plan] = {}
    for name, draft in _others(bench, plan):
        kind = _kind(bench, draft)
        if kind == mine:
            continue  # before it is timed chunk by chunk, which takes the most
        reasons = (*kept(draft), *recomputed(draft))
        other = bench.timed(bench.plan(name, draft, reasons=reasons))
        if kind not in found or _seconds(other) < _seconds(found[kind]):
            found[kind] = other
    different = [plan]
    for other in sorted(found.values(), key=_seconds):
        if not any(_alike(other, one) for one in different):
            different.append(other)
    return tuple(_alternative(other, plan) for other in different[1 : 1 + MOST])


def _alike(one: Plan, other: Plan) -> bool:
    """Whether two plans are the same to their user: as fast, with as much of every tier."""
    pairs = ((_seconds(one), _seconds(other)), *zip(_peaks(one).values(), _peaks(other).values(), strict=True))
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in pairs)


def _others(bench: Bench, plan: Plan) -> Iterator[tuple[str, Draft]]:
    """Every kind that fits, by name. ``auto`` does not search again at the recomputation that it chose: all of it, or
    none, was among the levels of its search."""
    able = bench.recomputable
    makers: list[tuple[str, Callable[[], Draft]]] = [
        (name, partial(settled, bench, make)) for name, make in POLICIES.items()
    ]
    levels = {"auto without recomputation": KEPT} | ({"auto with recomputation": Level(able)} if able else {})
    for name, level in levels.items():
        if plan.planner != "auto" or Draft.of(plan).level != level:
            makers.append((name, partial(searched, bench, [level], single_blocks=False)))
    if plan.updated(Update.AHEAD):
        makers.append((f"{plan.planner} without second copies", lambda: Draft.of(plan).updating(Update.AHEAD, ())))
    for name, make in makers:
        try:
            yield name, make()
        except DoesNotFit:
            continue


def _kind(bench: Bench, draft: Draft) -> tuple[object, ...]:
    """What makes a plan different to its user."""
    resident = len(draft.resident)
    able = len(bench.recomputable)
    return (
        "all" if resident == len(draft.placements) else "some" if resident else "none",
        "all" if draft.recompute and len(draft.recompute) == able else "some" if draft.recompute else "none",
        bench.arenas(draft).disk > 0,
        draft.streaming.host_activations + draft.streaming.disk_activations > 0,
        bool(draft.updated(Update.AHEAD)),
    )


def _peaks(plan: Plan) -> dict[Tier, int]:
    return {Tier.DEVICE: plan.device, Tier.HOST: plan.host, Tier.PINNED: plan.pinned, Tier.DISK: plan.disk}


def _seconds(plan: Plan) -> float:
    return float("inf") if plan.step_seconds is None else plan.step_seconds


def _alternative(other: Plan, plan: Plan) -> Alternative:
    peaks, seconds = _peaks(other), _seconds(other)
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
