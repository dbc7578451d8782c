"""How many bytes are under way off the device: never more than the window, over any sequence of sizes."""

from __future__ import annotations

import pytest

from forebay.device.fake import FakeBuffer, FakeDevice
from forebay.scheduling.window import TransferWindow
from forebay.timeline import Lane


def under_way(ends: list[tuple[float, int]], now: float) -> int:
    return sum(nbytes for end, nbytes in ends if end > now)


@pytest.mark.parametrize("window", [0, 5, 10, 25, 1000])
def test_never_more_than_the_window(window: int) -> None:
    device = FakeDevice(None, {Lane.D2H: 1.0})
    leaving = TransferWindow(device, window)
    ends: list[tuple[float, int]] = []
    for nbytes in (10, 3, 30, 1, 1, 10, 7):
        leaving.admit(nbytes)
        sent = device.copy(Lane.D2H, FakeBuffer(nbytes), FakeBuffer(nbytes))
        leaving.sent(sent, nbytes)
        ends.append((sent.end, nbytes))
        assert under_way(ends, device.now()) <= window
        device.compute(2.0)
    leaving.drain()
    assert under_way(ends, device.now()) == 0


def test_waits_no_longer_than_it_must() -> None:
    device = FakeDevice(None, {Lane.D2H: 1.0})
    leaving = TransferWindow(device, 20)
    for _ in range(2):
        leaving.admit(10)
        leaving.sent(device.copy(Lane.D2H, FakeBuffer(10), FakeBuffer(10)), 10)
    assert device.now() == 0.0  # both fit
    leaving.admit(10)
    assert device.now() == 10.0  # the first one has landed, the second is still under way
