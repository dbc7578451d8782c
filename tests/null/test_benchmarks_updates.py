"""The benchmark of updates: who runs when, what is computed from the seconds, what the table says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import final

import pytest

from benchmarks.host import Code, Hardware
from benchmarks.updates.record import ARCHIVE, BASELINE, MEMORY, Comparison, Row
from benchmarks.updates.table import render, write
from benchmarks.updates.turns import STEPS, Contender, race

HARDWARE = Hardware("a processor", 2, 1 << 34)


def comparison(**changes: object) -> Comparison:
    fields = {
        "date": datetime(2026, 11, 21, tzinfo=UTC),
        "command": "scripts/bench update",
        "hardware": HARDWARE,
        "versions": {"torch": "2.13.0"},
        "threads": 2,
        "elements": 1_000_000,
        "other_cores": 0.0,
        "code": Code("abc", False, "def"),
        "rows": (
            Row(MEMORY, 8, (0.0004, 0.0004, 0.0004)),
            Row(BASELINE, 28, (0.002, 0.003, 0.004)),
            Row("forebay", 28, (0.001, 0.002, 0.008)),
        ),
        "left_out": ("DeepSpeedCPUAdam: none",),
    }
    return Comparison(**{**fields, **changes})  # type: ignore[arg-type]


def test_figures_of_a_row() -> None:
    made = comparison()
    row = made.row("forebay")
    assert row.parameters_per_second(made.elements) == 1e6 / 0.002
    assert row.bytes_per_second(made.elements) == 28e6 / 0.002
    assert made.ratios(row) == pytest.approx((2.0, 1.5, 0.5))
    with pytest.raises(KeyError):
        made.row("nobody")


def test_table(tmp_path: Path) -> None:
    text = render([comparison()])
    # 28 MB in 2 ms are 14 GB/s; memory did 8 MB in 0.4 ms, 20 GB/s.
    assert "| forebay | 28.00 | 500 | 14.0 | 0.70 | 1.50 | 0.50 - 2.00 |" in text
    assert f"| {MEMORY} | 8.00 | 2,500 | 20.0 | 1.00 |  |  |" in text
    assert "Left out: DeepSpeedCPUAdam: none." in text and "cores busy" not in text
    assert "0.50 cores busy with others" in render([comparison(other_cores=0.5)])
    assert ARCHIVE.save(comparison(), tmp_path).name == "update-20261121T000000Z-a-processor-2-cores.jsonl"
    assert ARCHIVE.latest(tmp_path) == (comparison(),)
    second = comparison(other_cores=0.5)  # begun in the same second
    assert ARCHIVE.save(second, tmp_path).name == "update-20261121T000000Z-a-processor-2-cores-2.jsonl"
    assert sorted(one.other_cores for one in ARCHIVE.every(tmp_path)) == [0.0, 0.5]
    readme = tmp_path / "README.md"
    readme.write_text("<!-- updates: begin -->\nold\n<!-- updates: end -->\n")
    write(readme)
    assert "old" not in readme.read_text()


def test_everyone_takes_turns_in_rotating_order() -> None:
    order: list[str] = []
    now = [0.0]

    @final
    class Script(Contender):
        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.bytes_per_parameter, self._seconds = name, 1.0, seconds

        def step(self) -> None:
            order.append(self.name)
            now[0] += self._seconds

    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    seconds = race([Script("a", 1.0), Script("b", 2.0)], 2, clock)
    assert seconds == [[1.0, 1.0], [2.0, 2.0]]
    turns = order[:: STEPS + 1]
    assert turns == ["a", "b", "b", "a"] and len(order) == 4 * (STEPS + 1)
