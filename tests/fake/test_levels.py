"""When the bytes of tiers are noted, and of which step they are kept."""

from __future__ import annotations

import pytest

from forebay.device.fake import FakeDevice
from forebay.memory import Kind, Ledger, Tier
from forebay.runtime import levels as module
from forebay.runtime.levels import Levels
from forebay.timeline import Level


def test_of_the_steps_that_are_seen_the_last_is_kept() -> None:
    device, host = FakeDevice(1000, {}), Ledger(Tier.HOST)
    levels = Levels(device, (host,))
    slot = device.allocate(100, Kind.PARAMETER, "slot")
    levels.begin(1.0, seen=True)
    made = device.allocate(50, Kind.ACTIVATION, "made")
    device.free(made)
    host.charge(Kind.STATE, 7)
    levels.note(2.0)
    levels.end(3.0)
    first = levels.collect()
    assert first == (
        Level(1.0, Tier.DEVICE, {Kind.PARAMETER: 100}, 100),
        Level(1.0, Tier.HOST, {}, 0),
        Level(2.0, Tier.DEVICE, {Kind.PARAMETER: 100}, 150),
        Level(2.0, Tier.HOST, {Kind.STATE: 7}, 7),
        Level(3.0, Tier.DEVICE, {Kind.PARAMETER: 100}, 100),
    )  # the host is as it was
    # A step that is not seen is none, and one that is not over is not known yet.
    levels.begin(4.0, seen=False)
    levels.note(5.0)
    levels.end(6.0)
    assert levels.collect() == first
    levels.begin(7.0, seen=True)
    assert levels.collect() == first
    levels.end(8.0)
    assert [level.time for level in levels.collect()] == [7.0, 7.0]
    device.free(slot)


def test_a_step_with_too_many_is_known_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 4)
    device = FakeDevice(None, {})
    levels = Levels(device, ())
    levels.begin(0.0, seen=True)
    for time in range(1, 10):
        device.allocate(1, Kind.ACTIVATION, "one more")
        levels.note(float(time))
    levels.end(10.0)
    assert [level.time for level in levels.collect()] == [0.0, 1.0, 2.0, 3.0]
