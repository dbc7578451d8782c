"""The models of PyTorch's allocator against what it did on a card (``benchmarks/snapshots.py``): every byte that it
reserved, after every request, and every address that it gave."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forebay.simulation.allocators.base import Allocator, Places
from forebay.simulation.allocators.caching import CachingAllocator, CachingSettings
from forebay.simulation.allocators.expandable import ExpandableAllocator
from forebay.simulation.allocators.replay import replay, room_for
from forebay.snapshot import read_snapshot
from forebay.units import MiB

FOLDER = Path(__file__).parent / "snapshots"
NAMES = sorted(path.name.removesuffix(".pickle.gz") for path in FOLDER.glob("*.pickle.gz"))
GROWING = [name for name in NAMES if "expandable" in name]

Entry = Mapping[str, Any]


@cache
def snapshot_of(name: str) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = pickle.loads(gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes()))
    return loaded


def entries_of(name: str) -> Sequence[Entry]:
    (entries,) = snapshot_of(name)["device_traces"]
    return list(entries)


@dataclass
class Recorded(Places):
    """Segments where the card's were: cudaMalloc gives no addresses that anyone could foresee."""

    addresses: list[int]

    def take(self, nbytes: int) -> int:
        return self.addresses.pop(0)

    def give_back(self, address: int) -> None:
        pass


def model_of(name: str, places: Places | None = None, limit: int | None = None) -> Allocator:
    """The model with the settings that the recording was made with, its limit among them if no other is given."""
    scenario = snapshot_of(name)["scenario"]
    limit = scenario["limit"] if limit is None else limit
    settings = dict(one.split(":") for one in scenario["settings"].split(",") if one)
    if name in GROWING:
        assert settings == {"expandable_segments": "True"}
        return ExpandableAllocator(limit)
    split = settings.get("max_split_size_mb")
    collect = float(settings.get("garbage_collection_threshold", 0))
    given = CachingSettings(limit, None if split is None else int(split) * MiB, collect)
    return CachingAllocator(given, places)


def reserved_at(entries: Sequence[Entry]) -> list[int]:
    """Bytes that the card's allocator had reserved at each entry."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    total, levels = 0, []
    for entry in entries:
        total += signs.get(entry["action"], 0) * entry["size"]
        levels.append(total)
    return levels


def test_pages_were_given_back_in_one_of_them() -> None:
    """A GPT-2 that streams within 1.8 GiB: what it has live at most is 1.58 of them."""
    entries = entries_of("gpt2-streamed-expandable")
    assert [entry["size"] for entry in entries if entry["action"] == "segment_unmap"] == [160 * MiB]
    assert max(reserved_at(entries)) <= snapshot_of("gpt2-streamed-expandable")["scenario"]["limit"]


def test_there_are_recordings() -> None:
    assert {"gpt2", "llama", "gpt2-expandable", "llama-unsplit", "requests-collected", "requests-streams"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_and_every_address(name: str) -> None:
    entries = entries_of(name)
    model = model_of(name, Recorded([e["addr"] for e in entries if e["action"] == "segment_alloc"]))
    made, where = 0, dict[int, int]()
    # Of a segment that grows: how far the card's addresses in it are from the model's, by stream and size.
    apart = dict[tuple[int, bool], int]()
    for entry, reserved in zip(entries, reserved_at(entries), strict=True):
        address = entry["addr"]
        if entry["action"] == "alloc":
            (box,) = model.allocate(made, entry["size"], entry["stream"])
            assert model.reserved == reserved
            shift = apart.setdefault((entry["stream"], entry["size"] <= MiB), address - box.address)
            assert address - box.address == (shift if name in GROWING else 0)
            where[address], made = made, made + 1
        elif entry["action"] == "free_completed":
            model.free(where.pop(address))
    assert made > 1000
    assert model.reserved == sum(segment["total_size"] for segment in snapshot_of(name)["segments"])


@pytest.mark.parametrize("name", NAMES)
def test_as_fragmentation_reads_it(name: str, tmp_path: Path) -> None:
    """Where nobody says where segments lie, two free blocks of one size may be taken in the other order: the end is the
    card's to a segment."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(snapshot_of(name)))
    recording = read_snapshot(file)
    played = replay(name, recording, lambda limit: model_of(name))
    assert recording.observed is not None
    assert abs(played.reserved[-1] - recording.observed) <= 20 * MiB
    assert max(recording.live) <= played.peak_reserved


@pytest.mark.parametrize("name", [name for name in NAMES if snapshot_of(name)["scenario"]["limit"] is not None])
def test_what_ran_within_a_limit_has_room_within_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(snapshot_of(name)))
    recording, limit = read_snapshot(file), snapshot_of(name)["scenario"]["limit"]
    assert max(recording.live) <= room_for(recording, lambda limit: model_of(name, limit=limit)) <= limit
