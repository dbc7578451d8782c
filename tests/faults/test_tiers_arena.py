"""Host arenas: exact size, the ledgers, refused pinning, and memory that is given back."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from forebay.errors import HostOutOfMemory, SessionClosed, UsageError
from forebay.memory import ArenaUsage, Kind, Ledger, Tier
from forebay.tiers.arena import CudaPinner, HostArena, NoPinner, Pinner
from forebay.units import MiB

ODD = 5 * MiB + 321  # neither a power of two nor a page


class ScriptedPinner(Pinner):
    """Says yes or no, and remembers what it was asked. ``meanwhile`` happens while the driver works."""

    def __init__(self, answer: bool, meanwhile: tuple[Ledger, int] | None = None) -> None:
        self.answer = answer
        self.meanwhile = meanwhile
        self.asked: list[tuple[int, int]] = []
        self.held: list[int] = []

    @property
    def refusal(self) -> str:
        return "the script says no"

    def pin(self, address: int, nbytes: int) -> bool:
        self.asked.append((address, nbytes))
        if self.meanwhile is not None:
            ledger, taken = self.meanwhile
            ledger.charge(Kind.STATE, taken)
        if self.answer:
            self.held.append(address)
        return self.answer

    def unpin(self, address: int) -> None:
        self.held.remove(address)


@pytest.fixture
def host() -> Ledger:
    return Ledger(Tier.HOST, 64 * MiB)


@pytest.fixture
def pinned() -> Ledger:
    return Ledger(Tier.PINNED, 16 * MiB)


def resident_bytes() -> int:
    """Resident anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, ODD])
def test_exact_size_page_aligned_and_zero(host: Ledger, nbytes: int) -> None:
    with HostArena(nbytes, Kind.PARAMETER, ledger=host, what="block") as arena:
        assert arena.memory.shape == (nbytes,)
        assert arena.memory.dtype is torch.uint8
        assert arena.memory.data_ptr() % mmap.PAGESIZE == 0
        assert arena.memory.untyped_storage().nbytes() - nbytes < mmap.PAGESIZE  # no power of two above ODD does that
        assert not arena.memory.any()
        assert (host.live, host.usage().at_peak[Kind.PARAMETER]) == (nbytes, nbytes)
    assert host.live == 0


def test_an_arena_of_nothing(host: Ledger, pinned: Ledger) -> None:
    pinner = ScriptedPinner(True)
    with HostArena(0, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="empty") as arena:
        assert arena.view(0, 0).numel() == 0
        assert not arena.pinned
    assert pinner.asked == []


def test_budget_refused_counts_nothing(host: Ledger) -> None:
    held = HostArena(40 * MiB, Kind.STATE, ledger=host, what="moments")
    with pytest.raises(HostOutOfMemory, match=r"gradients needs 30\.0 MiB more, 40\.0 MiB of 64\.0 MiB") as caught:
        HostArena(30 * MiB, Kind.GRADIENT, ledger=host, what="gradients")
    assert (caught.value.needed, caught.value.allowed) == (70 * MiB, 64 * MiB)
    assert (host.live, host.usage().peak) == (40 * MiB, 40 * MiB)
    held.close()


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 63])
def test_machine_refuses_counts_nothing(nbytes: int) -> None:
    host = Ledger(Tier.HOST)
    with pytest.raises(HostOutOfMemory, match="the machine refused") as caught:
        HostArena(nbytes, Kind.STATE, ledger=host, what="moments")
    assert caught.value.needed == nbytes
    assert host.live == 0


def test_pinned_counts_in_both_ledgers_until_close(host: Ledger, pinned: Ledger) -> None:
    pinner = ScriptedPinner(True)
    arena = HostArena(ODD, Kind.GRADIENT, ledger=host, pinned_ledger=pinned, pinner=pinner, what="gradients")
    assert arena.pinned
    assert arena.note == ""
    assert pinner.asked == [(arena.memory.data_ptr(), 5 * MiB + 4096)]  # ODD in whole pages
    assert (host.live, pinned.live) == (ODD, ODD)
    arena.close()
    assert pinner.held == []
    assert (host.live, pinned.live) == (0, 0)
    arena.close()
    assert (host.live, pinned.live) == (0, 0)


@pytest.mark.parametrize(
    ("pinner", "note"),
    [
        (ScriptedPinner(False), "moments: pageable, the script says no"),
        (NoPinner(), ""),
        (None, ""),
    ],
)
def test_refused_by_the_driver_is_pageable(host: Ledger, pinned: Ledger, pinner: Pinner | None, note: str) -> None:
    with HostArena(ODD, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="moments") as arena:
        assert not arena.pinned
        assert arena.note == note
        assert host.live == ODD
        arena.memory.fill_(7)
        assert bool((arena.memory == 7).all())
    assert (pinned.live, pinned.usage().peak) == (0, 0)  # not even the peak saw it


def test_refused_by_the_pinned_budget_is_pageable_and_never_pinned(host: Ledger, pinned: Ledger) -> None:
    pinner = ScriptedPinner(True)
    with HostArena(17 * MiB, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="moments") as arena:
        assert not arena.pinned
        assert arena.note == "moments: pageable, pinning 17.0 MiB would go over the pinned budget, 16.0 MiB are left"
    assert pinner.asked == []
    assert pinned.usage().peak == 0


def test_another_thread_takes_the_pinned_budget_meanwhile(host: Ledger, pinned: Ledger) -> None:
    pinner = ScriptedPinner(True, meanwhile=(pinned, 15 * MiB))
    with HostArena(2 * MiB, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="moments") as arena:
        assert not arena.pinned
        assert pinner.held == []
    assert pinned.live == 15 * MiB


def test_view_shares_memory_and_checks_its_range(host: Ledger) -> None:
    with HostArena(1000, Kind.STATE, ledger=host, what="moments") as arena:
        arena.view(10, 5).fill_(1)
        assert arena.memory[9:16].tolist() == [0, 1, 1, 1, 1, 1, 0]
        assert arena.view(1000, 0).numel() == 0
        for offset, nbytes in [(-1, 5), (996, 5), (0, -1), (1001, 0)]:
            with pytest.raises(UsageError, match="not inside an arena of 1000 bytes"):
                arena.view(offset, nbytes)


def test_carve_is_sequential_aligned_and_bounded(host: Ledger) -> None:
    with HostArena(8192, Kind.PARAMETER, ledger=host, what="block") as arena:
        base = arena.memory.data_ptr()
        pieces = [arena.carve(100), arena.carve(1), arena.carve(10, align=4096)]
        assert [p.data_ptr() - base for p in pieces] == [0, 128, 4096]
        assert [p.numel() for p in pieces] == [100, 1, 10]
        with pytest.raises(HostOutOfMemory, match="make the arena larger") as caught:
            arena.carve(4096)
        assert (caught.value.needed, caught.value.allowed) == (4096 + 64 + 4096, 8192)
        assert arena.carve(4032).data_ptr() - base == 4096 + 64  # what was refused took nothing
        for align in (0, 3, 8192):
            with pytest.raises(UsageError, match="align must divide"):
                arena.carve(1, align=align)


def test_closed_arena_says_so(host: Ledger) -> None:
    arena = HostArena(100, Kind.STATE, ledger=host, what="moments")
    arena.close()
    with pytest.raises(SessionClosed, match="moments: this host arena is closed"):
        arena.view(0, 1)


def test_memory_is_given_back_with_the_last_tensor(host: Ledger) -> None:
    nbytes = 64 * MiB
    before = resident_bytes()
    arena = HostArena(nbytes, Kind.STATE, ledger=host, what="moments")
    assert resident_bytes() - before < 8 * MiB  # untouched pages cost nothing
    arena.memory.fill_(1)
    assert resident_bytes() - before > nbytes - 8 * MiB
    survivor = arena.view(0, 8)
    arena.close()
    assert survivor.tolist() == [1] * 8  # a stray view reads old bytes; it does not end the process
    del survivor
    assert resident_bytes() - before < 8 * MiB


def test_an_arena_that_nobody_closed_is_unpinned_and_taken_off(host: Ledger, pinned: Ledger) -> None:
    pinner = ScriptedPinner(True)
    HostArena(ODD, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="moments")
    gc.collect()
    assert (host.live, pinned.live, pinner.held) == (0, 0, [])


def test_a_forked_child_does_not_share_the_pages(host: Ledger) -> None:
    with HostArena(MiB, Kind.STATE, ledger=host, what="moments") as arena:
        start = f"{arena.memory.data_ptr():x}-"
        assert start in Path("/proc/self/maps").read_text()
        child = os.fork()
        if child == 0:
            os._exit(17 if start in Path("/proc/self/maps").read_text() else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class ScriptedRuntime:
    """CUDA's registration calls with the codes they return, and the error they leave behind."""

    def __init__(self, register: int, unregister: int = 0) -> None:
        self.codes = {"register": register, "unregister": unregister}
        self.calls: list[tuple[object, ...]] = []
        self.last_error = 0

    def register(self, address: int, nbytes: int, flags: int) -> int:
        return self._call("register", address, nbytes, flags)

    def unregister(self, address: int) -> int:
        return self._call("unregister", address)

    def clear_error(self) -> None:
        self.last_error = 0

    def _call(self, name: str, *args: int) -> int:
        self.calls.append((name, *args))
        self.last_error = self.codes[name]
        return self.codes[name]

    def pinner(self) -> CudaPinner:
        return CudaPinner(self.register, self.unregister, self.clear_error)


def test_cuda_pinner_registers_portable_memory_and_unregisters_it() -> None:
    runtime = ScriptedRuntime(register=0)
    pinner = runtime.pinner()
    assert pinner.pin(4096, 8192)
    pinner.unpin(4096)
    assert runtime.calls == [("register", 4096, 8192, 1), ("unregister", 4096)]


@pytest.mark.parametrize("code", [2, 712])
def test_cuda_pinner_leaves_no_error_behind(code: int) -> None:
    runtime = ScriptedRuntime(register=code, unregister=713)
    pinner = runtime.pinner()
    assert not pinner.pin(4096, 8192)
    assert runtime.last_error == 0
    pinner.unpin(4096)
    assert runtime.last_error == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_pins_and_recovers_from_a_refusal(host: Ledger, pinned: Ledger) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pinner = CudaPinner.of(device)
    with HostArena(ODD, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="moments") as arena:
        assert arena.pinned
        assert arena.memory.is_pinned()
        # The same pages a second time: the driver refuses, and the next launch must not hear of it.
        assert not pinner.pin(arena.memory.data_ptr(), 4096)
        assert torch.ones(4, device=device).sum().item() == 4
        arena.memory.fill_(3)
        assert torch.equal(arena.memory.to(device, non_blocking=True).cpu(), arena.memory)
    with HostArena(ODD, Kind.STATE, ledger=host, pinned_ledger=pinned, pinner=pinner, what="moments") as arena:
        assert arena.pinned  # the first registration is gone, whatever address this one got


def test_the_account_of_an_arena(host: Ledger) -> None:
    arena = HostArena(ODD, Kind.STATE, ledger=host, what="states")
    arena.carve(100)
    arena.carve(100)  # from the next multiple of 64 on: what lies between the two is nobody's
    pages = -(-ODD // mmap.PAGESIZE) * mmap.PAGESIZE
    assert arena.usage() == ArenaUsage(Tier.HOST, "states", ODD, pages, 200)
    arena.close()
    assert arena.usage(7) == ArenaUsage(Tier.HOST, "states", ODD, pages, 7)
