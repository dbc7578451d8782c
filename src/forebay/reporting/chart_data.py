"""What the charts of a page draw, as JSON: columns of numbers, no more of them than a screen can show. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from forebay.memory import Kind, Tier
from forebay.reporting.losses import StepLine
from forebay.reporting.steps import Step, kinds_in, lanes_in
from forebay.timeline import Event, Lane, Level

__all__ = ["lane_data", "loss_data", "memory_data", "thinned"]

POINTS = 2_000
"""Points of a line; of more steps, each point is the mean of as many as it takes."""

EVENTS = 10_000
"""Events of a step that a page carries."""

DIGITS = 9
"""Of seconds: a nanosecond."""


def loss_data(lines: Sequence[StepLine], tokens_per_step: int | None, predicted: float | None) -> dict[str, Any]:
    """Loss and tokens per second over steps; ``predicted`` are tokens per second as the plan has them."""
    size = -(-len(lines) // POINTS) or 1
    groups = [lines[first : first + size] for first in range(0, len(lines), size)]
    speeds = [_mean(_speed(line, tokens_per_step) for line in group) for group in groups]
    return {
        "xs": [group[-1].step for group in groups],
        "loss": [_mean(line.loss for line in group) for group in groups],
        "speed": speeds,
        "predicted": predicted,
        "mean_of": size,
    }


def _speed(line: StepLine, tokens: int | None) -> float | None:
    return None if tokens is None or not line.seconds else tokens / line.seconds


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def memory_data(
    predicted: Mapping[Tier, Sequence[Level]],
    predicted_seconds: float,
    measured: Step | None,
    limits: Mapping[Tier, int | None],
) -> dict[str, Any]:
    """What each tier held over a step, as predicted (``predicted_seconds`` long) and as measured."""
    sides = {"predicted": (predicted, predicted_seconds)}
    if measured is not None:
        sides["measured"] = (measured.levels, measured.seconds)
    tiers = []
    for tier in Tier:
        found = {name: _side(levels[tier], seconds) for name, (levels, seconds) in sides.items() if levels.get(tier)}
        if any(any(side["high"]) for side in found.values()):
            tiers.append({"name": tier.value, "limit": limits.get(tier), **found})
    return {"kinds": [kind.value for kind in Kind], "tiers": tiers}


def _side(levels: Sequence[Level], seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, DIGITS),
        "times": [round(level.time, DIGITS) for level in levels],
        "high": [level.high for level in levels],
        "kinds": {kind.value: [level.live.get(kind, 0) for level in levels] for kind in kinds_in(levels)},
    }


def lane_data(predicted: Step | None, measured: Step | None) -> dict[str, Any]:
    """What each lane did, as predicted and as measured: an event is its lane, start, length, bytes and what it is."""
    words: dict[str, int] = {}
    steps = {"predicted": predicted, "measured": measured}
    lanes = lanes_in(steps.values())
    sides = {name: None if step is None else _events(step, lanes, words) for name, step in steps.items()}
    return {"names": [lane.value for lane in lanes], **sides, "words": list(words)}


def _events(step: Step, lanes: Sequence[Lane], words: dict[str, int]) -> dict[str, Any]:
    found = []
    for event in thinned(step.events, step.seconds, EVENTS):
        word = words.setdefault(event.what, len(words))
        length = event.end - event.start
        found.append([lanes.index(event.lane), round(event.start, DIGITS), round(length, DIGITS), event.nbytes, word])
    return {"seconds": round(step.seconds, DIGITS), "number": step.number + 1, "events": found}


def thinned(events: Sequence[Event], seconds: float, most: int) -> tuple[Event, ...]:
    """``events`` in order of their start, at most ``most`` of them: where there are more, those of a lane that begin in
    the same small part of the step are one, which says how many they are."""
    if len(events) <= most:
        return tuple(events)
    parts = max(1, most // len(Lane))
    groups: dict[tuple[Lane, int], list[Event]] = {}
    for event in events:
        part = min(parts - 1, int(event.start / seconds * parts)) if seconds > 0 else 0
        groups.setdefault((event.lane, part), []).append(event)
    return tuple(sorted((_one(group) for group in groups.values()), key=lambda event: event.start))


def _one(group: Sequence[Event]) -> Event:
    if len(group) == 1:
        return group[0]
    first, end = group[0], max(event.end for event in group)
    return Event(first.lane, first.start, end, sum(event.nbytes for event in group), f"{len(group)} events")
