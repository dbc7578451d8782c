"""Reads and writes of a disk file: round trips, short transfers, errors of the file system through the Io seam."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.calls import Calls
from forebay.errors import DiskFull, ForebayError, StorageError
from forebay.memory import Ledger, Tier
from forebay.tiers.disk import DiskFile, DiskFolder, DiskPolicy
from forebay.units import MiB
from tests.faults.scripted_io import PAGE, SMALL, ScriptedIo, Tiers, pattern, round_trip, tensor_at


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "buffered"])
def shared_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskFile]:
    policy = replace(SMALL, direct=request.param)
    with DiskFolder(tmp_path_factory.mktemp("disk"), ledger=Ledger(Tier.DISK), policy=policy) as folder:
        file = folder.create("moments", 64 * PAGE)
        if file.direct is not request.param:
            pytest.skip("this file system refuses O_DIRECT")
        yield file


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, 63),
    length=st.integers(0, 64),
    skew=st.sampled_from([0, 1, 64, 512, 4095]),
    as_view=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_round_trip(shared_file: DiskFile, start: int, length: int, skew: int, as_view: bool, seed: int) -> None:
    nbytes = min(length, 64 - start) * PAGE
    before, after = torch.empty(64 * PAGE, dtype=torch.uint8), torch.empty(64 * PAGE, dtype=torch.uint8)
    shared_file.read(0, before)
    source, target = tensor_at(skew, nbytes), tensor_at(skew, nbytes)
    source.copy_(pattern(nbytes, seed))
    direct = shared_file.direct
    shared_file.write(start * PAGE, source.numpy().data if as_view else source)
    shared_file.read(start * PAGE, target.numpy().data if as_view else target)
    assert torch.equal(source, target)
    shared_file.read(0, after)
    before[start * PAGE : start * PAGE + nbytes] = source
    assert torch.equal(before, after)  # nothing outside of the range changed
    assert shared_file.direct is direct  # and nobody fell back in silence


def test_read_only_memory_can_be_written_to_disk_and_not_read_into(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file = folder.create("text", PAGE)
        file.write(0, memoryview(b"ab" * (PAGE // 2)))
        target = torch.zeros(PAGE, dtype=torch.uint8)
        file.read(0, target)
        assert bytes(target.numpy()) == b"ab" * (PAGE // 2)
        with pytest.raises(StorageError, match="read-only"):
            file.read(0, memoryview(bytes(PAGE)))


def test_o_direct_refused_at_open(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, io=ScriptedIo(always={"open_direct": -errno.EINVAL})) as folder:
        file = folder.create("moments", MiB)
        assert not file.direct
        round_trip(file, skew=1)


def test_one_file_in_the_page_cache_is_enough_that_a_folder_is_not_past_it(tmp_path: Path, tiers: Tiers) -> None:
    io = ScriptedIo(faults={("open_direct", 1): -errno.EINVAL})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        first = folder.create("moments", PAGE)
        if not first.direct:
            pytest.skip("this file system refuses O_DIRECT")
        assert folder.direct
        second = folder.create("codes", PAGE)
        assert first.direct and not second.direct and not folder.direct


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("skew", [0, 64])
def test_o_direct_refused_at_the_first_transfer(tmp_path: Path, tiers: Tiers, name: str, skew: int) -> None:
    io = ScriptedIo(faults={(name, 0): -errno.EINVAL})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        file = folder.create("moments", 16 * PAGE)
        assert file.direct
        round_trip(file, skew)
        assert not file.direct


def test_einval_without_o_direct_is_an_error(tmp_path: Path, tiers: Tiers) -> None:
    io = ScriptedIo(always={"pwritev": -errno.EINVAL})
    with DiskFolder(tmp_path, ledger=tiers.disk, io=io) as folder:
        file = folder.create("moments", PAGE)
        with pytest.raises(StorageError, match="EINVAL"):
            file.write(0, pattern(PAGE))


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize(("stop", "direct"), [(PAGE, True), (3 * PAGE, True), (100, False), (PAGE + 1, False)])
@pytest.mark.parametrize("skew", [0, 64])
def test_short_transfers_go_on_where_they_stopped(
    tmp_path: Path, tiers: Tiers, name: str, stop: int, direct: bool, skew: int
) -> None:
    io = ScriptedIo(faults={(name, 0): stop, (name, 2): stop})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        file = folder.create("moments", 32 * PAGE)
        round_trip(file, skew)
        assert file.direct is direct  # inside an aligned unit only the page cache can go on
        assert io.count(name) > 32 // 4


@pytest.mark.parametrize(
    ("name", "code", "error", "words"),
    [
        ("preadv", errno.EIO, StorageError, "cannot read 16384 bytes at offset 20480 of .*/moments: .*EIO.*check the"),
        (
            "pwritev",
            errno.EIO,
            StorageError,
            "cannot write 16384 bytes at offset 20480 of .*/moments: .*EIO.*check the",
        ),
        ("pwritev", errno.EROFS, StorageError, "EROFS"),
        ("pwritev", errno.EBADF, StorageError, "EBADF"),
        ("pwritev", errno.ENOSPC, DiskFull, "ENOSPC.*are free; make room"),
        ("pwritev", errno.EDQUOT, DiskFull, "EDQUOT.*are free; make room"),
    ],
)
@pytest.mark.parametrize("skew", [0, 64])
def test_io_errors_name_file_offset_and_reason(
    tmp_path: Path, tiers: Tiers, name: str, code: int, error: type[ForebayError], words: str, skew: int
) -> None:
    io = ScriptedIo(faults={(name, 1): -code})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        file = folder.create("moments", 16 * PAGE)
        transfer = file.read if name == "preadv" else file.write
        with pytest.raises(error, match=words):
            transfer(PAGE, tensor_at(skew, 12 * PAGE))
        round_trip(file, skew)  # the file is as good as before, and so are the bounce buffers


def test_a_file_cut_short_by_someone_else(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL) as folder:
        file = folder.create("moments", 8 * PAGE)
        for length in (3 * PAGE, 3 * PAGE + 100):
            os.ftruncate(file.descriptor, length)
            with pytest.raises(StorageError, match=f"at offset {length} of .* the file ends there, .*32768 bytes"):
                file.read(0, torch.empty(8 * PAGE, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("offset", "buffer", "words"),
    [
        (1, torch.zeros(PAGE, dtype=torch.uint8), "offset must be a multiple of 4096, got 1; use padded"),
        (0, torch.zeros(PAGE + 512, dtype=torch.uint8), "size must be a multiple of 4096, got 4608; use padded"),
        (-PAGE, torch.zeros(PAGE, dtype=torch.uint8), "not inside a file of 8192 bytes"),
        (PAGE, torch.zeros(2 * PAGE, dtype=torch.uint8), "not inside a file of 8192 bytes"),
        (0, torch.zeros(PAGE), "contiguous uint8 tensor"),
        (0, torch.zeros(2 * PAGE, dtype=torch.uint8)[::2], "contiguous uint8 tensor"),
        (0, memoryview(bytearray(2 * PAGE))[::2], "contiguous memoryview"),
    ],
)
def test_misuse(tmp_path: Path, tiers: Tiers, offset: int, buffer: torch.Tensor | memoryview, words: str) -> None:
    for policy in (SMALL, DiskPolicy(direct=False)):  # the same rules, or a fallback would hide a mistake
        with DiskFolder(tmp_path, ledger=tiers.disk, policy=policy) as folder:
            file = folder.create("moments", 2 * PAGE)
            for transfer in (file.read, file.write):
                with pytest.raises(StorageError, match=words):
                    transfer(offset, buffer)


def test_closed_file_says_so(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file = folder.create("moments", PAGE)
    with pytest.raises(StorageError, match="is closed"):
        file.read(0, torch.empty(PAGE, dtype=torch.uint8))


def test_close_waits_for_the_transfer_under_way(tmp_path: Path, tiers: Tiers) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go.wait()

    io = ScriptedIo(before_read=hold)
    folder = DiskFolder(tmp_path, ledger=tiers.disk, io=io)
    file = folder.create("moments", PAGE)
    file.write(0, pattern(PAGE))
    target = torch.zeros(PAGE, dtype=torch.uint8)
    reader = threading.Thread(target=file.read, args=(0, target))
    reader.start()
    inside.wait()
    closer = threading.Thread(target=folder.close)
    closer.start()
    while not file.closed:  # from here on close waits, and new transfers are refused
        time.sleep(0.001)
    with pytest.raises(StorageError, match="is closed"):
        file.write(0, target)
    assert tiers.disk.live == PAGE
    os.fstat(file.descriptor)  # still open
    go.set()
    reader.join()
    closer.join()
    assert torch.equal(target, pattern(PAGE))


@pytest.mark.parametrize(("skew", "calls"), [(0, 2), (64, 8)])
def test_a_call_longer_than_a_bounce_buffer_is_cut_for_memory_that_is_not_aligned(
    tmp_path: Path, tiers: Tiers, skew: int, calls: int
) -> None:
    io, long = ScriptedIo(), Calls(8 * PAGE)
    policy = DiskPolicy(reads=long, writes=long, bounce_block=2 * PAGE)
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=policy, io=io) as folder:
        file = folder.create("moments", 16 * PAGE)
        if not file.direct:
            pytest.skip("this file system refuses O_DIRECT")
        round_trip(file, skew)
    assert (io.count("pwritev"), io.count("preadv")) == (calls, calls)


def test_more_unaligned_callers_than_bounce_buffers(tmp_path: Path, tiers: Tiers) -> None:
    policy = DiskPolicy(reads=Calls(PAGE), writes=Calls(PAGE), bounce_buffers=1)
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=policy) as folder:
        file = folder.create("moments", 4 * 8 * PAGE)
        parts = [tensor_at(64, 8 * PAGE) for _ in range(4)]

        def work(part: int) -> None:
            for seed in range(5):
                file.write(part * 8 * PAGE, pattern(8 * PAGE, 10 * part + seed))
                file.read(part * 8 * PAGE, parts[part])

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for part in range(4):
            assert torch.equal(parts[part], pattern(8 * PAGE, 10 * part + 4))
