"""What a device that ran out of memory held then: a memory snapshot that forebay reads again."""

from __future__ import annotations

import pickle
from pathlib import Path
from threading import Thread

import pytest
import torch

from forebay.device.cpu import CpuDevice
from forebay.device.history import History
from forebay.device.ledger import StorageLedger
from forebay.errors import DeviceOutOfMemory
from forebay.memory import Kind
from forebay.recording import Recording
from forebay.snapshot import read_snapshot
from forebay.units import KiB


def read(error: DeviceOutOfMemory, folder: Path) -> Recording:
    assert error.snapshot is not None
    path = folder / "out-of-memory.pickle"
    path.write_bytes(pickle.dumps(error.snapshot))
    return read_snapshot(path)


def names(found: Recording) -> list[str]:
    return [request.what for request in found.requests]


def test_what_is_there_is_what_the_ledger_counts(tmp_path: Path) -> None:
    device = CpuDevice(64 * KiB)
    slot = device.allocate(16 * KiB, Kind.PARAMETER, "a slot")
    device.free(device.allocate(4 * KiB, Kind.STAGING, "gone"))
    watch = StorageLedger(device.ledger, lambda: "block layers.1 in backward: ", device.history)
    watch.install()
    try:
        watch.activate(True)
        kept = torch.ones(4 * KiB)  # 16 KiB
        kept + kept
        with pytest.raises(DeviceOutOfMemory, match=r"block layers\.1 in backward: the result") as refused:
            torch.cat([kept] * 4)
    finally:
        watch.uninstall()
    found = read(refused.value, tmp_path)
    assert found.live[-1] == device.ledger.live == 32 * KiB
    assert max(found.live) == device.ledger.usage().peak == 48 * KiB
    assert names(found) == [
        "forebay a slot",
        "forebay gone",
        "layers.1 in backward aten.ones.default",
        "layers.1 in backward aten.add.Tensor",
    ]
    assert found.observed == 32 * KiB
    assert found.notes[-1] == "it ran out when 64.0 KiB more were asked for: layers.1 in backward aten.cat.default"
    assert slot.nbytes == 16 * KiB
    device.close()


def test_what_the_device_itself_is_asked_for(tmp_path: Path) -> None:
    device = CpuDevice(8 * KiB)
    part = CpuDevice(8 * KiB, of=device)
    held = device.allocate(4 * KiB, Kind.STATE, "states")
    with pytest.raises(DeviceOutOfMemory) as refused:
        part.allocate(6 * KiB, Kind.PARAMETER, "slots")
    # The account of a part is that of the whole: the other's bytes are what is in its way.
    found = read(refused.value, tmp_path)
    assert names(found) == ["forebay states"] and "6.0 KiB more were asked for: forebay slots" in found.notes[-1]
    device.free(held)
    part.close()
    device.close()


def test_few_entries_are_kept_and_all_that_is_there(tmp_path: Path) -> None:
    history = History(most=3)
    first = history.made(100, "first")
    for number in range(10):
        history.gone(history.made(10, f"brief {number}"))
    history.gone(12345)  # of nobody
    error = DeviceOutOfMemory("short", needed=2, allowed=1)
    assert history.told(error, 7, "more") is error
    found = read(error, tmp_path)
    # The oldest entry left is that "brief 8" was given back: it was there before, as the first still is.
    assert names(found) == ["forebay brief 8", "forebay brief 9", "forebay first"]
    assert found.live[-1] == 100 and max(found.live) == 110
    history.gone(first)
    assert history.snapshot(1, "")["segments"] == []


def test_threads_get_addresses_of_their_own() -> None:
    history, got = History(), list[int]()

    def ask() -> None:
        got.extend([history.made(8, "") for _ in range(500)])

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 2000 == len(history.snapshot(1, "")["segments"])
    assert all(address % 8 == 0 for address in got)
