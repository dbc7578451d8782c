"""A host whose memory is nearly used up: a run moves to disk, or ends while it can still save itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import forebay.cli.running
from forebay.cli.pressure import HostPressure, PressurePolicy
from forebay.cli.shortage import HostPressed
from forebay.cli.train import train
from forebay.errors import ConfigError, HostOutOfMemory
from forebay.tiers.host import HostMemory
from forebay.units import KiB, MiB
from tests.faults.train_rig import MODEL, Spoilt, Telling, go, no_number, settings, text, weights

__all__ = ["text"]

FLOOR = PressurePolicy(least=64 * MiB, seconds=0.0)


def memory_of(*free: int) -> Callable[[], HostMemory]:
    left = list(free)
    return lambda: HostMemory(100 * MiB, left.pop(0) if len(left) > 1 else left[0], "cgroup limit /a/memory.max")


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has a run find so many bytes less than the floor behind its second step, and enough later on."""

    def press(missing: int) -> None:
        read = memory_of(80 * MiB, 64 * MiB - missing, 80 * MiB)
        monkeypatch.setattr(forebay.cli.running, "HostPressure", partial(HostPressure, FLOOR, read))

    return press


def test_pressure_is_seen_once_and_not_asked_for_at_every_step() -> None:
    clock = iter([0.0, 0.1, 1.0, 1.1, 2.0])
    policy = PressurePolicy(share=0.5, least=10 * MiB, seconds=0.5)
    pressure = HostPressure(policy, memory_of(60 * MiB, 40 * MiB, 90 * MiB), lambda: next(clock))
    assert [pressure.is_near() for _ in range(5)] == [False, False, True, True, True]
    error = pressure.error(7, 100 * MiB)
    assert (error.needed, error.allowed) == (50 * MiB, 40 * MiB)
    assert error.within == (100 - 2 * 10) * MiB
    assert pressure.error(7, 1000 * MiB).within == 950 * MiB
    assert pressure.error(7, 10 * MiB).within < 0
    assert "40.0 MiB are left of 100.0 MiB (cgroup limit /a/memory.max)" in str(error)
    for wrong in ({"share": 1.0}, {"least": -1}, {"seconds": -0.5}):
        with pytest.raises(ConfigError, match="share is from 0"):
            PressurePolicy(**wrong)


def test_a_run_moves_to_disk_before_the_host_is_full(
    text: Path, tmp_path: Path, pressed: Callable[[int], None]
) -> None:
    # Large enough that the buffers of a disk tier take less than what moves there.
    large = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}
    (tmp_path / "model.json").write_text(json.dumps(MODEL | large))
    (tmp_path / "disk").mkdir()
    config = partial(settings, text, steps=3, policy="stream", device_memory="8MiB", disk=f"{tmp_path / 'disk'}:64MiB")
    whole = go(config(tmp_path / "whole"), no_number())
    pressed(3 * MiB)
    view, spoilt = Telling(), Spoilt(no_number())
    engine: Any = spoilt
    found = train(config(tmp_path / "run", save_every=1), engine, view)
    assert sum("The run goes on under a plan that takes" in note for note in view.notes) == 1
    assert view.said("host memory: 61.0 MiB are left of 100.0 MiB (cgroup limit /a/memory.max). The run goes on under")
    assert view.said("goes on behind step 2")
    before, after = (options["plan"] for options in spoilt.prepared)
    assert after.host <= before.host - 2 * 3 * MiB and before.disk == 0 < after.disk
    assert found.losses == whole.losses
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_run_that_cannot_move_is_saved(text: Path, tmp_path: Path, pressed: Callable[[int], None]) -> None:
    pressed(MiB)
    # One that cannot be saved either goes on: it has nothing to lose by being killed.
    whole = go(settings(text, None), no_number())
    (tmp_path / "disk").mkdir()
    # No disk; and too little for the buffers of a disk tier.
    for number, (more, words) in enumerate([({}, ""), ({"disk": f"{tmp_path / 'disk'}:64MiB"}, "host")]):
        run = tmp_path / f"run-{number}"
        pressed(256 * KiB)
        with pytest.raises(HostOutOfMemory, match="stopped behind step 2, before the kernel ends it; end oth") as error:
            go(settings(text, run, **more), no_number())
        assert isinstance(error.value, HostPressed) is (not words)
        assert not words or words in str(error.value).partition("(and give a --disk). ")[2]
    rest = go(settings(text, run), no_number(), resume=True)
    assert rest.losses == whole.losses
