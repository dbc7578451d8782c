"""One step out of a timeline: what every lane did in it, and what every tier held. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from forebay.memory import Kind, Tier
from forebay.timeline import Event, Lane, Level, Timeline, busy_of, moved_of

__all__ = ["KEPT_EVENTS", "Step", "for_keeping", "kinds_in", "lanes_in", "last_step", "seen_step", "typical_step"]

KEPT_EVENTS = 10_000
"""Events of a run that its folder keeps: those of its last steps."""


@dataclass(frozen=True)
class Step:
    """Step ``number`` (from 0) of a timeline, ``seconds`` long. Times of ``events`` and ``levels`` count from its
    start; an event that began before it, or ends after it, is cut there. The first level of a tier is that of its
    start."""

    number: int
    seconds: float
    events: tuple[Event, ...]
    levels: Mapping[Tier, tuple[Level, ...]] = field(default_factory=dict)

    def busy(self) -> dict[Lane, float]:
        """Seconds of the step during which each lane had something to do."""
        return busy_of(self.events)

    def moved(self) -> dict[Lane, int]:
        """Bytes of each lane's events; of one that is cut, the share that lies in the step."""
        return moved_of(self.events)


def kinds_in(levels: Sequence[Level]) -> list[Kind]:
    """Those of which any of ``levels`` has bytes."""
    return [kind for kind in Kind if any(level.live.get(kind) for level in levels)]


def lanes_in(steps: Iterable[Step | None]) -> list[Lane]:
    """Those that did anything in any of ``steps``."""
    used = {event.lane for step in steps if step is not None for event in step.events}
    return [lane for lane in Lane if lane in used]


def last_step(timeline: Timeline) -> Step | None:
    """The last step: of what is simulated, the one like all that would follow. None where there is no step."""
    spans = timeline.steps()
    return _cut(timeline, len(spans) - 1) if spans else None


def typical_step(timeline: Timeline) -> Step | None:
    """Of the steps whose events are all there, the one that took nearest to the median; the first step, which records
    the order of the blocks, only if it is the only one. None where there is none."""
    if not timeline.events:
        return None
    since = min(event.start for event in timeline.events)
    spans = timeline.steps()
    whole = [number for number, (start, _) in enumerate(spans) if start >= since]
    # The first forward begins the step and the first event alike: the clock is read for one and then the other.
    if not whole and spans:
        whole = [len(spans) - 1]
    usual = [number for number in whole if number] or whole
    if not usual:
        return None
    middle = median(timeline.step_seconds)
    return _cut(timeline, min(usual, key=lambda number: (abs(timeline.step_seconds[number] - middle), -number)))


def seen_step(timeline: Timeline) -> Step | None:
    """The last step of which the levels are known; None where there is none."""
    if not timeline.levels:
        return None
    first, last = timeline.levels[0].time, timeline.levels[-1].time
    for number, (start, end) in reversed(list(enumerate(timeline.steps()))):
        if start <= last and first <= end:
            return _cut(timeline, number)
    return None


def for_keeping(timeline: Timeline, most: int = KEPT_EVENTS) -> Timeline:
    """``timeline`` with the events of its last steps only, at most ``most`` of them; a last step that has more by
    itself is cut."""
    if len(timeline.events) <= most:
        return timeline
    least = sorted(event.start for event in timeline.events)[-most]
    since = min((start for start, _ in timeline.steps() if start >= least), default=least)
    kept = [event for event in timeline.events if event.start >= since]
    return replace(timeline, events=tuple(kept[-most:]))


def _cut(timeline: Timeline, number: int) -> Step:
    start, end = timeline.steps()[number]
    inside = (event for event in timeline.events if event.end > start and event.start < end)
    events = tuple(sorted((_clipped(event, start, end) for event in inside), key=lambda event: event.start))
    return Step(number, end - start, events, _levels(timeline.levels, start, end))


def _clipped(event: Event, start: float, end: float) -> Event:
    first, last = max(event.start, start), min(event.end, end)
    whole = event.end - event.start
    share = (last - first) / whole if whole > 0 else 1.0
    return replace(event, start=first - start, end=last - start, nbytes=round(event.nbytes * share))


def _levels(levels: Sequence[Level], start: float, end: float) -> dict[Tier, tuple[Level, ...]]:
    """Those from ``start`` to ``end``, tier by tier; what held at ``start`` is the first."""
    before: dict[Tier, Level] = {}
    inside: dict[Tier, list[Level]] = defaultdict(list)
    for level in levels:
        if level.time <= start:
            before[level.tier] = replace(level, time=0.0, high=sum(level.live.values()))
        elif level.time <= end:
            inside[level.tier].append(replace(level, time=level.time - start))
    found = {}
    for tier in (*before, *(tier for tier in inside if tier not in before)):
        first = (before[tier],) if tier in before else ()
        found[tier] = (*first, *inside[tier])
    return found
