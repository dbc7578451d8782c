"""The fake device: every time in closed form."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forebay.device.completions import ReadyCompletion
from forebay.device.delays import DelayOne
from forebay.device.fake import FakeBuffer, FakeDevice
from forebay.errors import DeviceOutOfMemory, SessionClosed
from forebay.memory import Kind
from forebay.timeline import Event, Lane, Timeline

BYTES = FakeBuffer(1000)
RATES = {Lane.H2D: 100.0, Lane.D2H: 200.0}  # 1000 bytes: 10 s in, 5 s out


def events(device: FakeDevice) -> list[tuple[Lane, float, float]]:
    return [(event.lane, event.start, event.end) for event in device.drain_events()]


def test_a_copy_under_compute_costs_nothing() -> None:
    device = FakeDevice(None, RATES)
    fetched = device.copy(Lane.H2D, BYTES, BYTES)
    device.compute(12.0)
    assert fetched.done()
    device.hold_compute(fetched)
    assert device.now() == 12.0
    assert events(device) == [(Lane.H2D, 0.0, 10.0), (Lane.COMPUTE, 0.0, 12.0)]


def test_what_compute_does_not_hide_is_a_stall() -> None:
    device = FakeDevice(None, RATES)
    fetched = device.copy(Lane.H2D, BYTES, BYTES)
    device.compute(4.0)
    assert not fetched.done()
    device.hold_compute(fetched)
    assert device.now() == 10.0
    assert events(device) == [(Lane.H2D, 0.0, 10.0), (Lane.COMPUTE, 0.0, 4.0), (Lane.STALL, 4.0, 10.0)]


def test_a_chain_over_lanes_adds_up_with_latency() -> None:
    device = FakeDevice(None, {**RATES, Lane.DISK_READ: 50.0}, latency=1.0)
    read = device.submit(Lane.DISK_READ, lambda: "bytes", nbytes=1000)
    fetched = device.copy(Lane.H2D, BYTES, BYTES, after=[read])
    back = device.copy(Lane.D2H, BYTES, BYTES, after=[fetched])
    assert (read.end, fetched.end, back.end) == (1 + 20, 21 + 1 + 10, 32 + 1 + 5)
    assert read.wait() == "bytes"
    assert device.now() == 21.0
    device.synchronize()
    assert device.now() == 38.0


def test_jobs_of_one_lane_follow_each_other_and_lanes_overlap() -> None:
    device = FakeDevice(None, RATES)
    ends = [device.copy(lane, BYTES, BYTES).end for lane in (Lane.H2D, Lane.H2D, Lane.D2H)]
    assert ends == [10.0, 20.0, 5.0]


def test_a_job_starts_no_earlier_than_it_was_submitted() -> None:
    device = FakeDevice(None, RATES)
    device.compute(3.0)
    mark = device.mark()
    device.compute(4.0)
    assert device.copy(Lane.D2H, BYTES, BYTES, after=[mark]).end == 7.0 + 5.0


def test_double_buffering_hides_every_fetch_but_the_first() -> None:
    """N blocks, two slots, compute c >= fetch f: f + N * c seconds. The prefetch waits for the slot's last reader."""
    n, fetch, compute = 6, 10.0, 11.0
    device = FakeDevice(None, RATES)
    readers = [device.mark(), device.mark()]
    fetched = [device.copy(Lane.H2D, BYTES, BYTES, after=[readers[0]], what="block 0")]
    for block in range(n):
        if block + 1 < n:
            slot = (block + 1) % 2
            fetched.append(device.copy(Lane.H2D, BYTES, BYTES, after=[readers[slot]], what=f"block {block + 1}"))
        device.hold_compute(fetched[block])
        device.compute(compute)
        readers[block % 2] = device.mark()
    assert device.now() == fetch + n * compute
    assert Timeline(tuple(device.drain_events()), ()).busy()[Lane.STALL] == fetch


def test_a_delay_holds_back_one_job_and_what_follows_it() -> None:
    device = FakeDevice(None, RATES, delays=DelayOne(1, 7.0))
    ends = [device.copy(Lane.H2D, BYTES, BYTES).end for _ in range(3)]
    assert ends == [10.0, 10.0 + 7.0 + 10.0, 37.0]


def test_a_lane_without_a_rate_takes_only_its_latency() -> None:
    device = FakeDevice(None, {}, latency=0.5)
    assert device.submit(Lane.UPDATE, lambda: None, nbytes=10**12).end == 0.5


def test_jobs_run_in_the_order_of_submission() -> None:
    device = FakeDevice(None, RATES)
    seen: list[str] = []
    for lane in (Lane.D2H, Lane.UPDATE, Lane.H2D):
        device.submit(lane, lambda lane=lane: seen.append(lane.value))
    assert seen == ["d2h", "update", "h2d"]


def test_a_failure_passes_on_takes_no_time_and_is_told_once() -> None:
    device = FakeDevice(None, RATES)
    ran: list[int] = []
    first = device.submit(Lane.H2D, lambda: 1 // 0, nbytes=1000)
    second = device.submit(Lane.UPDATE, lambda: ran.append(1), after=[first])
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    device.synchronize()
    with pytest.raises(ZeroDivisionError):
        second.wait()
    assert ran == [] and device.now() == 0.0 and device.drain_events() == []
    third = device.submit(Lane.H2D, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        third.wait()
    device.synchronize()


def test_buffers_are_charged_like_any_device_s() -> None:
    device = FakeDevice(100, {})
    buffer = device.allocate(60, Kind.PARAMETER, "slot 0")
    with pytest.raises(DeviceOutOfMemory, match="slot 1") as caught:
        device.allocate(60, Kind.PARAMETER, "slot 1")
    assert (caught.value.needed, caught.value.allowed) == (120, 100)
    device.free(buffer)
    with pytest.raises(ValueError, match="freed before"):
        device.free(buffer)
    device.allocate(100, Kind.GRADIENT, "all")
    assert device.usage().at_peak[Kind.GRADIENT] == 100
    device.reset_peak()
    device.close()
    device.close()
    assert (device.usage().live, device.usage().peak) == (0, 100)
    with pytest.raises(SessionClosed):
        device.submit(Lane.H2D, lambda: None)


def test_events_of_the_caller_are_sorted_in() -> None:
    device = FakeDevice(None, RATES)
    device.compute(1.0)
    device.record(Event(Lane.UPDATE, 0.0, 0.5))
    device.compute(1.0)
    assert [start for _, start, _ in events(device)] == [0.0, 0.0, 1.0]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="rate of h2d"):
        FakeDevice(None, {Lane.H2D: 0.0})
    with pytest.raises(ValueError, match="latency"):
        FakeDevice(None, {}, latency=-1.0)
    device = FakeDevice(None, RATES)
    with pytest.raises(ValueError, match="seconds"):
        device.compute(-1.0)
    with pytest.raises(ValueError, match="compute"):
        device.submit(Lane.COMPUTE, lambda: None)
    with pytest.raises(ValueError, match="1000 bytes into 1"):
        device.copy(Lane.H2D, FakeBuffer(1), BYTES)
    with pytest.raises(ValueError, match="update"):
        device.copy(Lane.UPDATE, BYTES, BYTES)
    with pytest.raises(ValueError, match="ReadyCompletion"):
        device.submit(Lane.H2D, lambda: None, after=[ReadyCompletion()])


def test_it_needs_no_torch() -> None:
    code = "import sys, forebay.device.fake, forebay.device.delays; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
