"""The comparison with fio: everyone has the same bytes of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fasthost.disk import CHUNK, MiB, Raw, _only_open, _rows, _Tier
from forebay.device.cpu import CpuDevice
from forebay.memory import Ledger, Tier
from forebay.tiers.diskfile import DiskPolicy
from forebay.tiers.stripes import DiskTier, Folder


def test_a_program_beside_the_tier_writes_the_tiers_own_file(tmp_path: Path) -> None:
    device, nbytes = CpuDevice(), CHUNK
    policy = DiskPolicy(block=MiB, depth=2)
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
        ("forebay", "read", 0, 0): [1.0, 1.0, 1.0],
        ("raw", "write", MiB, 2): [0.1, 0.1, 0.1],
    }
    rows = {row.name: row for row in _rows("read", seconds, 1000, 2 * MiB, 1)}
    assert set(rows) == {"fio read", "raw read", "forebay read"}
    assert rows["raw read"].what == "4 MiB, 1 in flight"
    assert rows["forebay read"].ratios == (1.4, 1.5, 1.6) and rows["forebay read"].met is True
