"""Whatever fails while a checkpoint is made that names homes on disk, and after it: a whole one stands."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.checkpoint.files import Files, SystemFiles
from forebay.checkpoint.generations import MANIFEST, Generations
from forebay.checkpoint.resuming import resume_checkpoint
from forebay.checkpoint.saving import save_checkpoint
from forebay.errors import ConfigError, DiskFull, ForebayError, StorageError
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.hooks import prepared_session
from forebay.tiers.io import SystemIo
from tests.faults.crashing import Counted, Crash, crash, fail
from tests.faults.trained import AMPLE, adamw, disk_plan, network, step
from tests.parity.content import content, expect_same


class Trained:
    """A small model, all of it on disk, that is saved in ``kept``. In bf16 its parameters are on the host, and masters
    are kept as halves: one of them is copied, the other is not."""

    def __init__(self, folder: Path, kept: Path, plan: Plan | None = None, dtype: torch.dtype = torch.float32) -> None:
        model = network(dtype)
        self.kept = kept
        parameters = Tier.DISK if dtype is torch.float32 else Tier.HOST
        # Two chunks of states a block: every copy of what is there takes them one by one.
        self.plan = plan or disk_plan(folder, disk_copies=2, dtype=dtype, parameters=parameters, update_chunk=5120)
        self.model, self.optimizer = forebay.prepare(
            model,
            adamw(model),
            device_memory=AMPLE,
            device="cpu",
            plan=self.plan,
            disk=f"{folder}:64MiB",
            crash_safe=kept,
        )
        self.session = prepared_session(self.model)

    def step(self) -> None:
        step(self.model, self.optimizer)

    def save(self, number: int, files: Files | None = None, *, background: bool = False) -> None:
        own = self.session.store.kept
        assert own is not None
        generations = Generations(self.kept, files or SystemFiles(), own.names)
        given = {"step": number, "scheduler": None, "extra": None}
        save_checkpoint(self.session, self.model, self.optimizer, generations, **given, background=background)  # type: ignore[arg-type]

    def save_and_wait(self, number: int, files: Files, *, background: bool) -> None:
        self.save(number, files, background=background)
        forebay.synchronize(self.model)

    def content(self) -> dict[str, torch.Tensor]:
        return content(self.model, self.optimizer)

    def close(self) -> None:
        forebay.close(self.model)


class Reader:
    """Another model, which goes on from copies of a folder: as a later process would from what is there now."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._where = folder / "copy"
        model = network(dtype)
        self.model, self.optimizer = forebay.prepare(
            model, adamw(model), device_memory=AMPLE, policy="stream", device="cpu"
        )

    def found(self, kept: Path) -> tuple[int, dict[str, torch.Tensor]]:
        shutil.rmtree(self._where, ignore_errors=True)
        shutil.copytree(kept, self._where)
        session = prepared_session(self.model)
        generations = Generations(self._where, SystemFiles())
        number = resume_checkpoint(session, self.model, self.optimizer, generations, None).step
        return number, content(self.model, self.optimizer)

    def expect(self, kept: Path, number: int, wanted: dict[str, torch.Tensor]) -> None:
        there, found = self.found(kept)
        assert there == number
        expect_same(wanted, found)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(tmp_path_factory.mktemp("reader"))
    yield made
    forebay.close(made.model)


@pytest.fixture(scope="module")
def halves_reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(tmp_path_factory.mktemp("reader"), torch.bfloat16)
    yield made
    forebay.close(made.model)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    (tmp_path / "disk").mkdir()
    made = Trained(tmp_path / "disk", tmp_path / "kept")
    yield made
    made.close()


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Trained]:
    """One whose masters are halves."""
    (tmp_path / "disk").mkdir()
    made = Trained(tmp_path / "disk", tmp_path / "kept", dtype=torch.bfloat16)
    yield made
    made.close()


def operations(trained: Trained) -> list[str]:
    counted = Counted()
    trained.save(1, counted)
    return counted.done


def stepped_and_saved(trained: Trained, stands: int) -> tuple[int, dict[str, torch.Tensor]]:
    """A step, its save as number 1, and a step that a save numbered 2 would have. Which of the two ``stands`` when that
    one has failed, and what is in it."""
    trained.step()
    before = trained.content() if stands == 1 else {}
    trained.save(1)
    trained.step()
    return stands, before or trained.content()


def test_what_is_named_in_place_is_on_the_disk_before_it_is_named(trained: Trained) -> None:
    trained.step()
    trained.save(0)
    trained.step()
    order = operations(trained)
    renamed = order.index("replace")
    # Parameters and states are synced, then the names in the folder, then the manifest; and no tensor is written.
    assert order[:renamed].count("sync") == 3
    assert order[:renamed].count("write") == len([o for o in order if o == "write"])
    assert "write" not in order[: order.index("sync_folder")]
    assert order[renamed + 1] == "sync_folder"


def test_a_forked_child_leaves_the_files_to_its_parent(trained: Trained, reader: Reader) -> None:
    own = trained.session.store.kept
    assert own is not None and own.names
    child = os.fork()
    if child == 0:
        own.close()
        os._exit(0)
    os.waitpid(child, 0)
    trained.step()
    trained.save(1)
    reader.expect(trained.kept, 1, trained.content())


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("dtype", "from_whom"), [(torch.float32, "reader"), (torch.bfloat16, "halves_reader")], ids=["fp32", "halves"]
)
def test_a_crash_at_every_kind_of_operation_leaves_what_stood_or_what_was_to_stand(
    dtype: torch.dtype, from_whom: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reader: Reader = request.getfixturevalue(from_whom)
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    trained = Trained(disk, kept, dtype=dtype)
    trained.step()
    trained.save(1)
    trained.step()
    order = operations(trained)
    assert len(order) > 10
    renamed = order.index("replace")
    # The first of several alike, one after the other: writes of one manifest, say.
    for place in (place for place, operation in enumerate(order) if place == 0 or operation != order[place - 1]):
        stands = stepped_and_saved(trained, 2 if place > renamed else 1)
        counted = Counted(place, crash)
        with pytest.raises(Crash):
            trained.save(2, counted)
        assert ("replace" in counted.done[:-1]) == (stands[0] == 2)
        reader.expect(kept, *stands)
        # The process that comes up again goes on from there, in files of its own.
        trained.close()
        trained = Trained(disk, kept, trained.plan, dtype)
        assert forebay.resume(trained.model, trained.optimizer, kept).step == stands[0]
        expect_same(stands[1], trained.content())
    trained.close()


@pytest.mark.parametrize("background", [False, True], ids=["waited-for", "background"])
def test_an_error_at_any_operation_is_told_and_training_goes_on(
    reader: Reader, trained: Trained, background: bool
) -> None:
    trained.step()
    trained.save(0)
    trained.step()
    order = operations(trained)
    renamed = order.index("replace")
    firsts = {order.index(operation) for operation in order} if background else set[int]()
    for place in sorted(firsts | {renamed - 1, renamed, renamed + 1}):
        stands = stepped_and_saved(trained, 2 if place > renamed else 1)
        if order[place] == "remove" and place > renamed:
            trained.save_and_wait(2, Counted(place, fail(errno.EIO)), background=background)
        else:
            with pytest.raises(StorageError, match=r"Input/output error \(EIO\)") as told:
                trained.save_and_wait(2, Counted(place, fail(errno.EIO)), background=background)
            assert "\n" not in str(told.value)
        reader.expect(trained.kept, *stands)
        # Neither of the next steps touches what stands, whichever of the two that is.
        trained.step()
        trained.step()
        reader.expect(trained.kept, *stands)


def test_halves_that_are_copied_beside_halves_that_are_not(halves: Trained, halves_reader: Reader) -> None:
    """An error anywhere while the one is written; damage of either; and a manifest that says something else."""
    halves.step()
    halves.save(0)
    halves.step()
    order = operations(halves)
    for place in sorted({order.index(operation) for operation in order}):
        stands = stepped_and_saved(halves, 2 if place > order.index("replace") else 1)
        failing = Counted(place, fail(errno.EIO))
        if order[place] == "remove":  # of what no manifest names any more: the next save removes it
            halves.save_and_wait(2, failing, background=True)
        else:
            with pytest.raises(StorageError, match=r"Input/output error \(EIO\)"):
                halves.save_and_wait(2, failing, background=True)
        halves_reader.expect(halves.kept, *stands)
        halves.step()
        halves.step()
        halves_reader.expect(halves.kept, *stands)
    halves.save(3)  # what an error has left goes
    (copied,) = halves.kept.glob("generation-*")
    flip(copied / "00002.safetensors", (copied / "00002.safetensors").stat().st_size - 1)
    with pytest.raises(StorageError, match=r"upper\.2\.bias in .* is not what was saved: its checksum"):
        halves_reader.found(halves.kept)
    path = halves.kept / MANIFEST
    manifest = json.loads(path.read_text())["manifest"]
    manifest["homes"]["masters"] = "whole"
    write_manifest(path, manifest)
    with pytest.raises(StorageError, match="does not have, or has in another form"):
        halves_reader.found(halves.kept)


def test_a_process_that_saved_nothing_leaves_files_that_the_next_one_removes(tmp_path: Path, reader: Reader) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    first = Trained(disk, kept)
    first.step()
    content = first.content()
    first.save(1)
    first.close()
    mine = {path.name for path in kept.glob("home-*")}
    assert len(mine) == 2
    # Killed before it saved: its files are still there.
    for name in ("home-00000000-states", "home-00000000-parameters"):
        (kept / name).write_bytes(bytes(4096))
    (kept / "generation-00000009").mkdir()
    second = Trained(disk, kept, first.plan)
    there = {path.name for path in kept.glob("home-*")}
    assert len(there) == 4 and mine < there
    assert not (kept / "generation-00000009").exists()
    second.step()
    second.close()
    # It did not save either, and the checkpoint stands.
    assert {path.name for path in kept.glob("home-*")} == mine
    reader.expect(kept, 1, content)
    assert {path.stat().st_mode & 0o077 for path in kept.rglob("*")} == {0}


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_damage_is_told_and_nothing_has_changed(trained: Trained, reader: Reader, tmp_path: Path) -> None:
    trained.step()
    trained.step()
    trained.save(2)
    reader.expect(trained.kept, 2, trained.content())
    copy = tmp_path / "damaged"

    def refused(words: str) -> None:
        session, generations = prepared_session(reader.model), Generations(copy, SystemFiles())
        with pytest.raises(ForebayError, match=words) as told:
            resume_checkpoint(session, reader.model, reader.optimizer, generations, None)
        assert "\n" not in str(told.value)
        expect_same(trained.content(), content(reader.model, reader.optimizer))
        shutil.rmtree(copy)

    def begin() -> dict[str, Path]:
        shutil.copytree(trained.kept, copy)
        return {path.name.rpartition("-")[2]: path for path in copy.glob("home-*")}

    homes = json.loads((trained.kept / MANIFEST).read_text())["manifest"]["homes"]
    for what in ("parameters", "states"):
        flip(begin()[what], homes["blocks"][2][what]["offset"] + 1234)
        refused(f"the {what} of block 2 in .* are not what was saved: .*the disk has changed bytes of it")
        os.truncate(begin()[what], 4096)
        refused("has 4096 bytes and had .*; the file was cut or changed")
        begin()[what].unlink()
        refused("it was moved or removed")
    # What the checkpoint does not name may be anything: it is what the next step writes.
    states = begin()["states"]
    place = states.stat().st_size // 2  # all second places are behind all first ones
    assert homes["blocks"][0]["states"]["offset"] in (0, place)
    flip(states, place - homes["blocks"][0]["states"]["offset"])
    session = prepared_session(reader.model)
    assert resume_checkpoint(session, reader.model, reader.optimizer, Generations(copy, SystemFiles()), None).step == 2


def write_manifest(path: Path, manifest: dict[str, object]) -> None:
    body = json.dumps(manifest).encode()
    path.write_bytes(b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["states"].update(name="../secret"), "a checkpoint has files home-NAME in its own folder"),
        (lambda h: h["blocks"][0]["states"].update(offset=1 << 60), "ends before byte"),
        (lambda h: h["blocks"][0]["states"].update(offset=-4096), "is in no file"),
        (lambda h: h["blocks"][0]["states"].update(checksums=[1]), "parts, not the manifest's"),
        (lambda h: h["blocks"][0].update(block="9"), "does not have, or has in another form"),
        (lambda h: h["blocks"][0].update(tensors=7), "does not have, or has in another form"),
        (lambda h: h.update(state_names=["momentum_buffer"]), "it was saved from another optimizer"),
        (lambda h: h.update(update_chunk=0), "has 1 element or more"),
        (lambda h: h["blocks"].pop(), "has no exp_avg.3.bias"),
        (lambda h: h.update(masters="lower"), "a parameter in bfloat16 is not, and this model trains float32"),
    ],
    ids=["path", "far", "negative", "few", "block", "tensors", "optimizer", "chunk", "missing", "halves"],
)
def test_a_manifest_is_not_believed(trained: Trained, reader: Reader, change: object, words: str) -> None:
    trained.step()
    trained.save(1)
    path = trained.kept / MANIFEST
    manifest = json.loads(path.read_text())["manifest"]
    change(manifest["homes"])  # type: ignore[operator]
    write_manifest(path, manifest)
    with pytest.raises(ForebayError, match=words) as told:
        reader.found(trained.kept)
    assert "\n" not in str(told.value)


def test_folders_and_plans_that_cannot_be(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    whole = disk_plan(disk, disk_copies=2)

    def refused(words: str, error: type[ForebayError] = ConfigError, copies: int = 2, **changes: object) -> None:
        model = network()
        given = {"disk": f"{disk}:64MiB", "crash_safe": tmp_path / "kept", "device_memory": AMPLE, "device": "cpu"}
        plan = replace(whole, streaming=replace(whole.streaming, disk_copies=copies))
        with pytest.raises(error, match=words) as told:
            forebay.prepare(model, adamw(model), plan=plan, **(given | changes))  # type: ignore[arg-type]
        assert "\n" not in str(told.value)
        # Nobody holds the folder, and the model is as it was.
        assert all(isinstance(p, nn.Parameter) and p.numel() for p in model.parameters())

    refused("has one place on disk for block 0, and crash_safe needs two", copies=1)
    (tmp_path / "more").mkdir()
    several = f"{disk}:32MiB,{tmp_path / 'more'}:32MiB"
    refused("disk names 2 folders to spread it over", disk=several)
    elsewhere = Path("/dev/shm")
    if elsewhere.is_dir() and elsewhere.stat().st_dev != disk.stat().st_dev:
        where = elsewhere / f"forebay-test-{os.getpid()}"
        try:
            refused("is on another file system than", crash_safe=where)
        finally:
            shutil.rmtree(where, ignore_errors=True)
    (tmp_path / "file").write_text("")
    refused("File exists", StorageError, crash_safe=tmp_path / "file")
    held = Trained(disk, tmp_path / "kept")
    refused(r"is in use by process \d+", StorageError)
    held.close()
    plan = held.plan
    with pytest.raises(ConfigError, match="beside the storage, where nobody leaves the copy alone that a checkpoint"):
        replace(plan, placements=tuple(p.updating(Update.STORAGE) for p in plan.placements))
    with pytest.raises(ConfigError, match="disk_copies must be 1 or 2"):
        replace(plan.streaming, disk_copies=3)


def on_the_disk(kept: Path) -> int:
    """Bytes that the files take that training has there."""
    return sum(512 * path.stat().st_blocks for path in kept.glob("home-*"))


def test_a_run_that_goes_on_takes_no_more_of_the_disk_than_the_one_before(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    first = Trained(disk, kept)
    for number in range(3):
        first.step()
        first.save(number)
    saved, most = first.content(), on_the_disk(kept)
    first.close()
    assert most >= first.plan.disk == on_the_disk(kept)
    # There is room for one place of the two, and what the checkpoint does not name: nothing else.
    room = first.plan.disk // 2
    monkeypatch.setattr(SystemIo, "free_bytes", lambda io, path: room)
    second = Trained(disk, kept, first.plan)
    taken = [on_the_disk(kept)]
    reader.expect(kept, 2, saved)  # what was given back nobody needs
    forebay.resume(second.model, second.optimizer, kept)
    expect_same(saved, second.content())
    for number in range(3, 6):
        second.step()
        taken.append(on_the_disk(kept))
        second.save(number)
        taken.append(on_the_disk(kept))
    assert max(taken) <= most
    after = second.content()
    reader.expect(kept, 5, after)
    second.close()
    monkeypatch.setattr(SystemIo, "free_bytes", lambda io, path: room - 1)
    with pytest.raises(DiskFull, match="the disk tier needs"):
        Trained(disk, kept, first.plan)
    reader.expect(kept, 5, after)


def test_what_a_checkpoint_does_not_name_of_a_file(trained: Trained) -> None:
    trained.step()
    trained.save(1)
    manifest = Generations(trained.kept, SystemFiles()).expect_current()
    homes = manifest.homes
    assert homes is not None and homes.states is not None
    unnamed = homes.unnamed()[homes.states.name]
    named = [(home.states.offset, home.states.nbytes) for home in homes.blocks if home.states is not None]
    assert sum(nbytes for _, nbytes in (*unnamed, *named)) == homes.states.nbytes
    assert 2 * sum(nbytes for _, nbytes in unnamed) == homes.states.nbytes
    ends = sorted(offset + nbytes for offset, nbytes in (*unnamed, *named))
    assert sorted(offset for offset, _ in (*unnamed, *named)) == [0, *ends[:-1]]
    first, *others = homes.blocks
    assert first.states is not None
    # Checkpoints of before do not say how many bytes a home has: nothing of that file is given back.
    before = replace(homes, blocks=(replace(first, states=replace(first.states, nbytes=0)), *others))
    assert set(before.unnamed()) == {homes.parameters.name} if homes.parameters else set()
