"""The benchmark of steps: what is asked of a trace, what is kept, the tables, what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.host import Code, Hardware
from benchmarks.traces import run
from benchmarks.traces.models import MODELS, Shape
from benchmarks.traces.record import ARCHIVE, Comparison, Played, Sorted, Way, latest
from benchmarks.traces.run import compare, played_in_words, sorted_in_words
from benchmarks.traces.table import render_orders, render_traces, write
from forebay.simulation.allocators import ALLOCATORS
from forebay.trace import Trace
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

LAYERS = ("one", "two", "three")
TRACE = chain_trace([block(name, ((64, 64), "float32", True)) for name in LAYERS], [Layer(name) for name in LAYERS])

PLAYED = Played("a", "2 x 8", Way.KEPT, 9, 1000, {"caching": 1500, "gmlake": 1100}, 1005, 0.5, 0.4)
SORTED = Sorted("a", "2 x 8", 20, 1000, 500, 500, 505, 0.25)


def comparison(*played: Played, sorted: tuple[Sorted, ...] = (), day: int = 22) -> Comparison:
    return Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command="scripts/bench traces",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"forebay": "0.1.0"},
        code=Code("abcdef", False, "123"),
        played=played,
        sorted=sorted,
    )


def test_a_step_is_played_and_put_into_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def traced(name: str, batch: int, seq: int) -> Trace:
        asked.append((name, batch, seq))
        return TRACE

    monkeypatch.setattr(run, "MODELS", {"a": Shape(4, 1024, traced)})
    said: list[str] = []
    found = compare([], "scripts/bench traces", said.append)
    assert asked == [("a", 4, 1024), ("a", 1, 128)] and len(said) == 4
    assert [row.way for row in found.played] == list(Way) and not any(row.missed for row in found.played)
    for row in found.played:
        assert set(row.reserved) == set(ALLOCATORS)
        assert row.live <= row.height <= min(row.reserved.values())
    assert all(row.bound <= row.found < row.program and row.found <= row.height for row in found.sorted)
    with pytest.raises(BenchmarkError, match="no model b"):
        compare(["b"], "", print)


def test_there_are_twelve_models_and_more() -> None:
    assert len(MODELS) >= 12 and str(MODELS["gpt2"]) == "4 x 1024" and str(MODELS["u-net"]) == "8 images"


def test_tables(tmp_path: Path) -> None:
    high = replace(PLAYED, way=Way.RECOMPUTED, height=1020)
    kept = (comparison(PLAYED, high, sorted=(SORTED,)), comparison(replace(PLAYED, height=1000), day=23))
    for one in kept:
        ARCHIVE.save(one, tmp_path)
    assert tuple(ARCHIVE.every(tmp_path)) == kept
    assert [len(rows) for rows in latest(kept)] == [2, 1]
    text = render_traces(kept)
    assert "| a, 2 x 8, as it is | 1000 B | 0.000% | 50.0% | 10.0% |\n" in text
    assert "More than 1% over: a, blocks recomputed." in text and "2026-11-23" in text
    assert "None is planned 1% over." in render_traces(kept[1:])
    assert "| a, 2 x 8 | 20 | 1000 B | 500 B | 0.50 | proven | 1.000% | 0.25 |\n" in render_orders(kept)
    assert "25.00%" in render_orders([comparison(sorted=(replace(SORTED, bound=400),))])
    assert render_traces([]) == render_orders([]) == "No comparison is kept yet.\n"
    assert "caching 50.0%" in played_in_words(PLAYED) and "500 at the least" in sorted_in_words(SORTED)
    pages = tmp_path / "one.md", tmp_path / "two.md"
    for page, name in zip(pages, ("traces", "orders"), strict=True):
        page.write_text(f"<!-- {name}: begin -->\nto be replaced\n<!-- {name}: end -->\nafter")
    write(*pages)
    assert all("to be replaced" not in page.read_text() and page.read_text().endswith("after") for page in pages)
