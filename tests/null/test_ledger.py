"""The account of a tier: what it counts, what it refuses, and what it says when it refuses."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import BudgetExceeded, DeviceOutOfMemory, DiskFull, HostOutOfMemory
from forebay.memory import Kind, Ledger, Tier
from forebay.units import MiB

ERRORS = {
    Tier.DEVICE: DeviceOutOfMemory,
    Tier.HOST: HostOutOfMemory,
    Tier.PINNED: HostOutOfMemory,
    Tier.DISK: DiskFull,
}
REMEDIES = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.PINNED: "pinned limit", Tier.DISK: "disk"}


def test_peak_remembers_what_it_was_made_of() -> None:
    ledger = Ledger(Tier.DEVICE, 100)
    ledger.charge(Kind.PARAMETER, 60)
    ledger.charge(Kind.ACTIVATION, 40)
    ledger.discharge(Kind.ACTIVATION, 40)
    ledger.charge(Kind.GRADIENT, 10)

    usage = ledger.usage()
    assert (usage.tier, usage.limit, usage.live, usage.peak) == (Tier.DEVICE, 100, 70, 100)
    assert usage.at_peak[Kind.PARAMETER] == 60
    assert usage.at_peak[Kind.ACTIVATION] == 40
    assert usage.at_peak[Kind.GRADIENT] == 0
    assert ledger.headroom == 30


def test_an_account_does_not_change_afterwards() -> None:
    ledger = Ledger(Tier.HOST)
    ledger.charge(Kind.STATE, 5)
    before = ledger.usage()
    ledger.charge(Kind.STATE, 7)
    assert (before.live, before.peak, before.at_peak[Kind.STATE]) == (5, 5, 5)


def test_a_level_knows_the_most_since_the_one_before() -> None:
    ledger = Ledger(Tier.DEVICE)
    ledger.charge(Kind.PARAMETER, 60)
    ledger.charge(Kind.ACTIVATION, 40)
    ledger.discharge(Kind.ACTIVATION, 40)
    assert ledger.level() == ({Kind.PARAMETER: 60}, 100)
    assert ledger.level() == ({Kind.PARAMETER: 60}, 60)
    ledger.charge(Kind.GRADIENT, 5)
    ledger.discharge(Kind.PARAMETER, 60)
    assert ledger.level() == ({Kind.GRADIENT: 5}, 65)
    assert ledger.usage().peak == 100  # that of the run is another matter


def test_without_a_limit_nothing_is_refused() -> None:
    ledger = Ledger(Tier.HOST)
    ledger.charge(Kind.STATE, 2**60)
    assert ledger.headroom is None
    assert ledger.live == 2**60


def test_the_last_byte_of_the_budget_is_allowed() -> None:
    ledger = Ledger(Tier.DEVICE, 100)
    ledger.charge(Kind.PARAMETER, 100)
    with pytest.raises(DeviceOutOfMemory):
        ledger.charge(Kind.TEMPORARY, 1)


@pytest.mark.parametrize("tier", list(Tier))
def test_a_refusal_counts_nothing_and_says_who_what_and_the_remedy(tier: Tier) -> None:
    ledger = Ledger(tier, 10 * MiB)
    ledger.charge(Kind.STATE, 8 * MiB)
    before = ledger.usage()

    with pytest.raises(BudgetExceeded) as caught:
        ledger.charge(Kind.GRADIENT, 3 * MiB, "gradient of layers.3.weight")

    error = caught.value
    assert type(error) is ERRORS[tier]
    assert (error.needed, error.allowed) == (11 * MiB, 10 * MiB)
    message = str(error)
    for part in (tier.value, "gradient of layers.3.weight", "3.0 MiB", "8.0 MiB of 10.0 MiB", "state 8.0 MiB"):
        assert part in message
    assert REMEDIES[tier] in message
    assert ledger.usage() == before
    ledger.charge(Kind.GRADIENT, 2 * MiB)  # what does fit is still granted


def test_a_refusal_without_a_name_says_the_kind() -> None:
    with pytest.raises(DiskFull, match=r"state needs 2 B more, 0 B of 1 B are in use \(nothing\)"):
        Ledger(Tier.DISK, 1).charge(Kind.STATE, 2)


def test_move_changes_the_kind_and_not_the_total() -> None:
    ledger = Ledger(Tier.DEVICE, 100)
    ledger.charge(Kind.TEMPORARY, 100)
    ledger.move(Kind.TEMPORARY, Kind.ACTIVATION, 30)
    ledger.reset_peak()
    usage = ledger.usage()
    assert (usage.live, usage.at_peak[Kind.TEMPORARY], usage.at_peak[Kind.ACTIVATION]) == (100, 70, 30)


def test_reset_peak_starts_from_what_is_live() -> None:
    ledger = Ledger(Tier.DEVICE)
    ledger.charge(Kind.ACTIVATION, 50)
    ledger.charge(Kind.PARAMETER, 20)
    ledger.discharge(Kind.ACTIVATION, 50)
    ledger.reset_peak()
    assert (ledger.usage().peak, ledger.usage().at_peak[Kind.ACTIVATION]) == (20, 0)
    ledger.charge(Kind.GRADIENT, 5)
    assert ledger.usage().peak == 25


@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 50)), max_size=40), st.integers(0, 400))
def test_any_sequence_of_charges_stays_in_budget_and_comes_back_to_zero(
    charges: list[tuple[Kind, int]], limit: int
) -> None:
    ledger = Ledger(Tier.DEVICE, limit)
    granted: list[tuple[Kind, int]] = []
    for kind, nbytes in charges:
        held = sum(n for _, n in granted)
        if held + nbytes > limit:
            with pytest.raises(DeviceOutOfMemory):
                ledger.charge(kind, nbytes)
        else:
            ledger.charge(kind, nbytes)
            granted.append((kind, nbytes))
    usage = ledger.usage()
    # Nothing was given back on the way, so that the end is the peak.
    assert usage.live == usage.peak == sum(n for _, n in granted) <= limit
    for kind in Kind:
        assert usage.at_peak[kind] == sum(n for k, n in granted if k is kind)
    for kind, nbytes in granted:
        ledger.discharge(kind, nbytes)
    assert ledger.live == 0


class SlowByte(int):
    """One byte whose arithmetic lets other threads run between a ledger's read of a figure and its write."""

    def __radd__(self, other: int) -> int:
        time.sleep(1e-4)
        return other + 1

    def __rsub__(self, other: int) -> int:
        time.sleep(1e-4)
        return other - 1


def test_threads_lose_no_byte_and_pass_no_limit() -> None:
    rounds, limit, byte = 25, 6, SlowByte(1)
    ledger = Ledger(Tier.DEVICE, limit)
    start = threading.Barrier(len(Kind))

    def work(kind: Kind) -> int:
        start.wait()
        granted = 0
        for _ in range(rounds):
            try:
                ledger.charge(kind, byte)
            except DeviceOutOfMemory:
                continue
            granted += 1
            assert 0 < ledger.live <= limit
            ledger.discharge(kind, byte)
        return granted

    with ThreadPoolExecutor(len(Kind)) as pool:
        granted = sum(pool.map(work, Kind))
    usage = ledger.usage()
    assert granted > 0
    assert usage.live == 0
    assert 1 <= usage.peak <= limit
    assert usage.peak == sum(usage.at_peak.values())
    ledger.reset_peak()
    assert set(ledger.usage().at_peak.values()) == {0}


# Parts of one account.


def test_what_a_part_counts_counts_in_the_whole() -> None:
    whole = Ledger(Tier.HOST, 100)
    one, other = Ledger(Tier.HOST, 60, whole), Ledger(Tier.HOST, 40, whole)
    one.charge(Kind.STATE, 50)
    other.charge(Kind.GRADIENT, 30)
    one.discharge(Kind.STATE, 20)
    other.move(Kind.GRADIENT, Kind.STAGING, 10)
    assert (one.live, other.live, whole.live) == (30, 30, 60)
    usage = whole.usage()
    assert usage.peak == 80 and usage.at_peak[Kind.STATE] == 50 and usage.at_peak[Kind.GRADIENT] == 30
    whole.reset_peak()
    assert whole.usage().at_peak[Kind.STAGING] == 10
    assert one.headroom == 30 and other.headroom == 10


def test_a_byte_that_the_part_or_the_whole_has_no_room_for_counts_in_neither() -> None:
    whole = Ledger(Tier.DEVICE, 100)
    small, open_ended = Ledger(Tier.DEVICE, 10, whole), Ledger(Tier.DEVICE, None, whole)
    with pytest.raises(DeviceOutOfMemory) as refused:
        small.charge(Kind.STATE, 11)
    assert refused.value.allowed == 10
    open_ended.charge(Kind.STATE, 95)
    with pytest.raises(DeviceOutOfMemory) as refused:
        small.charge(Kind.STATE, 6)
    assert refused.value.allowed == 100
    assert (small.live, open_ended.live, whole.live) == (0, 95, 95)
    assert small.headroom == 5 and open_ended.headroom == 5


def test_threads_with_finalizers_of_each_others_parts_do_not_wait_for_each_other() -> None:
    """What one thread drops may have been counted by another part, and a finalizer runs in the middle of anything."""
    whole = Ledger(Tier.DEVICE)
    parts = [Ledger(Tier.DEVICE, None, whole) for _ in range(2)]

    def work(mine: Ledger, others: Ledger) -> None:
        for _ in range(2000):
            with mine._lock:  # as inside of a charge
                mine.charge(Kind.STATE, 1)
                others.charge(Kind.STATE, 1)
                others.discharge(Kind.STATE, 1)
            mine.discharge(Kind.STATE, 1)

    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(work, *pair) for pair in (parts, parts[::-1])]
        assert all(one.result(timeout=20) is None for one in done)
    assert whole.live == 0 and [part.live for part in parts] == [0, 0]
