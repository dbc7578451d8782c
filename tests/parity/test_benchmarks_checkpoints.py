"""The benchmark of saves: every contender takes the same steps, and saves what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fasthost import checkpoints
from benchmarks.fasthost.checkpoints import TARGET, _rows, _Saves, _subjects, _sure
from benchmarks.fasthost.timed import TimedModel
from forebay.checkpoint.files import SystemFiles
from forebay.checkpoint.generations import Generations
from forebay.machine import Curve, Disk, Link

ELEMENTS = 64 * TimedModel.WIDTH


def test_every_contender_takes_the_same_steps_and_saves_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LAYERS", 3)
    link = Link(Curve(((4096, 1e9),)))
    saves = _Saves(tmp_path / "in place")
    subjects = _subjects(tmp_path, ELEMENTS, Disk(1 << 30, link, link), saves)
    try:
        for stepped in subjects.values():
            stepped.turn(2)
        losses = [stepped.losses for stepped in subjects.values()]
        assert all(one == losses[0] for one in losses) and len(set(losses[0])) == len(losses[0])
        states = 3 * ELEMENTS * 12
        for name, copied in (("in place", 0), ("copied", states)):
            manifest = Generations(tmp_path / name, SystemFiles()).expect_current()
            assert manifest.generation == len(losses[0])
            assert (manifest.homes is None) == bool(copied)
            assert copied <= sum(file.nbytes for file in manifest.files) <= copied + 4096
        call, beside = saves.rows(1)
        assert (
            len(call.seconds) == len(beside.seconds) == len(losses[0]) and "before the next update call" in beside.note
        )
        assert not any(row.seconds for row in saves.rows(2))
    finally:
        for stepped in subjects.values():
            stepped.close()


def test_ratios_are_to_the_run_that_saves_nothing_in_the_same_round() -> None:
    seconds = {"never": [2.0, 4.0], "in place": [2.04, 4.12], "again": [1.0, 2.0], "copied": [3.0, 6.0]}
    rows = {row.name: row for row in _rows(seconds | {"ahead": [0.5, 1.0]}, 1, 1000, [])}
    row = rows["in place, 1 x disk"]
    assert row.ratios == (1.02, 1.03) and row.target == TARGET and row.met and not row.note
    assert rows["copied, 1 x disk"].ratios == (3.0, 3.0)
    assert rows["ahead, 1 x disk"].ratios == (0.5, 0.5)
    assert not rows["no save, 1 x disk"].ratios


def test_what_a_few_rounds_say_of_a_median() -> None:
    assert _sure([1.0] * 5) is None  # all on one side with 1 in 16
    assert _sure([float(n) for n in range(6)]) == (0.0, 5.0)  # 1 in 32
    # Tables of the sign test: of 20 the 6th and the 15th, of 24 the 7th and the 18th.
    assert _sure([float(n) for n in range(20, 0, -1)]) == (6.0, 15.0)
    assert _sure([float(n) for n in range(1, 25)]) == (7.0, 18.0)
