"""A disk as it is measured, and several of them side by side."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from forebay.budgets import DiskBudget
from forebay.calls import Calls
from forebay.device.cpu import CpuDevice
from forebay.errors import ConfigError
from forebay.machine import Curve, Disk, Link
from forebay.memory import Ledger, Tier
from forebay.profiler.disk_rates import WAYS, DiskTrial, fastest, measure_disk
from forebay.profiler.effort import CPU_EFFORT
from forebay.profiler.here import this_machine
from forebay.profiler.probe import nominal
from forebay.profiler.storage_trial import alternating, by_turns
from forebay.simulation.sharing import DISK, LANES, Sharing
from forebay.tiers.diskfile import Buffer, TierFile, bytes_of
from forebay.tiers.host import available_disk, disks_of, free_in
from forebay.tiers.stripes import DiskTier, Folder
from forebay.timeline import Lane
from forebay.units import KiB, MiB

LINK = Link(Curve(((MiB, 1e9),)))


def test_a_disk_is_measured_in_the_way_that_the_runtime_will_use(tmp_path: Path) -> None:
    effort = replace(CPU_EFFORT, rounds=2, bound=0.05, disk_sizes=(64 * KiB, 256 * KiB), disk_file=MiB)
    device = CpuDevice()
    found = measure_disk(device, str(tmp_path), effort)
    device.close()
    disk = found.disk
    assert disk.reads in WAYS and disk.writes in WAYS
    assert f"read in {disk.reads}, written in {disk.writes}" in found.remark
    assert 0 < disk.duplex <= 1 and 0 <= disk.shared_cores < 1
    assert 0 < disk.alternation <= 1 and disk.order_seconds < 0.1
    assert [size for size, _ in disk.read.curve.points] == [64 * KiB, 256 * KiB]
    assert str(tmp_path) in found.remark
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("found", "order", "alternation"),
    [
        ({100: (1.5, 1.0), 300: (3.5, 3.0)}, 0.5, 1.0),  # what every chunk takes
        ({100: (2.0, 1.0), 300: (6.0, 3.0)}, 0.0, 0.5),  # what every byte takes
        ({300: (6.25, 3.0), 100: (2.25, 1.0)}, 0.25, 0.5),
        ({100: (2.0, 1.0), 300: (3.0, 3.0)}, 1.0, 1.0),  # more bytes took no longer: an order did
        ({100: (0.9, 1.0), 300: (2.9, 3.0)}, 0.0, 1.0),  # nothing is faster than in a row
        ({100: (1.25, 1.0)}, 0.25, 1.0),
        ({100: (1.0, 1.0), 300: (201.0, 3.0)}, 0.0, 0.05),  # disturbed
    ],
)
def test_what_a_chunk_beside_the_storage_takes_is_split_into_its_order_and_its_bytes(
    found: dict[int, tuple[float, float]], order: float, alternation: float
) -> None:
    assert alternating(found) == (pytest.approx(order), pytest.approx(alternation))


def test_a_process_asked_for_chunks_leaves_their_bytes_as_they_are(tmp_path: Path) -> None:
    device, buffer = CpuDevice(), torch.zeros(64 * KiB, dtype=torch.uint8)
    effort = replace(CPU_EFFORT, rounds=2, bound=0.05, disk_sizes=(64 * KiB,), disk_file=MiB)
    with DiskTier([Folder(str(tmp_path))], Ledger(Tier.DISK), needed=MiB) as tier:
        file = tier.create("probe", MiB)
        for start in range(0, MiB, 64 * KiB):
            file.write(start, buffer.fill_(start // (64 * KiB) + 1))
        by_turns(device, file, LINK, LINK, effort)
        for start in range(0, MiB, 64 * KiB):
            file.read(start, buffer)
            assert bool((buffer == start // (64 * KiB) + 1).all())
    device.close()


class Noted(TierFile):
    """A file that notes which of its bytes were asked for, and where in memory they went or came from."""

    nbytes = MiB

    def __init__(self) -> None:
        self.asked: dict[str, list[tuple[int, int, int]]] = {"read": [], "write": []}

    def read(self, offset: int, buffer: Buffer) -> None:
        self._note("read", offset, buffer)

    def write(self, offset: int, buffer: Buffer) -> None:
        self._note("write", offset, buffer)

    def _note(self, verb: str, offset: int, buffer: Buffer) -> None:
        assert isinstance(buffer, torch.Tensor)
        self.asked[verb].append((offset, buffer.data_ptr(), len(bytes_of(buffer))))

    def reserve(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("lane", "verb"), [(Lane.DISK_READ, "read"), (Lane.DISK_WRITE, "write")])
def test_what_is_measured_is_never_in_a_cache_of_the_time_before(lane: Lane, verb: str) -> None:
    """Of 512 KiB at most that a transfer moves, the next one moves others, in the file as in memory; all of the file
    comes in turn; and nothing is read to where something is written from."""
    device, file, size = CpuDevice(), Noted(), 64 * KiB
    buffer = torch.zeros(4 * size, dtype=torch.uint8)
    effort = replace(CPU_EFFORT, rounds=4, bound=0.05, disk_sizes=(size,), disk_file=MiB)
    trial = DiskTrial(device, file, buffer)
    trial.link(lane, effort)
    trial.duplex(effort)
    device.close()
    asked = [one for one in file.asked[verb] if one[2] == size]
    assert {offset for offset, _, _ in asked} == set(range(0, MiB, size))
    pairs = list(pairwise(asked))
    assert all(one[0] != other[0] and one[1] != other[1] for one, other in pairs)
    places = {verb: {place for _, place, _ in found} for verb, found in file.asked.items()}
    assert not places["read"] & places["write"]


def test_a_way_is_chosen_for_what_it_takes_of_a_round_and_not_for_its_luck() -> None:
    usual, small, deep = Calls(4 * MiB), Calls(MiB), Calls(4 * MiB, 4)
    # The disk is slow in every other round. `small` was lucky once; `deep` is a fifth faster in each.
    assert fastest({usual: [1.0, 3.0, 1.0, 3.0], small: [1.0, 3.0, 0.1, 3.0], deep: [0.8, 2.4, 0.8, 2.4]}) == deep
    assert fastest({usual: [1.0, 3.0, 1.0], small: [0.98, 2.9, 0.97], deep: [1.1, 3.3, 1.1]}) == usual


def test_reading_and_writing_share_a_disk() -> None:
    machine = replace(nominal("cpu"), disk=Disk(MiB, LINK, LINK, duplex=0.6))
    read, write = LANES.index(Lane.DISK_READ), LANES.index(Lane.DISK_WRITE)
    sharing = Sharing(machine)
    assert sharing.shares(1 << read)[read] == sharing.shares(1 << write)[write] == 1.0
    both = sharing.shares(DISK)
    assert both[read] == both[write] == 0.6
    assert both[LANES.index(Lane.COMPUTE)] == Sharing(replace(machine, disk=None)).shares(DISK)[0]


@pytest.mark.parametrize("wrong", [0.0, 1.1])
def test_what_no_disk_is_like_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="disk"):
        Disk(MiB, LINK, LINK, duplex=wrong)
    with pytest.raises(ConfigError, match=r"shared_cores of a disk is in \[0, 1\)"):
        Disk(MiB, LINK, LINK, shared_cores=wrong - 0.1)  # below 0, and all


def test_folders_of_one_file_system_have_its_room_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / name) for name in "ab"]
    assert disks_of(paths) == {os.stat(tmp_path).st_dev: paths[0]}
    alone, _ = this_machine("cpu", DiskBudget(paths[0]))
    both, notes = this_machine("cpu", DiskBudget.of(",".join(paths)))
    assert alone.disk is not None and both.disk is not None
    assert both.disk.read == alone.disk.read and not any("side by side" in note for note in notes)
    assert abs(free_in(paths) - available_disk(paths[0])) < 64 * MiB  # others write meanwhile
    with pytest.raises(ConfigError, match="cannot look at"):
        free_in([paths[0], f"{tmp_path}/missing"])


def test_two_disks_are_twice_as_fast_for_twice_the_bytes(tmp_path: Path) -> None:
    other = "/dev/shm"
    if not os.path.isdir(other) or os.stat(other).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one file system is all there is")
    one, _ = this_machine("cpu", DiskBudget(str(tmp_path)))
    two, notes = this_machine("cpu", DiskBudget.of(f"{tmp_path},{other}"))
    assert one.disk is not None and two.disk is not None
    assert two.disk.read.curve.points == tuple((2 * size, 2 * rate) for size, rate in one.disk.read.curve.points)
    assert two.disk.write.seconds(16 * MiB) == pytest.approx(one.disk.write.seconds(8 * MiB))
    assert any(note.startswith("2 disks of one rate side by side") for note in notes)
