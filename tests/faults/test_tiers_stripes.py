"""Files over several folders: where each byte is, what a folder that is full or fails says, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.calls import Calls
from forebay.errors import ConfigError, DiskFull, HostOutOfMemory, StorageError
from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.diskfile import DiskPolicy
from forebay.tiers.stripes import DiskTier, Folder, lay_out
from forebay.units import MiB
from tests.faults.scripted_io import PAGE, ScriptedIo, pattern, round_trip, tensor_at

STRIPE = 4 * PAGE
POLICY = DiskPolicy(reads=Calls(2 * PAGE, 2), writes=Calls(2 * PAGE, 2), stripe=STRIPE)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Folder, Folder]]:
    before = set(os.listdir("/proc/self/fd"))
    for name in "ab":
        (tmp_path / name).mkdir()
    yield Folder(str(tmp_path / "a"), 64 * PAGE), Folder(str(tmp_path / "b"), 64 * PAGE)
    gc.collect()
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]
    assert set(os.listdir("/proc/self/fd")) <= before


pages = st.integers(0, 40).map(lambda n: n * PAGE)


@settings(max_examples=150, deadline=None)
@given(st.lists(pages, min_size=1, max_size=4), pages)
def test_every_byte_has_one_place_and_no_folder_holds_more_than_its_room(room: list[int], nbytes: int) -> None:
    if nbytes > sum(room):
        with pytest.raises(DiskFull) as caught:
            lay_out(nbytes, room, STRIPE, PAGE)
        assert (caught.value.needed, caught.value.allowed) == (nbytes, sum(room))
        return
    zones = lay_out(nbytes, room, STRIPE, PAGE)
    assert sum(z.nbytes for z in zones) == nbytes
    taken = {}
    for zone in zones:
        assert sum(zone.share(turn) for turn in range(len(zone.parts))) == zone.nbytes
        for offset in range(zone.start, zone.start + zone.nbytes, PAGE):
            part, place, follow = zone.find(offset)
            assert follow >= PAGE and place % PAGE == 0 and (part, place) not in taken
            assert offset + follow <= zone.start + zone.nbytes
            assert zone.find(offset + follow - 1) == (part, place + follow - 1, 1)
            taken[part, place] = offset
    assert sorted(taken.values()) == list(range(0, nbytes, PAGE))
    for part, most in enumerate(room):
        places = sorted(place for p, place in taken if p == part)
        assert places == list(range(0, len(places) * PAGE, PAGE))  # without gaps: a folder's file is as long as that
        assert len(places) * PAGE <= most


def test_stripes_take_turns() -> None:
    (zone,) = lay_out(5 * STRIPE, [STRIPE * 9] * 2, STRIPE, PAGE)
    found = [zone.find(n * STRIPE)[:2] for n in range(5)]
    assert found == [(0, 0), (1, 0), (0, STRIPE), (1, STRIPE), (0, 2 * STRIPE)]
    first, second, third = lay_out(6 * STRIPE + PAGE, [2 * STRIPE, 4 * STRIPE + PAGE], STRIPE, PAGE)
    assert (first.parts, first.nbytes) == ((0, 1), 4 * STRIPE)
    assert (second.parts, second.bases, second.nbytes) == ((1,), (2 * STRIPE,), 2 * STRIPE)
    assert (third.parts, third.bases, third.nbytes) == ((1,), (4 * STRIPE,), PAGE)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("skew", [0, 64])
def test_what_is_written_is_read(folders: tuple[Folder, Folder], depth: int, skew: int) -> None:
    ledger, host = Ledger(Tier.DISK), Ledger(Tier.HOST)
    policy = DiskPolicy(reads=Calls(2 * PAGE, depth), writes=Calls(PAGE, depth), stripe=STRIPE)
    with DiskTier(folders, ledger, host_ledger=host, policy=policy) as tier:
        file = tier.create("states", 51 * PAGE - 7, Kind.STATE)
        assert file.nbytes == ledger.live == 51 * PAGE
        assert host.live == 2 * 2 * PAGE  # the bounce buffers of one folder, which the other one uses too
        content = torch.zeros(51 * PAGE + skew, dtype=torch.uint8)[skew:]
        content.copy_(pattern(51 * PAGE))
        file.write(0, content)
        other = pattern(13 * PAGE, seed=1)
        file.write(3 * PAGE, other)
        content[3 * PAGE : 16 * PAGE] = other
        assert tier.written == (51 + 13) * PAGE
        for start, stop in pairwise((0, 1, 9, 30, 51)):
            part = torch.empty((stop - start) * PAGE, dtype=torch.uint8)
            file.read(start * PAGE, part)
            assert torch.equal(part, content[start * PAGE : stop * PAGE])
        # 51 pages in stripes of 4: 6 whole turns, and 3 pages more in the first folder.
        sizes = [os.fstat(int(fd)).st_size for fd in os.listdir("/proc/self/fd") if _is_ours(fd, folders)]
        assert sorted(sizes) == [24 * PAGE, 27 * PAGE]
    assert ledger.live == host.live == 0


def _is_ours(fd: str, folders: tuple[Folder, ...]) -> bool:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return any(target.startswith(str(folder.path)) for folder in folders)


def test_one_folder_with_calls_in_flight(tmp_path: Path) -> None:
    with DiskTier([Folder(str(tmp_path))], Ledger(Tier.DISK), policy=POLICY) as tier:
        file = tier.create("states", 20 * PAGE)
        file.write(0, pattern(20 * PAGE))
        part = torch.empty(11 * PAGE, dtype=torch.uint8)
        file.read(5 * PAGE, part)
        assert torch.equal(part, pattern(20 * PAGE)[5 * PAGE : 16 * PAGE])


def test_stripes_cut_no_calls_of_one_folder(tmp_path: Path) -> None:
    io = ScriptedIo()
    policy = DiskPolicy(reads=Calls(8 * PAGE), writes=Calls(2 * PAGE, 2), stripe=STRIPE)
    with DiskTier([Folder(str(tmp_path))], Ledger(Tier.DISK), policy=policy, io=io) as tier:
        round_trip(tier.create("states", 16 * PAGE), skew=64)
    assert (io.count("preadv"), io.count("pwritev")) == (2, 8)


def test_reads_and_writes_are_cut_into_calls_of_their_own(tmp_path: Path) -> None:
    """Two reads of a transfer are in flight at a time, and one write; each in its own size."""
    io, pair = ScriptedIo(), threading.Barrier(2)
    io.before_read = lambda: pair.wait(timeout=10)
    policy = DiskPolicy(reads=Calls(2 * PAGE, 2), writes=Calls(5 * PAGE), stripe=16 * PAGE)
    host = Ledger(Tier.HOST)
    with DiskTier([Folder(str(tmp_path))], Ledger(Tier.DISK), host_ledger=host, policy=policy, io=io) as tier:
        assert host.live == 2 * 5 * PAGE  # any call finds room in a bounce buffer
        round_trip(tier.create("states", 16 * PAGE), skew=64)
    assert (io.count("preadv"), io.count("pwritev")) == (8, 4)


def test_who_is_done_with_a_call_takes_the_next(tmp_path: Path) -> None:
    """The first call does not end before all others have begun: whoever is beside it makes them all."""
    io, last, lock = ScriptedIo(), threading.Event(), threading.Lock()
    begun: list[bool] = []

    def before() -> None:
        with lock:
            begun.append(True)
            first = len(begun) == 1
            if len(begun) == 8:
                last.set()
        if first:
            assert last.wait(timeout=10)

    with DiskTier([Folder(str(tmp_path))], Ledger(Tier.DISK), policy=POLICY, io=io) as tier:
        file = tier.create("states", 16 * PAGE)
        file.write(0, pattern(16 * PAGE))
        io.before_read = before
        whole = tensor_at(64, 16 * PAGE)  # not aligned: calls of threads, and none of the kernel's queue
        file.read(0, whole)
        assert torch.equal(whole, pattern(16 * PAGE)) and len(begun) == 8


def test_several_files_share_the_room(folders: tuple[Folder, Folder]) -> None:
    small = (Folder(folders[0].path, 6 * PAGE), folders[1])
    with DiskTier(small, Ledger(Tier.DISK), needed=70 * PAGE, policy=POLICY) as tier:
        made = [tier.create("parameters", 9 * PAGE, Kind.PARAMETER), tier.create("states", 61 * PAGE)]
        for seed, file in enumerate(made):
            file.write(0, pattern(file.nbytes, seed))
        for seed, file in enumerate(made):
            whole = torch.empty(file.nbytes, dtype=torch.uint8)
            file.read(0, whole)
            assert torch.equal(whole, pattern(file.nbytes, seed))
        with pytest.raises(DiskFull, match="folders have room"):
            tier.create("more", PAGE)


def test_too_little_room_is_said_at_once(folders: tuple[Folder, Folder]) -> None:
    host = Ledger(Tier.HOST)
    with pytest.raises(DiskFull, match=r"needs 516\.0 KiB and its folders have room for 512\.0 KiB"):
        DiskTier(folders, Ledger(Tier.DISK), needed=129 * PAGE, host_ledger=host, policy=POLICY)
    assert host.live == 0
    tight = (Folder(folders[0].path, PAGE), folders[1])
    with pytest.raises(DiskFull, match=r"/b may hold 256\.0 KiB and .* are free there"):
        DiskTier(tight, Ledger(Tier.DISK), policy=POLICY, io=ScriptedIo(free=2 * PAGE))
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier((folders[0], Folder(f"{folders[1].path}/missing", PAGE)), Ledger(Tier.DISK))
    with pytest.raises(HostOutOfMemory):
        DiskTier(folders, Ledger(Tier.DISK), host_ledger=Ledger(Tier.HOST, PAGE), policy=POLICY)
    with pytest.raises(StorageError, match="a folder at least"):
        DiskTier((), Ledger(Tier.DISK))


def test_a_folder_that_refuses_its_part_leaves_nothing_of_the_other(folders: tuple[Folder, Folder]) -> None:
    ledger = Ledger(Tier.DISK)
    with DiskTier(folders, ledger, policy=POLICY, io=ScriptedIo(faults={("allocate", 1): -errno.ENOSPC})) as tier:
        with pytest.raises(DiskFull, match=r"cannot make .* of .*/b/forebay.*/states: .*ENOSPC"):
            tier.create("states", 32 * PAGE)
        assert ledger.live == 0
        tier.create("states", 128 * PAGE)  # the room is there again


@pytest.mark.parametrize(("name", "code"), [("preadv", errno.EIO), ("pwritev", errno.ENOSPC)])
def test_a_folder_that_fails_is_named_once(folders: tuple[Folder, Folder], name: str, code: int) -> None:
    io = ScriptedIo()
    with DiskTier(folders, Ledger(Tier.DISK), policy=POLICY, io=io) as tier:
        file = tier.create("states", 32 * PAGE)
        file.write(0, pattern(32 * PAGE))
        io.always[name] = -code
        transfer = file.read if name == "preadv" else file.write
        with pytest.raises((StorageError, DiskFull), match=errno.errorcode[code]):
            transfer(0, torch.zeros(32 * PAGE, dtype=torch.uint8))
        io.always.clear()
        whole = torch.empty(32 * PAGE, dtype=torch.uint8)
        file.write(0, pattern(32 * PAGE, 1))
        file.read(0, whole)
        assert torch.equal(whole, pattern(32 * PAGE, 1))


@pytest.mark.parametrize(("offset", "length"), [(-PAGE, PAGE), (31 * PAGE, 2 * PAGE)])
def test_bytes_outside_are_refused(folders: tuple[Folder, Folder], offset: int, length: int) -> None:
    with DiskTier(folders, Ledger(Tier.DISK), policy=POLICY) as tier:
        file = tier.create("states", 32 * PAGE)
        for transfer in (file.read, file.write):
            with pytest.raises(StorageError, match="the file has 131072 bytes"):
                transfer(offset, torch.zeros(length, dtype=torch.uint8))
            with pytest.raises(StorageError, match="multiple of 4096"):
                transfer(8, torch.zeros(PAGE, dtype=torch.uint8))


def test_the_ledger_refuses_what_is_over_the_budget(folders: tuple[Folder, Folder]) -> None:
    ledger = Ledger(Tier.DISK, MiB // 16)
    with DiskTier(folders, ledger, policy=POLICY) as tier, pytest.raises(DiskFull, match="raise the size of the disk"):
        tier.create("states", MiB // 16 + PAGE)
    assert ledger.live == 0
