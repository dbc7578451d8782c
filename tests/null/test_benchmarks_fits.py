"""The benchmark of sets that are known to fit: how they are made, what is kept of one, the table, what is refused."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.archive import Archive
from benchmarks.case import BenchmarkError
from benchmarks.fits import run
from benchmarks.fits.record import ARCHIVE, LIMIT, Comparison, Fitted, latest
from benchmarks.fits.run import compare, fitted, in_words, sets_of
from benchmarks.fits.table import render, write
from benchmarks.host import Code, Hardware
from benchmarks.layout.unseen import SEEDS, STYLES, unseen
from forebay.buffers import Buffer, BufferSet


def row(name: str = "a-1", cpsat: bool = False, found: bool = True, seconds: float = 0.5) -> Fitted:
    return Fitted(name, name[0], 200, cpsat, found, seconds, seconds + 1.0)


def comparison(*rows: Fitted, day: int = 22) -> Comparison:
    return Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command="scripts/bench fits",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"forebay": "0.1.0"},
        code=Code("abcdef", False, "123"),
        rows=rows,
    )


@pytest.mark.parametrize("style", STYLES)
def test_sets_are_tight_and_made_again_alike(style: str) -> None:
    given = unseen(style, SEEDS[0])
    assert given == unseen(style, SEEDS[0]) != unseen(style, SEEDS[1])
    assert given.capacity is not None and 100 <= len(given.buffers) <= 500
    assert 0.9 * given.capacity <= given.lower_bound <= given.capacity
    area = sum(one.size * (one.upper - one.lower) for one in given.buffers)
    assert 0.8 * given.capacity**2 <= area <= given.capacity**2


def test_files_say_their_capacity(tmp_path: Path) -> None:
    file = tmp_path / "A.12.csv"
    file.write_text("id,lower,upper,size\na,0,2,12\n")
    (one,) = sets_of([file], ())
    assert (one.name, one.style, one.buffers) == ("A", "from files", BufferSet((Buffer("a", 0, 2, 12),), 12))
    for name, match in (("A.csv", "A.1048576.csv"), ("none.12.csv", "cannot read")):
        with pytest.raises(BenchmarkError, match=match):
            list(sets_of([file.rename(tmp_path / name) if name == "A.csv" else tmp_path / name], ()))
    with pytest.raises(BenchmarkError, match="no style grwn here; did you mean grown"):
        list(sets_of((), ["grwn"]))
    assert len(list(sets_of((), ["powers"]))) == len(SEEDS)


def test_a_set_is_laid_out_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    really = subprocess.run

    def answered(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "layout" not in command:
            return really(command, **options)
        asked.append(command)
        told = {"feasible": len(asked) == 1, "solve_seconds": 0.25}
        return subprocess.CompletedProcess(command, len(asked) - 1, json.dumps(told), "it broke")

    monkeypatch.setattr(subprocess, "run", answered)
    monkeypatch.setattr(run, "cpsat_is_there", lambda: True)
    monkeypatch.setattr(run, "SEEDS", SEEDS[:1])
    kept = compare((), ["powers"], (False, True), "", lambda line: None).rows
    assert [(one.name, one.cpsat, one.found, one.solve_seconds) for one in kept] == [
        ("powers-1000", False, True, 0.25),
        ("powers-1000", True, False, 0.25),
    ]
    assert "sys.modules['ortools'] = None" in asked[0][2] and asked[1][1:3] == ["-m", "forebay"]
    assert asked[0][-2:] == ["60", "--json"] and "1048576" in asked[0]
    with pytest.raises(BenchmarkError, match="powers-1000: it broke"):
        fitted(next(sets_of((), ["powers"])), True)
    monkeypatch.setattr(run, "cpsat_is_there", lambda: False)
    with pytest.raises(BenchmarkError, match="--without-ortools"):
        compare((), [], (True,), "", print)


def test_each_style_is_kept_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[Path], tuple[str, ...], str]] = []

    def compared(
        files: list[Path], styles: tuple[str, ...], ways: tuple[bool, ...], command: str, say: object
    ) -> Comparison:
        if len(asked) == 2:
            raise BenchmarkError("it broke")
        asked.append((files, styles, command))
        return replace(comparison(row()), command=command)

    kept: list[Comparison] = []

    def keep(archive: object, one: Comparison) -> Path:
        kept.append(one)
        return tmp_path

    monkeypatch.setattr(run, "compare", compared)
    monkeypatch.setattr(Archive, "save", keep)
    first, second = tuple(STYLES)[:2]
    assert main(["fits", "--without-ortools"]) == 1 and "it broke" in capsys.readouterr().err
    assert [styles for _, styles, _ in asked] == [(first,), (second,)]
    assert [one.command for one in kept] == [
        f"scripts/bench fits --styles {style} --without-ortools" for style in (first, second)
    ]
    del asked[:]
    assert main(["fits", "--styles", second, "grwn"]) == 1 and not asked
    assert main(["fits", "A.12.csv", "B.12.csv"]) == 0
    assert asked == [([Path("A.12.csv"), Path("B.12.csv")], (), "scripts/bench fits A.12.csv B.12.csv")]


def test_a_machine_without_ortools(tmp_path: Path) -> None:
    file = tmp_path / "A.12.csv"
    file.write_text("id,lower,upper,size\na,0,2,5\nb,1,3,7\n")
    one = fitted(next(sets_of([file], ())), cpsat=False)
    assert one.found and one.buffers == 2 and 0 <= one.solve_seconds < one.seconds


def test_table(tmp_path: Path) -> None:
    kept = (
        comparison(row(), row("a-2", seconds=3.0), row("a-2", cpsat=True), row("b-1", found=False, seconds=LIMIT)),
        comparison(replace(row(), solve_seconds=0.25), day=23),
    )
    for one in kept:
        ARCHIVE.save(one, tmp_path)
    assert tuple(ARCHIVE.every(tmp_path)) == kept
    assert len(latest(kept)) == 4
    text = render(kept)
    assert (
        "| a | 200 to 200 | 2 of 2, 1 within 1 s; median 1.62, longest 3.00 s | "
        "1 of 1, 1 within 1 s; median 0.50, longest 0.50 s |\n"
    ) in text
    assert "| b | 200 to 200 | 0 of 1 |  |\n" in text and "Not found in 60 s: b-1.\n" in text
    assert "commit abcdef; 2026-11-23" in text and "All are found" in render(kept[1:])
    assert "NOT FOUND" in in_words(row(found=False)) and "with OR-Tools: fits" in in_words(row(cpsat=True))
    place = tmp_path / "layout.md"
    place.write_text("<!-- fits: begin -->\nto be replaced\n<!-- fits: end -->\nafter")
    write(place)
    assert "to be replaced" not in place.read_text() and place.read_text().endswith("after")
    assert render([]) == "No comparison is kept yet.\n"
