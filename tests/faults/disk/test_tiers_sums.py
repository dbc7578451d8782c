"""What the disk gives back that was not written there is found at the read."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DiskFull, HostOutOfMemory, StorageError
from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.disk import DiskFolder, DiskPolicy
from forebay.tiers.diskfile import DiskFile, Meter
from forebay.tiers.handed import hand_over, taken_over
from forebay.tiers.stripes import DiskTier, Folder
from forebay.tiers.sums import SUM_BYTES, SUMMED, PageSums
from forebay.units import MiB
from tests.faults.scripted_io import PAGE, SMALL, ScriptedIo, Tiers, pattern, tensor_at

PAGES = 16
VERIFIED = DiskPolicy(verified=True)


def put(file: DiskFile, offset: int, content: bytes) -> None:
    """Changes what is on the disk behind the back of whoever has the file."""
    descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    os.pwrite(descriptor, content, offset)
    os.fsync(descriptor)
    os.close(descriptor)


def flip(file: DiskFile, offset: int, bit: int = 0) -> None:
    descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, offset)
    os.close(descriptor)
    put(file, offset, bytes([byte ^ (1 << bit)]))


@given(
    content=st.binary(min_size=1, max_size=64),
    bit=st.integers(0, 8 * 2 * SUMMED - 1),
    fill=st.sampled_from([0, 0xFF, None]),
)
def test_a_flipped_bit_always_changes_the_sum(content: bytes, bit: int, fill: int | None) -> None:
    page = np.frombuffer((content * 2 * SUMMED)[: 2 * SUMMED], dtype=np.uint8).copy()
    if fill is not None:
        page[:] = fill  # where additions carry all the way, or not at all
    sums = PageSums(2 * SUMMED)
    sums.note(0, page.data)
    assert sums.damaged(0, page.data) is None
    page[bit // 8] ^= np.uint8(1 << (bit % 8))
    assert sums.damaged(0, page.data) == bit // (8 * SUMMED) * SUMMED
    sums.close()


def test_sums_that_get_no_memory_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    host, before = Ledger(Tier.HOST, MiB), os.listdir("/proc/self/fd")
    monkeypatch.setattr("forebay.tiers.sums.mmap.mmap", refused)
    with pytest.raises(StorageError, match="no memory for the checksums of a file: Cannot allocate memory"):
        PageSums(PAGES * SUMMED, ledger=host)
    assert host.live == 0
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("skew", [0, 1])
def test_a_flipped_bit_is_found_where_it_is(tmp_path: Path, tiers: Tiers, skew: int) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=replace(SMALL, verified=True)) as folder:
        file = folder.create("moments", PAGES * PAGE)
        target = tensor_at(skew, PAGES * PAGE)
        file.read(0, target)  # what was never written is zeros
        assert not target.any()
        file.write(0, pattern(PAGES * PAGE))
        flip(file, 5 * PAGE + 17, 3)
        with pytest.raises(StorageError, match=rf"moments: the bytes at offset {5 * PAGE} are not those that were wr"):
            file.read(0, target)
        with pytest.raises(StorageError, match=f"at offset {5 * PAGE} "):
            file.read(4 * PAGE, target[: 2 * PAGE])
        file.read(6 * PAGE, target[: 2 * PAGE])  # the others are as they were
        assert torch.equal(target[: 2 * PAGE], pattern(PAGES * PAGE)[6 * PAGE : 8 * PAGE])
        file.write(5 * PAGE, pattern(PAGE, 1))
        file.read(0, target)


def test_a_write_that_never_arrives_is_found(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=VERIFIED) as folder:
        file = folder.create("moments", 2 * PAGE)
        file.write(0, pattern(2 * PAGE))
        file.write(PAGE, pattern(PAGE, 7))
        put(file, PAGE, bytes(pattern(2 * PAGE)[PAGE:].numpy()))  # what was there before
        with pytest.raises(StorageError, match=f"at offset {PAGE} "):
            file.read(0, tensor_at(0, 2 * PAGE))


def test_stripes_are_compared_too(tmp_path: Path, tiers: Tiers) -> None:
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folders.append(Folder(tmp_path / name))
    with DiskTier(
        folders, ledger=tiers.disk, host_ledger=tiers.host, policy=replace(VERIFIED, stripe=4 * PAGE)
    ) as tier:
        file = tier.create("moments", PAGES * PAGE)
        file.write(0, pattern(PAGES * PAGE))
        file.read(0, tensor_at(0, PAGES * PAGE))
        part = file.parts[1]  # type: ignore[attr-defined]
        flip(part, 0)
        with pytest.raises(StorageError, match=rf"{tmp_path / 'b'}.* at offset 0 "):
            file.read(0, tensor_at(0, PAGES * PAGE))


def test_another_process_writes_and_this_one_compares(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, policy=VERIFIED) as folder:
        file = folder.create("moments", 4 * PAGE)
        handed = hand_over(file)
        assert len(handed.descriptors) == 2
        part = handed.parts[0]
        assert part is not None and part.sums is not None
        # What a process has that was given them: descriptors of its own.
        copy = replace(part, descriptor=os.dup(part.descriptor), sums=os.dup(part.sums))
        with taken_over(replace(handed, parts=(copy,)), Meter()) as theirs:
            theirs.write(PAGE, pattern(PAGE, 3))
            target = tensor_at(0, 4 * PAGE)
            file.read(0, target)
            assert torch.equal(target[PAGE : 2 * PAGE], pattern(PAGE, 3))
            flip(file, PAGE)
            for side in (file, theirs):
                with pytest.raises(StorageError, match=f"at offset {PAGE} "):
                    side.read(0, target)


def test_sums_are_counted_and_given_back(tmp_path: Path, tiers: Tiers) -> None:
    policy = replace(VERIFIED, direct=False)
    with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, policy=policy) as folder:
        file = folder.create("moments", MiB)
        assert tiers.host.usage().at_peak[Kind.STAGING] == tiers.host.live == MiB // PAGE * SUM_BYTES
        file.close()
        assert tiers.host.live == 0
    small = Ledger(Tier.HOST, 1000)
    with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=small, policy=policy) as folder:
        with pytest.raises(HostOutOfMemory, match="checksums"):
            folder.create("moments", MiB)
        assert (tiers.disk.live, small.live) == (0, 0)
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=DiskPolicy()) as folder:
        file = folder.create("moments", PAGE)
        file.write(0, pattern(PAGE))
        flip(file, 0)
        file.read(0, tensor_at(0, PAGE))  # nobody compares


def test_sums_of_a_file_that_is_not_made_are_given_back(tmp_path: Path, tiers: Tiers) -> None:
    full = ScriptedIo(always={"allocate": -errno.ENOSPC})
    with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, policy=VERIFIED, io=full) as folder:
        before, open_files = tiers.host.live, os.listdir("/proc/self/fd")
        with pytest.raises(DiskFull) as kept:  # whoever has the error has all that was there when it was raised
            folder.create("moments", PAGES * SUMMED)
        assert kept.value.needed == PAGES * SUMMED
        assert (tiers.host.live, tiers.disk.live) == (before, 0)
        assert os.listdir("/proc/self/fd") == open_files


def test_activations_have_no_sums(tmp_path: Path, tiers: Tiers) -> None:
    """They are read once, by the step that made them: no plan has room for more on the host."""
    with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, policy=VERIFIED) as folder:
        before = tiers.host.live
        activations = folder.create("activations", PAGES * SUMMED, Kind.ACTIVATION)
        assert activations.sums is None and tiers.host.live == before
        moments = folder.create("moments", PAGES * SUMMED)
        assert moments.sums is not None and tiers.host.live == before + PAGES * SUM_BYTES
