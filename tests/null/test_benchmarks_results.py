"""Results of the benchmarks: what is kept of a race, and the table that shows it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import provenance
from benchmarks.case import BenchmarkError, Case
from benchmarks.host import Code, CpuMeter, Hardware
from benchmarks.measure import Score
from benchmarks.prediction import table as predictions
from benchmarks.prediction.record import ARCHIVE, COMMAND, Comparison, Figures, Run
from benchmarks.result import Result, collect, load_all, save
from benchmarks.table import render, write
from forebay.errors import ConfigError
from forebay.records import dump, load
from tests.null.benching import FACTS, FOREBAY, PLAIN, case_of, run

MACHINE = Hardware(cpu="Some CPU @ 2 GHz", cores=2, memory_bytes=2**34)


def result_of(scores: tuple[Score, ...], day: int = 1, case: Case | None = None) -> Result:
    origin = {
        "hardware": MACHINE,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "threads": 2,
        "other_cores": 0.01,
        "code": Code("0123456789abcdef", True, "fedcba9876543210"),
        "date": datetime(2026, 1, day, 12, 30, tzinfo=UTC),
        "command": "scripts/bench run fake",
    }
    return collect(case or case_of(PLAIN, FOREBAY), scores, FACTS, origin)


@pytest.fixture
def result() -> Result:
    return result_of(run(case_of(PLAIN, FOREBAY)))


def test_a_result_keeps_what_a_reader_needs_to_repeat_it(result: Result) -> None:
    kept = json.loads(dump(result))
    assert set(kept) == {
        "baseline", "case", "code", "command", "control", "date", "device", "facts", "hardware", "limit",
        "limit_seconds", "metric", "other_cores", "question", "rows", "schema", "shape", "subject", "target",
        "threads", "versions",
    }  # fmt: skip
    assert set(kept["hardware"]) == {"cpu", "cores", "memory_bytes", "gpu", "gpu_memory_bytes", "driver"}
    assert set(kept["code"]) == {"revision", "dirty", "sha256"}
    row = kept["rows"][1]
    assert set(row) == {
        "account", "alone", "budgets", "detail", "median_ratio", "median_seconds", "name", "outcome", "ratios",
        "seconds", "tokens_per_second", "what",
    }  # fmt: skip
    assert row["seconds"] == [1.5, 3.5, 5.5]
    assert row["tokens_per_second"] == 16 / 3.5
    assert row["account"]["lanes"]["h2d"] == {"nbytes": 2_000_000_000, "busy_seconds": 0.5, "bytes_per_second": 4e9}
    assert kept["limit_seconds"] == 0.5


def test_a_result_is_read_back_as_it_was(result: Result, tmp_path: Path) -> None:
    path = save(result, tmp_path)
    assert path.name == "fake-20260101T123000Z-some-cpu-2-ghz-2-cores.json"
    assert load_all(tmp_path) == [result]


def test_a_result_of_another_schema_is_refused(result: Result) -> None:
    with pytest.raises(ConfigError, match="schema 99"):
        load(Result, json.dumps(json.loads(dump(result)) | {"schema": 99}))


def test_the_table_shows_the_latest_and_forebays_result_before_it(result: Result) -> None:
    later = result_of(run(case_of(PLAIN, replace(FOREBAY, tail=0.0))), day=2)
    text = render([result, later])
    rows = [line for line in text.splitlines() if line.startswith(("| plain", "| forebay"))]
    assert rows == [
        "| plain: a script | 2.0000 | 1.000 | 1.000 - 1.000 | - | 8 | device 1 MiB | h2d 4.00 GB/s |",
        "| forebay: a script | 3.0000 | 1.250 | 1.000 - 1.500 | 1.500 | 5 | device 1 MiB | h2d 4.00 GB/s |",
    ]
    assert "Target 1.20 or less; measured 1.250: missed (plain: 1.000)." in text
    assert "plain alone, before the others were set up: 1.0000 s" in text
    assert "commit 0123456789ab with changes" in text
    assert "2026-01-02 12:30 UTC. `scripts/bench run fake`" in text


def test_a_run_on_a_crowded_host_is_not_judged(result: Result) -> None:
    text = render([replace(result, other_cores=0.7)])
    assert "measured 1.500: not judged, other processes kept 0.7 cores busy" in text


def test_cores_of_others_are_what_the_machine_did_and_we_did_not() -> None:
    busy, own, clock = iter((100.0, 130.0)), iter((5.0, 20.0)), iter((0.0, 10.0))
    meter = CpuMeter(busy=lambda: next(busy), own=lambda: next(own), clock=lambda: next(clock))
    assert meter.others() == 1.5


def test_the_table_keeps_a_row_that_ran_out_of_memory() -> None:
    text = render([result_of(run(case_of(PLAIN, replace(FOREBAY, fails_to_start=True))))])
    assert "| forebay: a script | out of memory | - | - | - | - | not measured | - |" in text
    assert "no ratio was measured" in text


def test_the_table_replaces_the_generated_part_only(result: Result, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
    write([result], page)
    once = page.read_text()
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    write([result], page)
    assert page.read_text() == once
    page.write_text("no markers")
    with pytest.raises(BenchmarkError, match="needs the lines"):
        write([result], page)


def test_figures_are_kept_of_code_that_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [Code("abc", False, "1"), Code("abc", False, "1"), Code("abc", True, "2")]
    monkeypatch.setattr(provenance, "code", lambda revision: states.pop(0))
    timing = provenance.Timing("scripts/bench run fake")
    fields = timing.ended(numba="0.68")
    assert fields["code"] == Code("abc", False, "1") and fields["versions"]["numba"] == "0.68"
    assert set(fields) | {"schema"} == {field.name for field in dataclasses.fields(provenance.TimedProvenance)}
    with pytest.raises(BenchmarkError, match="changed during the run"):
        timing.ended()
    assert timing.ended(kept=False)["code"] == Code("abc", False, "1")


def predicted(*models: str, command: str = COMMAND, day: int = 1) -> Comparison:
    figures = Figures(1 << 20, 1 << 20, 1.0)
    runs = [Run(m, "dense", "plenty", 1 << 30, "auto", "all", 1 << 20, figures, figures, (1.0,), 1.0) for m in models]
    return Comparison(
        date=datetime(2026, 1, day, tzinfo=UTC),
        command=command,
        hardware=MACHINE,
        versions={"python": "3.11.7"},
        code=Code("0123456789abcdef", False, "fedcba9876543210"),
        threads=2,
        other_cores=0.01,
        machine="some",
        runs=tuple(runs),
    )


def test_predictions_of_some_models_replace_none_in_the_table(tmp_path: Path) -> None:
    """They are kept, but another day's code and rates would stand beside those of the other models."""
    ARCHIVE.save(predicted("a", "b"), tmp_path)
    ARCHIVE.save(predicted("b", command=f"{COMMAND} b", day=2), tmp_path)
    assert len(ARCHIVE.every(tmp_path)) == 2
    text = predictions.render(ARCHIVE.latest(tmp_path))
    assert "| a | dense |" in text and text.count("| b | dense |") == 1 and text.count("### ") == 1
    assert predictions.render([]) == "No comparison is kept yet.\n"
