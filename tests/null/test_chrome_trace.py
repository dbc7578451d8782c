"""Timelines as Chrome traces: what Perfetto reads."""

from __future__ import annotations

import json

from forebay.reporting.chrome_trace import chrome_trace
from forebay.timeline import Timeline
from tests.null.reported import MiB, measured, predicted


def test_a_process_for_each_timeline_and_a_thread_for_each_lane() -> None:
    found = json.loads(chrome_trace({"predicted": predicted(), "measured": measured()}))
    events = found["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["predicted", "measured"]
    assert sorted({name for (pid, _), name in named.items() if pid == 2}) == ["compute", "h2d", "steps", "update"]
    spans = [e for e in events if e["ph"] == "X"]
    assert all((e["pid"], e["tid"]) in named for e in spans)
    fetch = next(e for e in spans if e["pid"] == 2 and e["name"] == "fetch embed")
    assert (fetch["ts"], fetch["dur"], fetch["args"], fetch["cat"]) == (0.0, 500_000.0, {"bytes": 2 * MiB}, "h2d")
    steps = [(e["name"], e["ts"], e["dur"]) for e in spans if e["cat"] == "step" and e["pid"] == 2]
    assert steps == [("step 1", 0.0, 2e6), ("step 2", 3e6, 2e6)]


def test_bytes_are_counters() -> None:
    events = json.loads(chrome_trace({"measured": measured()}))["traceEvents"]
    counters = [(e["ts"], e["name"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters[1] == (3e6, "host bytes", {"state": 24 * MiB})
    assert counters[2] == (4e6, "device bytes", {"parameter": 2 * MiB, "activation": 3 * MiB})
    assert json.loads(chrome_trace({"nothing": Timeline((), ())}))["traceEvents"]
