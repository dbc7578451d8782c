"""Whatever happens while a checkpoint is written, a whole one stands: the one before, or the new one."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.checkpoint.files import SystemFiles
from forebay.checkpoint.generations import MANIFEST, Generations
from forebay.checkpoint.resuming import resume_checkpoint
from forebay.checkpoint.saving import save_checkpoint
from forebay.errors import DiskFull, ForebayError, StorageError
from forebay.runtime.hooks import prepared_session
from tests.faults.crashing import At, Counted, Crash, crash, cut_power, cut_power_behind_renames, fail
from tests.faults.trained import AMPLE
from tests.parity.content import content, expect_same

WIDTH = 24


class Trained:
    """A small prepared model with states, part of them on the host."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.model, self.optimizer = forebay.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            device_memory=AMPLE,
            policy="stream",
            device="cpu",
        )
        self.session = prepared_session(self.model)

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH).cumsum(0)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, files: Counted | SystemFiles, step: int) -> None:
        generations = Generations(folder, files)
        save_checkpoint(self.session, self.model, self.optimizer, generations, step=step, scheduler=None, extra=None)

    def resume(self, folder: Path) -> int:
        generations = Generations(folder, SystemFiles())
        return resume_checkpoint(self.session, self.model, self.optimizer, generations, None).step

    def content(self) -> dict[str, torch.Tensor]:
        return content(self.model, self.optimizer)


class Saves:
    """Two checkpoints of one model: that of step 1 stands in ``folder``, that of step 2 is to come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.reader = Trained(0), Trained(1)
        self.contents: dict[int, dict[str, torch.Tensor]] = {}
        folder.mkdir()
        self.source.step()
        self.contents[1] = self.source.content()
        self.source.save(folder, SystemFiles(), 1)
        self.source.step()
        self.contents[2] = self.source.content()

    def again(self, where: Path) -> Path:
        """A folder like that one."""
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(self.folder, where)
        return where

    def expect(self, folder: Path, steps: set[int]) -> int:
        """Resumes from ``folder``: that of one of ``steps`` stands there, every bit of it."""
        step = self.reader.resume(folder)
        assert step in steps
        expect_same(self.contents[step], self.reader.content())
        return step

    def close(self) -> None:
        for trained in (self.source, self.reader):
            forebay.close(trained.model)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saves]:
    made = Saves(tmp_path_factory.mktemp("saves") / "folder")
    yield made
    made.close()


def operations(saves: Saves, where: Path) -> list[str]:
    counted = Counted()
    saves.source.save(saves.again(where), counted, 2)
    return counted.done


@pytest.mark.parametrize("what", [crash, cut_power, cut_power_behind_renames])
def test_a_crash_at_every_operation_leaves_a_whole_checkpoint(saves: Saves, tmp_path: Path, what: At) -> None:
    order = operations(saves, tmp_path / "dry")
    assert saves.expect(tmp_path / "dry", {2}) == 2
    # Before the rename everything is synced, and the old generation goes behind it.
    renamed = order.index("replace")
    assert order.count("replace") == 1
    assert "write" not in order[renamed:]
    assert order[renamed + 1] == "sync_folder"
    assert "remove" in order[renamed:]
    for number, operation in enumerate(order):
        folder = saves.again(tmp_path / "folder")
        with pytest.raises(Crash):
            saves.source.save(folder, Counted(number, what), 2)
        # The rename is what counts: a crash at it comes before it. To a disk it counts when it is synced.
        wanted = 1 if number <= renamed + (what is cut_power) else 2
        assert saves.expect(folder, {wanted}) == wanted, (number, operation)
        if operation != order[number - 1]:
            # What was left behind is in nobody's way, and goes.
            saves.source.save(folder, SystemFiles(), 2)
            saves.expect(folder, {2})
            assert len(list(folder.iterdir())) == 2, (number, operation)


def test_what_a_crash_has_left_is_on_the_disk_before_what_it_replaces_goes(saves: Saves, tmp_path: Path) -> None:
    """The rename was made and not synced; the next save removes the old generation, and then the power goes."""
    renamed = operations(saves, tmp_path / "dry").index("replace")

    def next_save(at: int | None) -> tuple[Path, Counted]:
        folder = saves.again(tmp_path / "folder")
        crashed = Counted(renamed + 1, crash)
        with pytest.raises(Crash):
            saves.source.save(folder, crashed, 2)
        return folder, Counted(at, cut_power, behind=crashed)

    folder, whole = next_save(None)
    saves.source.save(folder, whole, 2)
    first = whole.done.index("remove")
    assert first < whole.done.index("create")
    for number in (first, first + 1):
        folder, files = next_save(number)
        with pytest.raises(Crash):
            saves.source.save(folder, files, 2)
        saves.expect(folder, {2})


def test_the_first_checkpoint_of_a_folder_stands_or_does_not(saves: Saves, tmp_path: Path) -> None:
    whole = Counted()
    (tmp_path / "dry").mkdir()
    saves.source.save(tmp_path / "dry", whole, 2)
    order = whole.done
    for number in range(0, len(order), 3):
        folder = tmp_path / f"folder-{number}"
        folder.mkdir()
        with pytest.raises(Crash):
            saves.source.save(folder, Counted(number, crash), 2)
        if number > order.index("replace"):
            saves.expect(folder, {2})
        else:
            with pytest.raises(ForebayError, match="has no checkpoint"):
                saves.reader.resume(folder)


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (errno.ENOSPC, DiskFull, r"No space left on device \(ENOSPC\), .* are free; make room"),
        (errno.EIO, StorageError, r"Input/output error \(EIO\); check the disk"),
        (errno.EROFS, StorageError, r"Read-only file system \(EROFS\); name a folder that can be written"),
        (errno.ENOENT, StorageError, r"No such file or directory \(ENOENT\); it was moved or removed"),
    ],
    ids=["full", "i-o error", "read-only", "gone"],
)
def test_an_error_at_any_operation_is_told_and_the_checkpoint_stands(
    saves: Saves, tmp_path: Path, number: int, error: type[ForebayError], said: str
) -> None:
    order = operations(saves, tmp_path / "dry")
    renamed = order.index("replace")
    # Each kind of operation at least once, and every one of those around the rename.
    firsts = {order.index(operation) for operation in order}
    for place in sorted(firsts | set(range(renamed - 2, len(order)))):
        folder = saves.again(tmp_path / "folder")
        files = Counted(place, fail(number))
        if order[place] == "remove" and place > renamed:
            saves.source.save(folder, files, 2)  # the new one stands; the old one is removed by the next save
        else:
            with pytest.raises(error, match=said) as told:
                saves.source.save(folder, files, 2)
            assert "\n" not in str(told.value)
        wanted = 1 if place <= renamed else 2
        assert saves.expect(folder, {wanted}) == wanted, (place, order[place])
        if place <= renamed and order[place] != "remove":
            assert len(list(folder.iterdir())) == 2, "what was written of the new one is gone"
    saves.source.save(folder, SystemFiles(), 2)
    saves.expect(folder, {2})


def test_no_room_is_said_before_a_byte_is_written(saves: Saves, tmp_path: Path) -> None:
    files = Counted(free=1000)
    folder = saves.again(tmp_path / "folder")
    with pytest.raises(DiskFull, match=r"a checkpoint takes .* and 1000 B are free \(that of step 1 stands\)") as told:
        saves.source.save(folder, files, 2)
    assert told.value.allowed == 1000
    # fp32 weights, two moments each; BatchNorm's running mean and variance, and its count of 8 bytes
    elements = 2 * WIDTH * WIDTH + 4 * WIDTH
    assert told.value.needed == 12 * elements + 2 * 4 * WIDTH + 8
    assert "create" not in files.done
    saves.expect(folder, {1})


def test_files_are_for_their_owner_only(saves: Saves, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    trained = Trained(2)
    forebay.save(trained.model, trained.optimizer, folder, step=0)
    assert folder.stat().st_mode & 0o777 == 0o700
    inside = [path for path in folder.rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in inside} == {0}
    assert {path.suffix for path in inside if path.is_file()} == {".json", ".safetensors", ""}
    assert {path.name for path in inside if path.is_file() and not path.suffix} == {"lock"}
    # Others cannot have it before this model is closed, from wherever.
    other = Trained(3)
    with pytest.raises(StorageError, match=r"is in use by process \d+; wait for its end"):
        forebay.resume(other.model, other.optimizer, folder)
    forebay.close(trained.model)
    assert forebay.resume(other.model, other.optimizer, folder).step == 0
    forebay.close(other.model)


def test_a_folder_that_vanishes(saves: Saves, tmp_path: Path) -> None:
    folder = saves.again(tmp_path / "folder")
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match="it was moved or removed"):
        saves.source.save(folder, SystemFiles(), 2)
    assert not folder.exists()
    with pytest.raises(ForebayError, match="there is no folder"):
        forebay.resume(saves.reader.model, saves.reader.optimizer, folder)
    assert (saves.folder / MANIFEST).exists()
