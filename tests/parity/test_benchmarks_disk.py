"""The comparison with fio: everyone has the same bytes of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fasthost.disk import BUFFERS, CHUNK, RINGED, MiB, Raw, _only_open, _ringed, _rows, _Tier
from forebay.calls import Calls
from forebay.device.cpu import CpuDevice
from forebay.machine import Curve, Disk, Link
from forebay.memory import Ledger, Tier
from forebay.tiers.diskfile import DiskPolicy
from forebay.tiers.stripes import DiskTier, Folder

LINK = Link(Curve(((MiB, 1e9),)))
DISK = Disk(MiB, LINK, LINK, reads=Calls(2 * MiB), writes=Calls(MiB, 2))


def test_a_program_beside_the_tier_writes_the_tiers_own_file(tmp_path: Path) -> None:
    device, nbytes = CpuDevice(), CHUNK
    policy = DiskPolicy(reads=Calls(MiB, 2), writes=Calls(2 * MiB))
    with DiskTier([Folder(str(tmp_path))], Ledger(Tier.DISK), policy=policy) as tier:
        subject = _Tier(device, tier, nbytes)
        try:
            file = _only_open(str(tmp_path))
            before = file.read_bytes()
            assert len(before) == nbytes and any(before)
            assert Raw().seconds("write", file, nbytes, 4 * MiB, 1) > 0
            assert file.read_bytes() != before
            for verb in ("read", "write", "both"):
                assert subject.seconds(verb) > 0
        finally:
            subject.close()
            device.close()
    with pytest.raises(ValueError, match="unpack"):
        _only_open(str(tmp_path))


def test_what_counts_is_the_best_way_of_anybody_else() -> None:
    seconds = {
        ("fio", "read", MiB, 2): [2.0, 2.0, 2.0],
        ("raw", "read", MiB, 2): [1.0, 3.0, 3.0],  # faster at times, and no faster in the others
        ("raw", "read", 4 * MiB, 1): [1.4, 1.5, 1.6],
        ("raw" + RINGED, "read", 4 * MiB, 1): [0.8, 0.8, 0.9],  # no target is for it, however fast
        ("fio" + RINGED, "read", 4 * MiB, 24): [0.9, 0.9, 0.9],
        ("forebay", "read", 0, 0): [1.0, 1.0, 1.0],
        ("raw", "write", MiB, 2): [0.1, 0.1, 0.1],
    }
    rows = {row.name: row for row in _rows("read", seconds, 1000, DISK)}
    assert set(rows) == {"fio read", "raw read", f"fio{RINGED} read", f"raw{RINGED} read", "forebay read"}
    assert rows["raw read"].what == "4 MiB, 1 in flight"
    assert rows["forebay read"].ratios == (1.4, 1.5, 1.6) and rows["forebay read"].met is True
    assert rows["forebay read"].what == "chunks of 32 MiB in calls of 2.0 MiB, 1 at a time"
    assert rows["forebay read"].note == "0.800 of the best from and to as much memory"
    same = {
        key: [1.0] * 2 for key in (("forebay", "both", 0, 0), *((n, "both", MiB, 2) for n in ("raw", "raw" + RINGED)))
    }
    both = _rows("both", same, 1000, DISK)[-1]
    assert both.what == "chunks of 32 MiB in calls of 2.0 MiB, 1 at a time and calls of 1.0 MiB, 2 at a time"


def test_as_much_memory_is_that_of_the_tiers_ring() -> None:
    assert {block * depth for name, block, depth in _ringed() if name == "fio"} <= {BUFFERS * CHUNK}
    assert {depth for name, _, depth in _ringed() if name == "raw"} == {1}, "who goes round in its own ring"
