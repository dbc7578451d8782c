"""The CUDA device: copies and compute stay in order under delays, the budget holds, peaks are the closed form."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from forebay.device import open_device
from forebay.device.cuda import CudaDevice
from forebay.device.delays import DelayOne, RandomDelays
from forebay.errors import DeviceOutOfMemory, ModelError, SessionClosed
from forebay.memory import Kind
from forebay.timeline import Lane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

MIB = 2**20


def pinned(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).pin_memory()


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice(0)
    yield made
    made.close()


def busy() -> None:
    """Keeps the compute stream busy for about 0.1 s: whoever does not wait for it is too early."""
    torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_through_one_slot_is_exact_under_random_delays(seed: int) -> None:
    device = CudaDevice(0, delays=RandomDelays(seed, 0.003))
    numel = MIB
    slot = device.allocate(4 * numel, Kind.PARAMETER, "slot")
    sources = [pinned(numel, i) for i in range(8)]
    targets = [torch.zeros(numel).pin_memory() for _ in sources]
    last_reader = device.mark()
    for source, target in zip(sources, targets, strict=True):
        fetched = device.copy(Lane.H2D, slot, source, after=[last_reader])
        device.hold_compute(fetched)
        doubled = slot.view(torch.float32) * 2
        device.copy(Lane.D2H, target, doubled, after=[device.mark()])
        del doubled  # the job holds it until the copy is done; the next iteration may reuse its memory only then
        last_reader = device.mark()
    device.synchronize()
    device.close()
    assert all(torch.equal(target, source * 2) for source, target in zip(sources, targets, strict=True))


def test_an_offload_waits_for_the_compute_before_its_mark(device: CudaDevice) -> None:
    x = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    busy()
    x.add_(1)
    target = torch.zeros(MIB).pin_memory()
    device.copy(Lane.D2H, target, x, after=[device.mark()]).wait()
    assert torch.equal(target, torch.ones(MIB))


def test_compute_waits_for_a_delayed_fetch_and_the_wait_is_a_stall() -> None:
    device = CudaDevice(0, delays=DelayOne(0, 0.05))
    source = pinned(MIB, 1)
    slot = device.allocate(4 * MIB, Kind.PARAMETER, "slot")
    slot.zero_()
    fetched = device.copy(Lane.H2D, slot, source, after=[device.mark()], what="block 0")
    device.hold_compute(fetched)
    total = slot.view(torch.float32).clone()
    device.synchronize()
    assert torch.equal(total.cpu(), source)
    by_lane = {event.lane: event for event in device.drain_events()}
    device.close()
    assert set(by_lane) == {Lane.H2D, Lane.STALL}
    assert by_lane[Lane.H2D].nbytes == 4 * MIB and by_lane[Lane.H2D].what == "block 0"


def test_events_lie_on_the_clock_of_the_device(device: CudaDevice) -> None:
    source, target = pinned(MIB, 0), torch.empty(MIB, device="cuda")
    before = device.now()
    for _ in range(3):
        device.copy(Lane.H2D, target, source)
    device.synchronize()
    after = device.now()
    events = device.drain_events()
    assert len(events) == 3
    slack = 1e-3  # two clocks that were read one after the other
    assert all(before - slack <= event.start <= event.end <= after + slack for event in events)
    assert all(first.end <= second.start + 1e-5 for first, second in pairwise(events))


@pytest.mark.real
def test_a_fresh_buffer_is_not_written_under_its_last_reader(device: CudaDevice) -> None:
    """The allocator hands out bytes that queued kernels still read; a fetch on another stream must come after."""
    seen = torch.zeros(4 * MIB, device="cuda")
    old = torch.ones(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    busy()
    torch.add(old, 0, out=seen)
    address = old.data_ptr()
    del old
    buffer = device.allocate(16 * MIB, Kind.PARAMETER, "slot")
    assert buffer.data_ptr() == address, "the allocator did not reuse the bytes: this test shows nothing"
    device.copy(Lane.H2D, buffer, torch.zeros(16 * MIB, dtype=torch.uint8).pin_memory()).wait()
    assert torch.equal(seen.cpu(), torch.ones(4 * MIB))


def test_a_host_job_waits_for_the_bytes_of_an_offload(device: CudaDevice) -> None:
    gradient = torch.randn(MIB, device="cuda")
    expected = gradient.cpu() * 2
    landed = torch.zeros(MIB).pin_memory()
    moved = device.copy(Lane.D2H, landed, gradient, after=[device.mark()])
    assert torch.equal(device.submit(Lane.UPDATE, lambda: landed * 2, after=[moved]).wait(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_pageable_strided_and_small_copies_are_exact(device: CudaDevice, dtype: torch.dtype) -> None:
    for source in (torch.randn(()), torch.randn(0), torch.randn(5), torch.randn(4, 6).t()):
        there = torch.zeros(source.shape, dtype=dtype, device="cuda")
        back = torch.zeros(source.shape, dtype=dtype)
        fetched = device.copy(Lane.H2D, there, source.to(dtype), after=[device.mark()])
        device.copy(Lane.D2H, back, there, after=[fetched]).wait()
        assert torch.equal(back, source.to(dtype))


def test_the_peak_is_the_closed_form(device: CudaDevice) -> None:
    device.reset_peak()
    base = device.usage().live
    slot = device.allocate(8 * MIB, Kind.PARAMETER, "slot")
    temporary = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    del temporary
    device.free(slot)
    del slot
    usage = device.usage()
    assert usage.live == base
    assert usage.peak == base + 8 * MIB + 4 * MIB
    assert usage.at_peak[Kind.PARAMETER] == 8 * MIB
    assert usage.at_peak[Kind.TEMPORARY] == base + 4 * MIB
    assert sum(usage.at_peak.values()) == usage.peak
    device.reset_peak()
    assert device.usage().peak == base


def test_an_offload_keeps_its_source_no_longer_than_the_copy(device: CudaDevice) -> None:
    base = device.usage().live
    gradient = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    target = torch.empty(8 * MIB, dtype=torch.uint8).pin_memory()
    moved = device.copy(Lane.D2H, target, gradient, after=[device.mark()])
    del gradient
    moved.wait()
    assert device.usage().live == base


def test_the_budget_holds_for_forebay_and_for_the_step() -> None:
    budget = torch.cuda.memory_reserved() + 64 * MIB
    device = CudaDevice(0, budget)
    try:
        with pytest.raises(DeviceOutOfMemory, match="slot 0"):
            device.allocate(budget + 1, Kind.PARAMETER, "slot 0")
        assert device.ledger.live == 0
        with (
            pytest.raises(DeviceOutOfMemory, match="forward of block 3") as caught,
            device.translate_oom("forward of block 3"),
        ):
            torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
        assert caught.value.allowed == budget
        assert caught.value.needed >= torch.cuda.memory_allocated() + 96 * MIB
        kept = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        assert kept.nbytes == 16 * MIB
    finally:
        device.close()
    assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
    assert torch.empty(96 * MIB, dtype=torch.uint8, device="cuda").nbytes == 96 * MIB


@pytest.mark.parametrize("first", [0, 1])
def test_budgets_of_one_gpu_add_up_and_end_in_any_order(first: int) -> None:
    """What the limit was comes back when nobody is there, and with it whatever the user had set."""
    total = max(torch.cuda.get_device_properties(0).total_memory, torch.cuda.mem_get_info(0)[1])
    before = torch.cuda.get_per_process_memory_fraction(0)
    devices = [CudaDevice(0, total // 8), CudaDevice(0, total // 4)]
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(3 / 8)
    whole = CudaDevice(0)
    assert torch.cuda.get_per_process_memory_fraction(0) == before
    whole.close()
    devices[first].close()
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx([1 / 4, 1 / 8][first])
    devices[1 - first].close()
    assert torch.cuda.get_per_process_memory_fraction(0) == before


def test_a_budget_beyond_the_gpu_is_refused() -> None:
    with pytest.raises(ModelError, match="device_memory"):
        CudaDevice(0, 2**60)


def test_a_failed_dependency_reaches_compute_and_copies(device: CudaDevice) -> None:
    failed = device.submit(Lane.DISK_READ, lambda: 1 // 0)
    slot = device.allocate(4 * MIB, Kind.PARAMETER, "slot")
    fetched = device.copy(Lane.H2D, slot, pinned(MIB, 0), after=[failed])
    with pytest.raises(ZeroDivisionError):
        device.hold_compute(fetched)
    device.copy(Lane.H2D, slot, pinned(MIB, 0)).wait()
    device.synchronize()


def test_close_ends_threads_and_gives_the_memory_back() -> None:
    before = torch.cuda.memory_allocated()
    device = open_device("cuda", None)
    device.copy(Lane.H2D, device.allocate(16, Kind.STAGING, "slot"), torch.ones(4).pin_memory())
    device.close()
    device.close()
    assert torch.cuda.memory_allocated() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forebay-")]
    with pytest.raises(SessionClosed):
        device.submit(Lane.UPDATE, lambda: None)
