"""Timelines as Chrome's Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. No torch.

Format: "Trace Event Format", Google, 2016. A process for each timeline, a thread for each lane (``X`` events, times in
microseconds), and a counter for each tier (``C`` events, bytes by kind).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.timeline import Lane, Level, Timeline

__all__ = ["chrome_trace"]

MICRO = 1e6


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """``timelines`` by name (predicted, measured) as one JSON object. Each begins at 0 with its first event."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), 1):
        events += _process(process, name, timeline)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _process(process: int, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    moments = [event.start for event in timeline.events] + [level.time for level in timeline.levels]
    first = min(moments, default=0.0)
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for thread, lane in enumerate(Lane, 1):
        if any(event.lane is lane for event in timeline.events):
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": lane.value}}
            yield {
                "ph": "M",
                "pid": process,
                "tid": thread,
                "name": "thread_sort_index",
                "args": {"sort_index": thread},
            }
    threads = {lane: thread for thread, lane in enumerate(Lane, 1)}
    for event in timeline.events:
        yield {
            "ph": "X",
            "pid": process,
            "tid": threads[event.lane],
            "ts": round(MICRO * (event.start - first), 3),
            "dur": round(MICRO * (event.end - event.start), 3),
            "name": event.what or event.lane.value,
            "cat": event.lane.value,
            "args": {"bytes": event.nbytes},
        }
    for number, (start, end) in enumerate(timeline.steps(), 1):
        if end > first:
            at, length = max(0.0, start - first), end - max(start, first)
            said = {"ts": round(MICRO * at, 3), "dur": round(MICRO * length, 3), "name": f"step {number}"}
            yield {"ph": "X", "pid": process, "tid": 0, "cat": "step", "args": {}, **said}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "thread_name", "args": {"name": "steps"}}
    yield from (_counter(process, level, first) for level in timeline.levels)


def _counter(process: int, level: Level, first: float) -> dict[str, Any]:
    held = {kind.value: nbytes for kind, nbytes in level.live.items() if nbytes} or {"nothing": 0}
    at = round(MICRO * (level.time - first), 3)
    return {"ph": "C", "pid": process, "ts": at, "name": f"{level.tier.value} bytes", "args": held}
