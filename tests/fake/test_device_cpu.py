"""The cpu device: copies, the ledger as its memory, stalls, and how it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from forebay.device import open_device
from forebay.device.base import Completion
from forebay.device.cpu import BRIEF, STALL_THRESHOLD, CpuDevice
from forebay.device.delays import DelayOne, RandomDelays
from forebay.device.fake import FakeDevice
from forebay.errors import DeviceOutOfMemory, ModelError, SessionClosed
from forebay.memory import Kind
from forebay.timeline import Lane


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(1024)
    yield made
    made.close()


def test_buffers_are_charged_aligned_and_discharged(device: CpuDevice) -> None:
    a = device.allocate(100, Kind.PARAMETER, "slot 0")
    b = device.allocate(200, Kind.STAGING, "slot 1")
    assert a.dtype == torch.uint8 and a.shape == (100,)
    assert a.data_ptr() % 64 == 0 and b.data_ptr() % 64 == 0
    assert device.usage().live == 300
    device.free(a)
    usage = device.usage()
    assert (usage.live, usage.peak) == (200, 300)
    assert usage.at_peak[Kind.PARAMETER] == 100 and usage.at_peak[Kind.STAGING] == 200
    device.reset_peak()
    assert device.usage().peak == 200


def test_the_budget_is_refused_and_nothing_is_counted(device: CpuDevice) -> None:
    device.allocate(1000, Kind.PARAMETER, "slot 0")
    with pytest.raises(DeviceOutOfMemory, match="slot 1") as caught:
        device.allocate(25, Kind.PARAMETER, "slot 1")
    assert (caught.value.needed, caught.value.allowed) == (1025, 1024)
    assert device.usage().live == 1000
    device.allocate(24, Kind.PARAMETER, "slot 2")


def test_memory_that_the_machine_has_not_got_is_refused() -> None:
    device = CpuDevice()
    with pytest.raises(DeviceOutOfMemory, match="slot"):
        device.allocate(1 << 60, Kind.PARAMETER, "slot")
    assert (device.usage().live, device.usage().peak) == (0, 0)


def test_freeing_twice_is_an_error(device: CpuDevice) -> None:
    buffer = device.allocate(8, Kind.PARAMETER, "slot")
    device.free(buffer)
    with pytest.raises(ValueError, match="freed before"):
        device.free(buffer)
    with pytest.raises(ValueError, match="not a buffer"):
        device.free(torch.empty(8, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_copies_are_exact(device: CpuDevice, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape).to(dtype)
    target = torch.zeros(shape, dtype=dtype)
    device.copy(Lane.D2H, target, source).wait()
    assert torch.equal(target, source)


def test_bytes_are_copied_between_dtypes(device: CpuDevice) -> None:
    source = torch.randn(6, dtype=torch.bfloat16)
    slot = torch.empty(12, dtype=torch.uint8)
    device.copy(Lane.H2D, slot, source).wait()
    assert torch.equal(slot.view(torch.bfloat16), source)


def test_nan_payloads_survive(device: CpuDevice) -> None:
    bits = torch.tensor([0x7FA00001, 0x7FC12345, -1], dtype=torch.int32)
    target = torch.zeros(3)
    device.copy(Lane.H2D, target, bits.view(torch.float32)).wait()
    assert torch.equal(target.view(torch.int32), bits)


def test_strided_and_conjugated_tensors_are_copied_by_value(device: CpuDevice) -> None:
    source = torch.randn(4, 6).t()
    target = torch.zeros(6, 4)
    device.copy(Lane.D2H, target, source).wait()
    assert torch.equal(target, source)
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    plain = torch.zeros(3, dtype=torch.complex64)
    device.copy(Lane.D2H, plain, conjugated).wait()
    assert torch.equal(plain, conjugated.resolve_conj())


def test_a_copy_that_makes_no_sense_is_refused(device: CpuDevice) -> None:
    with pytest.raises(ValueError, match="8 bytes into 4"):
        device.copy(Lane.H2D, torch.zeros(1), torch.zeros(2))
    with pytest.raises(ValueError, match="one dtype and shape"):
        device.copy(Lane.H2D, torch.zeros(24), torch.zeros(4, 6).t())
    with pytest.raises(ValueError, match="update"):
        device.copy(Lane.UPDATE, torch.zeros(1), torch.zeros(1))


def test_parameters_can_be_copied_and_no_job_is_recorded_by_autograd(device: CpuDevice) -> None:
    source = torch.nn.Parameter(torch.randn(4, 6))
    target = torch.zeros(4, 6)
    device.copy(Lane.D2H, target, source).wait()
    assert torch.equal(target, source)
    assert not target.requires_grad
    strided = torch.zeros(6, 4)
    device.copy(Lane.D2H, strided, source.t()).wait()
    assert not strided.requires_grad
    made = device.submit(Lane.UPDATE, lambda: source * 2).wait()
    assert not made.requires_grad


def test_the_source_is_free_as_soon_as_the_copy_is_done(device: CpuDevice) -> None:
    source, target = torch.randn(100), torch.zeros(100)
    watch = weakref.ref(source)
    handle = device.copy(Lane.D2H, target, source)
    del source
    handle.wait()
    assert watch() is None


def test_a_chain_of_copies_is_exact_under_random_delays() -> None:
    device = CpuDevice(delays=RandomDelays(seed=5, max_seconds=0.002))
    slot = torch.empty(64, dtype=torch.uint8)
    sources = [torch.randn(16) for _ in range(12)]
    targets = [torch.zeros(16) for _ in sources]
    last_reader = device.mark()
    for source, target in zip(sources, targets, strict=True):
        # One slot: the next fetch must wait for the slot's last reader, the copy out of it.
        fetched = device.copy(Lane.H2D, slot, source, after=[last_reader])
        last_reader = device.copy(Lane.D2H, target, slot, after=[fetched])
    device.synchronize()
    device.close()
    assert all(torch.equal(target, source) for source, target in zip(sources, targets, strict=True))


def test_a_copy_leaves_an_event_with_its_bytes(device: CpuDevice) -> None:
    device.copy(Lane.H2D, torch.zeros(8), torch.ones(8), what="block 0").wait()
    (event,) = device.drain_events()
    assert (event.lane, event.nbytes, event.what) == (Lane.H2D, 32, "block 0")
    assert 0 <= event.start <= event.end <= device.now()


class Noting(Completion):
    """Is done, and notes whose thread asks."""

    def __init__(self) -> None:
        self.asked = 0

    def wait(self) -> None:
        self.asked = threading.get_ident()

    def done(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("opened", "nbytes", "by_caller"),
    [({}, BRIEF, True), ({}, BRIEF + 1, False), ({"brief": 0}, 1, False)],
)
def test_small_copies_are_made_by_their_caller(opened: dict[str, int], nbytes: int, by_caller: bool) -> None:
    device = CpuDevice(**opened)  # type: ignore[arg-type]
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    device.submit(Lane.H2D, lambda: None)
    device.synchronize()  # the lane is idle
    before = Noting()
    device.copy(Lane.H2D, target, source, after=(before,)).wait()
    assert (before.asked == threading.get_ident()) == by_caller and torch.equal(target, source)
    device.close()


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("inline", [False, True])
def test_copies_beside_compute_are_made_inline_where_compute_has_all_cores(
    inline: bool, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones too, by all threads that compute; where there are ``more`` cores than those, by a lane's thread."""
    monkeypatch.setattr("forebay.device.cpu.cores", lambda: torch.get_num_threads() + more)
    device = CpuDevice()
    nbytes = (4 << 20) + 13
    source, target = torch.randint(0, 256, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    before = Noting()
    device.copy(Lane.D2H, target, source, after=(before,), inline=inline).wait()
    assert (before.asked == threading.get_ident()) == (inline and more < 1) and torch.equal(target, source)
    (event,) = device.drain_events()
    assert (event.lane, event.nbytes) == (Lane.D2H, nbytes)
    device.close()


@pytest.mark.parametrize("more", [0, 3, 8])
@pytest.mark.parametrize(("ahead", "behind"), [(0, 0), (8, 0), (0, 5), (5, 8), (3, 3)])
def test_inline_copies_are_exact_wherever_words_begin(
    ahead: int, behind: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ahead`` and ``behind`` bytes are before the target's and the source's; ``more`` than whole words are copied."""
    monkeypatch.setattr("forebay.device.cpu.cores", torch.get_num_threads)
    device, nbytes = CpuDevice(), BRIEF + 8 + more
    bits = torch.randint(0, 256, (nbytes + behind,), dtype=torch.uint8)
    room = torch.zeros(nbytes + ahead + 1, dtype=torch.uint8)
    device.copy(Lane.D2H, room[ahead : ahead + nbytes], bits[behind:], inline=True).wait()
    assert torch.equal(room[ahead : ahead + nbytes], bits[behind:])
    assert not room[:ahead].any() and not room[-1]
    device.close()


def test_an_inline_copy_waits_for_what_it_comes_after_and_for_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the lane's thread makes it, and whoever has asked goes on."""
    monkeypatch.setattr("forebay.device.cpu.cores", lambda: 1)
    device, gate = CpuDevice(), threading.Event()
    source, target = torch.ones(1 << 20), torch.zeros(1 << 20)
    read = device.submit(Lane.DISK_READ, gate.wait)
    first = device.copy(Lane.H2D, target, source, after=(read,), inline=True)
    second = device.copy(Lane.H2D, source, target, inline=True)  # behind the first on its lane
    assert not first.done() and not second.done() and not target.any()
    gate.set()
    second.wait()
    assert first.done() and target.all()
    device.close()


def test_a_long_hold_is_a_stall_and_a_finished_one_is_not() -> None:
    device = CpuDevice(delays=DelayOne(0, 0.02))
    device.hold_compute(device.mark())
    assert device.drain_events() == []
    copied = device.copy(Lane.H2D, torch.zeros(8), torch.ones(8))
    device.hold_compute(copied)
    stalls = [event for event in device.drain_events() if event.lane is Lane.STALL]
    device.close()
    assert len(stalls) == 1
    assert stalls[0].end - stalls[0].start > STALL_THRESHOLD


def test_hold_compute_raises_what_the_job_raised(device: CpuDevice) -> None:
    with pytest.raises(ZeroDivisionError):
        device.hold_compute(device.submit(Lane.DISK_READ, lambda: 1 // 0))


def test_close_ends_threads_and_empties_the_account(device: CpuDevice) -> None:
    device.allocate(64, Kind.STAGING, "slot")
    done = device.submit(Lane.UPDATE, lambda: "last words")
    device.close()
    device.close()
    assert done.wait() == "last words"
    assert device.usage().live == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forebay-")]
    with pytest.raises(SessionClosed):
        device.copy(Lane.H2D, torch.zeros(1), torch.zeros(1))


def test_open_device_knows_cpu_and_passes_a_device_through() -> None:
    device = open_device("cpu", 4096)
    assert device.name == "cpu" and device.ledger.limit == 4096
    assert open_device(device, 1) is device
    assert open_device(torch.device("cpu"), None).name == "cpu"
    assert open_device(FakeDevice(1, {})).name == "fake"


@pytest.mark.parametrize("spec", ["tpu", "cuda:99", "cuda:x", "cpu:3", ""])
def test_open_device_names_what_there_is(spec: str) -> None:
    with pytest.raises(ModelError, match="use one of cpu"):
        open_device(spec, 1024)
