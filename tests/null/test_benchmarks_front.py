"""The table on the first screen of README.md: what it takes of the comparisons, and that it is the newest one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.activations.record import ARCHIVE, Comparison, Field, Row, State
from benchmarks.front import README, render, write
from benchmarks.host import Code, Hardware
from benchmarks.prediction.record import Figures

MIB = 1 << 20


def row(budget: int, device: int | None, *ratios: float, **more: object) -> Row:
    made = Row(f"auto {budget}", "auto", "", str(budget), budget * MIB, State.MEASURED, ratios=ratios, seconds=ratios)
    return replace(made, device=None if device is None else device * MIB, host=7 * MIB, **more)  # type: ignore[arg-type]


FIELD = Field(
    "small",
    4,
    100 * MIB,
    (
        row(50, 48, 1.0),
        row(20, 19, 1.1, 1.3, 1.2, predicted=Figures(19 * MIB, 0, 1.5)),
        row(10, None),  # was not timed
        replace(row(5, 5, 1.0), state=State.FAILED),
        replace(row(4, 4, 1.0), series="auto-activations"),
    ),
)
NEW = Comparison(
    date=datetime(2026, 1, 2, tzinfo=UTC),
    command="scripts/bench activations small",
    hardware=Hardware(cpu="Some CPU", cores=2, memory_bytes=2**34),
    versions={"torch": "2.13.0"},
    threads=2,
    other_cores=0.0,
    code=Code("0123456789abcdef", False, "fedc"),
    rounds=3,
    warmup=1,
    steps=2,
    fields=(FIELD,),
)


def test_a_row_is_the_least_memory_that_was_timed() -> None:
    text = render([NEW])
    assert "| small, batch 4 | 100 MiB | 19 MiB, 19% | 19 MiB | 7 MiB | 1.20 times (1.10 to 1.30) |" in text
    assert text.count("| small") == 1
    assert "Some CPU, 2 cores" in text and "`scripts/bench activations small` at 0123456, 2026-01-02" in text


def test_machines_are_not_mixed() -> None:
    other = replace(NEW, date=datetime(2025, 1, 1, tzinfo=UTC), hardware=Hardware("Another", 8, 2**36))
    assert render([other, NEW]) == render([NEW])


def test_the_readme_shows_the_newest_results(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_bytes(README.read_bytes())
    write(page)
    assert page.read_text() == README.read_text(), "run scripts/bench table"
    assert ARCHIVE.latest()
