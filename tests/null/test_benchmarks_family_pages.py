"""The page of architectures: the newest answer for each, and where it is from. No torch."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.families.record import ARCHIVE, Comparison, Trained, Verdict, newest
from benchmarks.families.table import PAGE, render, write
from benchmarks.host import Code, Hardware

CAUSAL, IMAGES = "causal language modelling", "image classification"
FIRST = Comparison(
    date=datetime(2026, 11, 1, 12, tzinfo=UTC),
    command="scripts/bench families",
    hardware=Hardware("A processor", 2, 1 << 30),
    versions={"transformers": "5.0"},
    code=Code("0123456789abcdef", False, ""),
    trained=(
        Trained(CAUSAL, "llama", Verdict.OTHER, "", 1000, 4096),
        Trained(CAUSAL, "ibert", Verdict.REFUSED, "DeviceOutOfMemory: device memory: too little", 1000, 4096),
        Trained(IMAGES, "vit", Verdict.NOT_TRIED, "not small: 86,000,000 parameters"),
    ),
)
SECOND = replace(
    FIRST,
    date=datetime(2026, 11, 2, 12, tzinfo=UTC),
    command="scripts/bench families --names llama",
    trained=(Trained(CAUSAL, "llama", Verdict.SAME, "", 1000, 4096),),
)


def test_the_newest_answer_counts() -> None:
    assert [(one.name, one.verdict) for one in newest([FIRST, SECOND])] == [
        ("ibert", Verdict.REFUSED),
        ("llama", Verdict.SAME),
        ("vit", Verdict.NOT_TRIED),
    ]


def test_the_page_counts_and_names_all() -> None:
    page = render([FIRST, SECOND])
    assert "| causal language modelling | 1 | 0 | 1 | 0 |\n| image classification | 0 | 0 | 0 | 1 |" in page
    assert "- the same bits: `llama`\n" in page
    assert "- refused: `ibert`: DeviceOutOfMemory: device memory: too little\n" in page
    assert "other bits:" not in page
    assert page.count("`scripts/bench families") == 2 and "transformers 5.0" in page
    assert "`scripts/bench families`" not in render([replace(FIRST, trained=FIRST.trained[:1]), SECOND])


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    copy = tmp_path / PAGE.name
    copy.write_text(PAGE.read_text())
    write(copy)
    assert copy.read_text() == PAGE.read_text()


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    ARCHIVE.save(FIRST, tmp_path)
    assert ARCHIVE.every(tmp_path) == (FIRST,)
