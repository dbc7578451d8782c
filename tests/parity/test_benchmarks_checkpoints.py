"""The benchmark of saves: every contender takes the same steps, and saves what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fasthost import checkpoints
from benchmarks.fasthost.checkpoints import TARGET, TIMES, _rows, _subjects
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
    subjects = _subjects(tmp_path, ELEMENTS, Disk(1 << 30, link, link))
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
    finally:
        for stepped in subjects.values():
            stepped.close()


def test_ratios_are_to_the_run_that_saves_nothing_in_the_same_round() -> None:
    seconds = {f"{name} {times}": [2.0, 4.0] for name in ("never", "ahead", "copied") for times in TIMES}
    seconds |= {f"in place {times}": [2.04, 4.12] for times in TIMES}
    rows = {row.name: row for row in _rows(seconds, 1000)}
    for times in TIMES:
        row = rows[f"in place, {times} x disk"]
        assert row.ratios == (1.02, 1.03) and row.target == TARGET and row.met
        assert rows[f"copied, {times} x disk"].ratios == (1.0, 1.0)
        assert not rows[f"no save, {times} x disk"].ratios
