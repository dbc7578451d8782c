"""Folders and files on disk: made, charged, refused, and nothing left behind however it ends."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.calls import Calls
from forebay.errors import ConfigError, DiskFull, ForebayError, HostOutOfMemory, StorageError, UsageError
from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.disk import DiskFolder, DiskPolicy
from forebay.tiers.diskfile import Meter
from forebay.tiers.handed import hand_over, taken_over
from forebay.units import KiB, MiB
from tests.faults.scripted_io import PAGE, ScriptedIo, Tiers, round_trip


def test_sizes_are_padded_preallocated_and_charged(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file = folder.create("moments", 2 * MiB + 1, Kind.STATE)
        assert (file.nbytes, file.padded(1), file.padded(PAGE)) == (2 * MiB + PAGE, PAGE, PAGE)
        assert tiers.disk.usage().at_peak[Kind.STATE] == 2 * MiB + PAGE
        stat = os.fstat(file.descriptor)
        assert (stat.st_size, stat.st_blocks * 512) >= (2 * MiB + PAGE, 2 * MiB + PAGE)
        target = torch.ones(file.nbytes, dtype=torch.uint8)
        file.read(0, target)
        assert not target.any()
        file.close()
        file.close()
        assert tiers.disk.live == 0
        again = folder.create("moments", PAGE)  # the name is free again
        assert again.nbytes == PAGE


def test_folder_is_private_and_named_after_the_process(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.name.startswith(f"forebay-{os.getpid()}-")
        assert folder.path.stat().st_mode & 0o777 == 0o700


def test_an_exception_leaves_nothing(tmp_path: Path, tiers: Tiers) -> None:
    folder = DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host)

    def fail() -> None:
        with folder:
            files = [folder.create("a", MiB), folder.create("b", MiB)]
            raise KeyError(files)

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(StorageError, match="is closed"):
        folder.create("c", MiB)
    folder.close()


def test_what_nobody_closed_goes_when_nobody_holds_it(tmp_path: Path, tiers: Tiers) -> None:
    folder = DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host)
    file = folder.create("a", MiB)
    folder.create("b", MiB)  # nobody holds this one
    gc.collect()
    assert tiers.disk.live == MiB
    del folder, file


def test_space_is_free_although_a_forked_child_lives(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file, other = folder.create("a", MiB), folder.create("b", MiB)
        inherited = os.dup(file.descriptor)
        file.close()
        assert os.fstat(inherited).st_blocks == 0
        os.close(inherited)
        child = os.fork()
        if child == 0:
            other.close()  # its own descriptor, and no more
            os._exit(0)
        os.waitpid(child, 0)
        assert os.fstat(other.descriptor).st_size == MiB


def test_files_that_stay_and_those_of_others_keep_their_bytes(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        folder.create("a", MiB, stays=tmp_path / "stays").close()
        assert (tmp_path / "stays").stat().st_size == MiB
        file = folder.create("b", MiB)
        handed = hand_over(file)
        (part,) = handed.parts
        assert part is not None
        with taken_over(replace(handed, parts=(replace(part, descriptor=os.dup(part.descriptor)),)), Meter()):
            pass
        assert os.fstat(file.descriptor).st_size == MiB


ENDS = {"sys.exit()": 0, "raise SystemExit(3)": 0, "os.kill(os.getpid(), 9)": 1}
"""How a process ends, and the folders that it leaves."""

ENDING = """
import os, sys
from forebay.memory import Ledger, Tier
from forebay.tiers.disk import DiskFolder

for root, end in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    if os.fork() == 0:
        folder = DiskFolder(root, ledger=Ledger(Tier.DISK))
        file = folder.create("a", 1 << 20)
        if os.fork() == 0:
            sys.exit()  # a child that ends in the ordinary way takes nothing away
        os.wait()
        assert folder.path.exists()
        exec(end)
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_end_of_the_process(tmp_path: Path) -> None:
    """However it ends, the bytes are free again; after a kill an empty folder remains. One process imports for all."""
    roots = [tmp_path / str(number) for number in range(len(ENDS))]
    for root in roots:
        root.mkdir()
    words = [word for root, end in zip(roots, ENDS, strict=True) for word in (str(root), end)]
    done = subprocess.run([sys.executable, "-c", ENDING, *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3", "-9"], done.stderr
    for root, folders in zip(roots, ENDS.values(), strict=True):
        left = list(root.rglob("*"))
        assert [path.is_dir() for path in left] == [True] * folders
        for folder in (*left, root):
            folder.rmdir()


def test_missing_path(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: No such file or directory \(ENOENT\); make the folder"):
        DiskFolder(tmp_path / "missing", ledger=tiers.disk)


def test_path_is_a_file(tmp_path: Path, tiers: Tiers) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        DiskFolder(tmp_path / "file", ledger=tiers.disk)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_path_that_cannot_be_written(tmp_path: Path, tiers: Tiers, code: int) -> None:
    io = ScriptedIo(always={"make_folder": -code})
    with pytest.raises(UsageError, match=f"cannot be written: .*{errno.errorcode[code]}.*name another folder"):
        DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, io=io)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_path_without_permission(tmp_path: Path, tiers: Tiers) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="EACCES"):
        DiskFolder(tmp_path, ledger=tiers.disk)
    tmp_path.chmod(0o700)


def test_too_little_space_is_refused_before_anything_is_made(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(DiskFull, match=r"needs 9\.0 MiB .* and 8\.0 MiB are free; make room") as caught:
        DiskFolder(tmp_path, ledger=tiers.disk, needed=9 * MiB, io=ScriptedIo(free=8 * MiB))
    assert (caught.value.needed, caught.value.allowed) == (9 * MiB, 8 * MiB)
    DiskFolder(tmp_path, ledger=tiers.disk, needed=8 * MiB, io=ScriptedIo(free=8 * MiB)).close()


def test_bounce_buffers_are_host_memory(tmp_path: Path, tiers: Tiers) -> None:
    policy = DiskPolicy(reads=Calls(MiB // 2), writes=Calls(MiB), bounce_buffers=3)
    # Long calls are for memory that is aligned: they make no buffer larger.
    for given in (policy, replace(policy, writes=Calls(16 * MiB), bounce_block=MiB)):
        with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, policy=given):
            assert tiers.host.live == tiers.host.usage().at_peak[Kind.STAGING] == 3 * MiB
    with pytest.raises(HostOutOfMemory, match="bounce buffers"):
        DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=Ledger(Tier.HOST, MiB), policy=policy)


def test_budget_refuses_a_file(tmp_path: Path) -> None:
    disk = Ledger(Tier.DISK, 8 * KiB)
    with DiskFolder(tmp_path, ledger=disk) as folder:
        with pytest.raises(DiskFull, match="moments needs"):
            folder.create("moments", 8 * KiB + 1)
        assert list(folder.path.iterdir()) == []
        assert disk.usage().peak == 0


@pytest.mark.parametrize(
    ("io", "error", "words"),
    [
        (ScriptedIo(always={"allocate": -errno.ENOSPC}), DiskFull, "ENOSPC.*are free; make room"),
        (ScriptedIo(always={"allocate": -errno.EDQUOT}), DiskFull, "EDQUOT.*are free; make room"),
        (ScriptedIo(always={"allocate": -errno.EFBIG}), StorageError, "EFBIG"),
        (ScriptedIo(always={"open_direct": -errno.EIO}), StorageError, "EIO"),
        (ScriptedIo(always={"open_direct": -errno.EINVAL, "open": -errno.EROFS}), StorageError, "EROFS"),
    ],
)
def test_file_that_cannot_be_made(
    tmp_path: Path, tiers: Tiers, io: ScriptedIo, error: type[ForebayError], words: str
) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, io=io) as folder:
        with pytest.raises(error, match=rf"cannot make 1\.0 MiB of .*/moments: .*{words}"):
            folder.create("moments", MiB)
        assert tiers.disk.live == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "taken", "x" * 300])
def test_bad_names(tmp_path: Path, tiers: Tiers, name: str) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        taken = folder.create("taken", PAGE)
        with pytest.raises(StorageError):
            folder.create(name, PAGE)
        with pytest.raises(StorageError, match="1 byte or more"):
            folder.create("empty", 0)
        taken.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_without_preallocation_the_file_has_its_size_all_the_same(tmp_path: Path, tiers: Tiers, code: int) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, io=ScriptedIo(always={"allocate": -code})) as folder:
        round_trip(folder.create("moments", MiB))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"alignment": 1000}, "alignment"),
        ({"alignment": 256}, "alignment"),
        ({"reads": Calls(4097)}, "the block of reads"),
        ({"writes": Calls(4097)}, "the block of writes"),
        ({"stripe": 100}, "stripe"),
        ({"stripe": 0}, "stripe"),
        ({"bounce_buffers": 0}, "bounce_buffers"),
        ({"bounce_block": 0}, "bounce_block"),
        ({"bounce_block": 4097}, "bounce_block"),
    ],
)
def test_policies_are_validated_at_birth(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DiskPolicy(**fields)
