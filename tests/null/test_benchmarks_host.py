"""The benchmarks of a fast host: what a row says, what the table says, and the loop that stands in for fio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.case import Account, BenchmarkError, LaneUse
from benchmarks.fasthost import accumulation, disk_step, hidden, rival, several, zero
from benchmarks.fasthost.record import ARCHIVE, Comparison, Row
from benchmarks.fasthost.run import Measured, compared, rotated
from benchmarks.fasthost.table import render, write
from benchmarks.host import ROOT, Code, Hardware

BASE = Row("base", "no step", (1.0, 2.0, 3.0), nbytes=4_000_000_000)
STEP = Row("step", "a step", (1.1, 2.1, 3.1), (1.1, 1.05, 1.03), 1.05, memory=3 << 20, note="noted")


def comparison(rows: tuple[Row, ...] = (BASE, STEP), other_cores: float = 0.0) -> Comparison:
    return Comparison(
        topic="hidden step",
        question="What does a step cost?",
        ratio="seconds over seconds",
        setting="a setting",
        date=datetime(2026, 11, 21, tzinfo=UTC),
        command="scripts/bench hidden",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"torch": "2.13.0"},
        threads=2,
        other_cores=other_cores,
        code=Code("abc", False, "def"),
        rows=rows,
        left_out=("fio: not installed",),
    )


def test_a_row_is_judged_by_the_median_of_its_rounds() -> None:
    assert (BASE.median_seconds, BASE.ratio, BASE.met) == (2.0, None, None)
    assert STEP.ratio == 1.05 and STEP.met is True
    assert Row("worse", "", (1.0,), (1.06,), 1.05).met is False
    assert Row("rate", "", (1.0,), (0.91,), 0.9, at_least=True).met is True
    assert Row("rate", "", (1.0,), (0.89,), 0.9, at_least=True).met is False


def test_table(tmp_path: Path) -> None:
    text = render([comparison()])
    # 4 GB in a median of 2 s.
    assert "| base | no step | 2.0000 |  |  |  | 2.00 |  |" in text
    assert "| step | a step; noted | 2.1000 | 1.050 | 1.030 - 1.100 | 1.05 or less: met |  | 3 MiB |" in text
    assert "Left out: fio: not installed." in text
    assert "1.05 or less |" in render([comparison(other_cores=0.5)])  # not judged
    assert ARCHIVE.save(comparison(), tmp_path).name == "host-20261121T000000Z-a-processor-2-cores.jsonl"
    assert ARCHIVE.latest(tmp_path) == (comparison(),)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- host: begin -->\nold\n<!-- host: end -->\n")
    write(readme)
    assert "\nold\n" not in readme.read_text()


def test_rounds_rotate_and_the_first_ones_do_not_count() -> None:
    order: list[str] = []

    def turn(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    turns = {"a": lambda: turn("a", 1.0), "b": lambda: turn("b", 2.0)}
    assert rotated(turns, 2, 1, lambda line: None) == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert order == ["a", "b", "b", "a", "a", "b"]
    order.clear()
    rotated(turns, 1, 1, lambda line: None, lambda: order.append("begin"))
    assert order == ["begin", "a", "b", "begin", "b", "a"]


def test_the_frame_keeps_what_was_measured_and_passes_errors_on() -> None:
    lines: list[str] = []
    found = Measured((BASE, Row("worse", "", (1.0,), (1.06,), 1.05)), "a setting", ("nobody",), {"fio": "3"})
    made = compared("topic", "?", "ratio", "command", lambda: found, keep=False, say=lines.append)
    assert (made.rows, made.left_out, made.versions["fio"]) == (tuple(found.rows), ("nobody",), "3")
    assert any("worse" in line and "MISSED" in line for line in lines)

    def fails() -> Measured:
        raise BenchmarkError("it failed")

    with pytest.raises(BenchmarkError, match="it failed"):
        compared("topic", "?", "ratio", "command", fails, keep=False, say=lines.append)


@pytest.mark.parametrize("verb", ["write", "read", "both"])
def test_the_loop_beside_fio_moves_every_byte(tmp_path: Path, verb: str) -> None:
    path, nbytes = tmp_path / "file", 12 * 4096
    path.write_bytes(bytes(nbytes))
    command = [sys.executable, "-m", "benchmarks.fasthost.raw", verb, str(path), str(nbytes), "8192", "2", "16384"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) > 0
    assert path.stat().st_size == nbytes
    pages = [any(path.read_bytes()[start : start + 4096]) for start in range(0, nbytes, 4096)]
    assert pages == {"read": [False] * 12, "write": [True] * 12, "both": [False] * 6 + [True] * 6}[verb]


def test_a_step_on_disk_is_held_against_both_floors() -> None:
    seconds = {"disk alone": [1.0, 1.0, 1.0], disk_step.RINGED: [1.5, 1.25, 1.25]}
    for times in disk_step.TIMES:
        seconds |= {f"compute {times}": [float(times)] * 3, f"step {times}": [1.5 + times] * 3}
    rows = {row.name: row for row in disk_step._rows(seconds, 1 << 30, "noted", "fio", "raw")}
    assert (
        rows[disk_step.RINGED].ratios == (1.5, 1.25, 1.25) and "36 MiB of buffers: raw" in rows[disk_step.RINGED].what
    )
    assert rows["step, 0 x disk"].ratios == (1.5, 1.5, 1.5) and rows["step, 0 x disk"].note.startswith("1.200 of")
    assert rows["step, 2 x disk"].ratios == (1.75, 1.75, 1.75) and rows["step, 2 x disk"].note.startswith("1.750 of")
    assert {way.block * max(way.depth, disk_step.RING // way.block) for way in disk_step._ways_of_ring()} == {
        disk_step.RING
    }


def test_a_step_on_disk_has_a_floor_of_its_own() -> None:
    """Where both take as long, the disk waits for the first block's backward, and forward for one update: the sum of
    what a block takes of both, five thirds of a block, for any number of blocks."""
    for layers in (18, 36, 54):
        assert disk_step.floor(layers, 2 / 3, 0.0, 1.0) == pytest.approx(1.0)
        assert disk_step.floor(layers, 2 / 3, 1.0, 1.0) == pytest.approx(1 + 5 / 3 / layers)
        assert disk_step.floor(layers, 2 / 3, 1.0, 0.0) == pytest.approx(1.0)
        assert 2 < disk_step.floor(layers, 2 / 3, 2.0, 1.0) < 2 * (1 + 5 / 3 / layers)
    assert disk_step.floor(18, 1.0, 1.0, 1.0) > 1.3  # all ahead: the first of forward are the last to be updated


def test_longer_models_have_rows_of_their_own() -> None:
    heat = hidden._Heat(56, 2)
    seconds = {"forward + backward": [1.0, 2.0], "speculative": [1.02, 2.08], hidden.ALL_CORES: [0.5, 1.0]}
    rows = {row.name: row for row in hidden._rows(seconds, "taken over", heat, 1)}
    assert rows["update on all cores, 56 blocks"].ratios == (0.5, 0.5)
    long = rows["speculative, never, 56 blocks"]
    assert long.ratios == pytest.approx((1.02, 1.04)) and long.met is True
    assert long.note == "50.0 ms over forward and backward, taken over"
    assert heat.shares.keys() == {"speculative"} and len(hidden._Heat(hidden.LAYERS, 2).shares) == 2


def test_wider_blocks_have_more_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same number of blocks, in slots of their own and streamed; the target is the same."""
    asked: list[tuple[int, list[tuple[int, bool]]]] = []

    def measured(elements: int, heats: Sequence[Sequence[hidden._Heat]], say: object) -> Measured:
        asked.append((elements, [(heat.layers, heat.own_slots) for (heat,) in heats]))
        return Measured([], "")

    monkeypatch.setattr(hidden, "_measured", measured)
    monkeypatch.setattr(hidden, "compared", lambda *args, keep, say: args[4]() and None)
    for compare in (hidden.compare_longer, hidden.compare_wider):
        compare("scripts/bench", quick=False, say=print)
    assert asked[1] == (2 * asked[0][0], [(hidden.LAYERS, True), (hidden.LAYERS, False)])
    assert hidden.TARGET == 1.05


def test_zero_compares_what_each_adds_to_plain() -> None:
    seconds = {
        "plain-fused": [0.9, 1.0, 1.1],
        "plain-again": [1.1, 1.0, 0.9],  # with the one before it: 1.0 in each round
        "deepspeed nvme": [1.4, 0.9, 2.0],
        "forebay nvme": [1.1, 1.0, 1.5],
    }
    memory = {"plain-fused": 3, "plain-again": 3, "deepspeed nvme": 4, "forebay nvme": 2}
    named = {contender.name: contender for contender in zero._contenders()}
    assert {"plain", *seconds} <= named.keys()
    (row,) = zero._row(named["forebay nvme"], seconds, memory)
    # In the second round DeepSpeed added nothing: there is no share of it.
    assert row.ratios == pytest.approx((0.25, 0.5)) and row.met is True
    assert row.note == "0.50 times DeepSpeed's memory"
    (plain,) = zero._row(named["plain-fused"], seconds, memory)
    assert plain.ratios == () and plain.target is None
    with pytest.raises(BenchmarkError, match="forebay nvme has losses"):
        zero._check(0, {"plain-fused": (1.0,), "forebay nvme": (1.1,)})


def test_a_build_of_extensions_that_never_ended_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "cpu_adam").mkdir()
    rival.check_unlocked(tmp_path)
    (tmp_path / "cpu_adam" / "lock").touch()
    with pytest.raises(BenchmarkError, match=r"cpu_adam/lock is there.* remove the file"):
        rival.check_unlocked(tmp_path)


def test_accumulation_compares_bytes_with_those_of_one_micro_batch() -> None:
    def account(there: int, back: int) -> Account:
        return Account(lanes={"h2d": LaneUse(there, 1.0, None), "d2h": LaneUse(back, 1.0, None)}, counters={"steps": 2})

    parameters = accumulation.LLAMA_16M.parameter_bytes
    accounts = {
        "plain": Account(),
        "one micro-batch": account(4 * parameters, 2 * parameters),
        "loop": account(32 * parameters, 16 * parameters),
        "accumulate": account(4 * parameters, 2 * parameters),
    }
    seconds = {"plain": [1.0], "one micro-batch": [0.5], "loop": [2.0], "accumulate": [1.5]}
    rows = {row.name: row for row in accumulation._rows(seconds, accounts)}
    assert (rows["loop"].ratio, rows["accumulate"].ratio, rows["accumulate"].met) == (8.0, 1.0, True)
    assert rows["accumulate"].note.startswith("2.00 times the parameters' bytes to the device, 1.00 times back; 0.750")
    with pytest.raises(BenchmarkError, match="round 3"):
        accumulation._check(3, (1.0,), (1.0000001,))


def test_several_compares_turns_with_one_after_the_other() -> None:
    seconds = {"sequence": [4.0, 5.0], "turns": [3.0, 3.0]}
    step = 1 / several.STEPS
    foretold = {"sequence": [2 * step, 5 * step], "turns": [6 * step, 2 * step]}
    sequence, turns = several._rows(several.SETTINGS[0], seconds, foretold)
    assert (sequence.ratio, turns.ratios) == (None, (0.75, 0.6))
    # Medians; of the times, those within each round.
    assert sequence.note == f"{4.5 * step:.3f} s a step of both, {3.5 * step:.3f} s foretold (1.50)"
    assert turns.note == f"{3 * step:.3f} s a step of both, {4 * step:.3f} s foretold (1.00)"
