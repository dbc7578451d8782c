"""A bit that changes on the disk under a run: with checksums it is found before anything is computed with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import forebay
from forebay import api
from forebay.adoption import expect_served
from forebay.budgets import Budget
from forebay.cli.train import TrainResult, train
from forebay.config import TrainConfig
from forebay.errors import ConfigError, StorageError
from forebay.tiers.diskfile import DiskFile
from forebay.units import MiB
from tests.faults.test_checkpoint_in_place import Reader, Trained, reader
from tests.faults.train_rig import Telling, go, no_number, settings, text, weights
from tests.faults.trained import AMPLE, adamw, disk_plan, network
from tests.null.planning import machine
from tests.null.test_trace import make_trace

__all__ = ["reader", "text"]

SPOILT = 3
"""The step behind whose save a bit flips."""


@final
class Flipping:
    """forebay's interface on a disk that flips a bit in all that is written, behind the save of step ``SPOILT``."""

    def __init__(self) -> None:
        self.made: list[DiskFile] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(api, name)

    def save(self, model: nn.Module, optimizer: Any, folder: Path, **options: Any) -> int:
        nbytes = api.save(model, optimizer, folder, **options)
        api.synchronize(model)
        if options["step"] == SPOILT:
            for file in self.made:
                flip_everywhere(file)
        return nbytes


def flip_everywhere(file: DiskFile) -> None:
    """Another bit in each page that was written, behind the back of whoever has the file."""
    descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    for offset in range(0, file.nbytes, 4096):
        page = bytearray(os.pread(descriptor, 4096, offset))
        if any(page):
            page[3] ^= 0x20  # of the exponent of a number
            os.pwrite(descriptor, page, offset)
    os.fsync(descriptor)
    os.close(descriptor)


@pytest.fixture
def flipping(monkeypatch: pytest.MonkeyPatch) -> Flipping:
    engine, begin = Flipping(), DiskFile.__init__

    def noted(file: DiskFile, *arguments: Any, **options: Any) -> None:
        begin(file, *arguments, **options)
        engine.made.append(file)

    monkeypatch.setattr(DiskFile, "__init__", noted)
    return engine


def on_disk(text: Path, run: Path) -> TrainConfig:
    disk = text.parent / "disk"
    disk.mkdir(exist_ok=True)
    where = {"policy": "smart-infinity", "disk": f"{disk}:64MiB", "save_every": 1, "checksums": True}
    return settings(text, run, **where)


@pytest.fixture
def whole(text: Path, tmp_path: Path) -> TrainResult:
    return go(settings(text, tmp_path / "whole"), no_number())


def test_a_run_stops_at_it_and_goes_on_from_what_was_saved(
    text: Path, tmp_path: Path, whole: TrainResult, flipping: Flipping
) -> None:
    engine: Any = flipping
    view = Telling()
    with pytest.raises(StorageError, match=r"the bytes at offset \d+ are not those that were written there"):
        train(on_disk(text, tmp_path / "run"), engine, view)
    assert view.said("held against checksums of what was written: 8 bytes of the host for each 4.0 KiB")
    rest = go(settings(text, tmp_path / "run"), no_number(), view, resume=True)
    assert view.said(f"goes on behind step {SPOILT}") and rest.losses == whole.losses
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_where_the_checkpoint_itself_has_it_nothing_goes_on_with_it(
    reader: Reader, tmp_path: Path, flipping: Flipping
) -> None:
    (tmp_path / "disk").mkdir()
    trained = Trained(tmp_path / "disk", tmp_path / "kept", disk_plan(tmp_path / "disk", 2, checksums=True))
    trained.step()
    trained.save(1)
    for file in flipping.made:
        flip_everywhere(file)
    with pytest.raises(StorageError, match="are not those that were written there"):
        trained.step()
    with pytest.raises(StorageError, match="are not what was saved"):
        reader.found(trained.kept)
    with pytest.raises(StorageError):
        trained.close()


def test_without_checksums_nobody_looks(tmp_path: Path, flipping: Flipping) -> None:
    (tmp_path / "disk").mkdir()
    contents = []
    for spoilt in (False, True):
        trained = Trained(tmp_path / "disk", tmp_path / f"kept-{spoilt}")
        trained.step()
        forebay.synchronize(trained.model)  # what is flipped is what nothing writes any more
        for file in flipping.made if spoilt else ():
            flip_everywhere(file)
        trained.step()
        contents.append(trained.content())
        trained.close()
        flipping.made.clear()
    right, wrong = contents
    assert not all(torch.equal(wrong[name], value) for name, value in right.items())


def test_a_plan_without_room_for_them_is_refused(tmp_path: Path) -> None:
    plan = disk_plan(tmp_path)
    model = network()
    with pytest.raises(ConfigError, match="the plan has no room for checksums of what is on disk; make the plan with"):
        forebay.prepare(
            model, adamw(model), plan=plan, device_memory=AMPLE, disk=f"{tmp_path}:64MiB", device="cpu", checksums=True
        )
    expect_served(disk_plan(tmp_path, checksums=True), two_places=False, checksums=True)


def test_checksums_of_no_disk_are_refused() -> None:
    model = network()
    optimizer = adamw(model)
    said = "checksums are of what is on disk, and no disk is allowed; give a disk"
    with pytest.raises(ConfigError, match=said):
        forebay.prepare(model, optimizer, device_memory=AMPLE, device="cpu", checksums=True)
    trace = make_trace()
    with pytest.raises(ConfigError, match=said):
        forebay.plan(trace, machine(), Budget(8 * MiB, 8 * MiB), checksums=True)
    # What was refused has left the model as it was.
    forebay.close(forebay.prepare(model, optimizer, device_memory=AMPLE, device="cpu")[0])
