"""Slots on a scripted clock: what is fetched when, what compute loses to it, and that no reader is overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DeviceOutOfMemory, ForebayError
from forebay.scheduling.slots import Residency
from forebay.timeline import Event, Lane
from tests.fake.slot_rig import FETCH, NBYTES, Rig, names, rig, there_and_back

# The schedule of a training step.


def test_the_first_pass_fetches_on_demand() -> None:
    """Without a record nothing is prefetched and nothing is hidden: every fetch is a stall of its whole length."""
    made = rig(4, slots=2, distance=2, compute=4.0)
    fetched = made.run(there_and_back(4))
    assert fetched[:4] == names(4)
    assert made.pool.prefetched == 0 and made.pool.on_demand == len(fetched)
    assert made.device.now() == 8 * 4.0 + len(fetched) * FETCH


def test_every_event_of_the_second_pass() -> None:
    """Four blocks, two slots, one ahead. The pass begins where the first one ended: blocks 0 and 1 are there."""
    made = rig(4, slots=2, distance=1, compute=4.0)
    made.run(there_and_back(4))
    start = made.device.now()
    made.device.drain_events()
    assert made.run(there_and_back(4)) == ["2", "3", "1", "0"]
    moved = [(e.lane, e.start - start, e.end - start, e.what) for e in made.device.drain_events()]
    assert moved == [
        (Lane.COMPUTE, 0.0, 4.0, "0"),
        (Lane.H2D, 4.0, 14.0, "2"),  # under block 1, into the slot of block 0
        (Lane.COMPUTE, 4.0, 8.0, "1"),
        (Lane.STALL, 8.0, 14.0, ""),
        (Lane.H2D, 14.0, 24.0, "3"),
        (Lane.COMPUTE, 14.0, 18.0, "2"),
        (Lane.STALL, 18.0, 24.0, ""),
        (Lane.COMPUTE, 24.0, 28.0, "3"),
        (Lane.COMPUTE, 28.0, 32.0, "3"),  # backward begins: blocks 3 and 2 are there
        (Lane.H2D, 32.0, 42.0, "1"),
        (Lane.COMPUTE, 32.0, 36.0, "2"),
        (Lane.STALL, 36.0, 42.0, ""),
        (Lane.H2D, 42.0, 52.0, "0"),
        (Lane.COMPUTE, 42.0, 46.0, "1"),
        (Lane.STALL, 46.0, 52.0, ""),
        (Lane.COMPUTE, 52.0, 56.0, "0"),
    ]


@pytest.mark.parametrize("compute", [0.0, 4.0, 10.0, 11.0])
@pytest.mark.parametrize("distance", [0, 1, 2])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_step_takes_what_the_lanes_allow(slots: int, distance: int, compute: float) -> None:
    """A step whose blocks were all updated: n fetches forward, n - k backward, in the seconds of the recurrence."""
    n = 6
    made = rig(n, slots, distance, compute)
    made.run(there_and_back(n))
    for _ in range(3):
        start = made.device.now()
        made.device.drain_events()
        on_demand = made.pool.on_demand
        assert made.step(there_and_back(n)) == [*names(n), *reversed(names(n - slots))]
        assert made.device.now() - start == pytest.approx(step_seconds(n, slots, distance, FETCH, compute))
        assert busy(made.device.drain_events(), Lane.H2D) == (n + n - slots) * FETCH
        if distance == 0:
            assert made.pool.on_demand - on_demand == n + n - slots
        else:  # with one slot, only the first fetch of a step has a slot before it is asked for
            assert made.pool.on_demand - on_demand == (n + n - slots - 1 if slots == 1 else 0)
    assert made.pool.order.deviations == 0


def step_seconds(n: int, slots: int, distance: int, fetch: float, compute: float) -> float:
    """A fetch starts when the link is free and the block ``lead`` uses earlier begins; compute waits for its fetch.

    ``lead`` is the prefetch distance, or one less than the slots if that is less: compute reads one of them. The
    first ``lead`` fetches start with the step.
    """
    lead = min(distance, slots - 1)
    missing = [True] * n + [block < n - slots for block in reversed(range(n))]
    begins: list[float] = []
    link = end = 0.0
    for use, fetched in enumerate(missing):
        begin = end
        if fetched:
            asked = end if lead == 0 else begins[use - lead] if use >= lead else 0.0
            link = max(link, asked) + fetch
            begin = max(begin, link)
        begins.append(begin)
        end = begin + compute
    return end


@pytest.mark.parametrize("compute", [0.0, 3.0, 9.0, 10.0, 25.0])
def test_a_prefetch_one_ahead_stalls_for_what_compute_does_not_hide(compute: float) -> None:
    made = rig(6, slots=3, distance=1, compute=compute)
    made.run(there_and_back(6))
    made.device.drain_events()
    fetched = made.run(there_and_back(6))
    assert busy(made.device.drain_events(), Lane.STALL) == len(fetched) * max(0.0, FETCH - compute)


def test_blocks_are_fetched_ahead_up_to_the_first_that_is_still_to_change() -> None:
    made = rig(5, slots=4, distance=3, compute=1.0)
    made.run(there_and_back(5))
    changing = set(names(5))
    before = len(made.source.fetched)
    made.pool.order.begin("training")
    for block, fetched in (("0", ["0"]), ("2", ["0"]), ("1", ["0", "1", "2"]), ("3", ["0", "1", "2"])):
        made.pool.invalidate(block)
        changing.discard(block)
        made.pool.prefetch(changing)
        assert made.source.fetched[before:] == fetched
    assert list(made.pool.upcoming()) == ["0", "1", "2"]


def busy(events: Sequence[Event], lane: Lane) -> float:
    return sum(event.end - event.start for event in events if event.lane is lane)


def test_a_step_leaves_stale_slots_and_the_next_pass_is_fetched_ahead_at_once() -> None:
    made = rig(4, slots=3, distance=2, compute=4.0)
    made.run(there_and_back(4))
    before = len(made.source.fetched)
    for block in names(4):
        made.pool.invalidate(block)
    assert all(slot.residency is Residency.EMPTY for slot in made.pool.slots)
    made.pool.order.begin("training")
    made.pool.prefetch()
    assert made.source.fetched[before:] == ["0", "1"]
    start = made.device.now()
    made.use("0")
    assert made.device.now() - start == FETCH + 4.0


def test_passes_of_another_kind_have_a_record_of_their_own() -> None:
    made = rig(4, slots=2, distance=1, compute=20.0)
    made.run(there_and_back(4))
    made.run(names(4), "evaluation")
    on_demand = made.pool.on_demand
    assert made.run(there_and_back(4))[-2:] == ["1", "0"]
    assert made.pool.order.deviations == 0
    # Evaluation ended with blocks 2 and 3 in the slots: only the first block of the pass comes unannounced.
    assert made.pool.on_demand == on_demand + 1


# Which slot.


def test_a_dedicated_slot_is_fetched_once_and_serves_nobody_else() -> None:
    sizes = dict.fromkeys(names(4), NBYTES)
    made = Rig(sizes, [NBYTES], dedicated=["0"])
    own = made.pool.slots[0]
    for _ in range(3):
        made.run(there_and_back(4))
        assert made.pool.slot_of("0") is own and own.occupant == "0"
    assert made.source.fetched.count("0") == 1
    made.pool.invalidate("0")
    made.use("1")
    assert own.residency is Residency.EMPTY
    made.use("0")
    assert made.source.fetched.count("0") == 2


def test_a_small_block_leaves_the_large_slot_alone() -> None:
    sizes = {"embedding": 10 * NBYTES, **dict.fromkeys(names(4), NBYTES)}
    made = Rig(sizes, [10 * NBYTES, NBYTES, NBYTES])
    for _ in range(3):
        made.run(["embedding", *there_and_back(4), "embedding"])
    assert made.source.fetched.count("embedding") == 1
    # Unless every slot of its own size is being read.
    held = [made.acquire(block) for block in ("0", "1", "2")]
    assert [slot.nbytes for slot in held] == [NBYTES, NBYTES, 10 * NBYTES]


def test_a_slot_that_is_too_small_is_never_used() -> None:
    made = Rig({"small": NBYTES, "large": 2 * NBYTES}, [2 * NBYTES, NBYTES])
    for _ in range(2):
        made.run(["small", "large", "small", "large"])
    assert made.source.fetched == ["small", "large"]


USES = st.lists(st.sampled_from(names(5)), min_size=1, max_size=9)


@given(USES, st.integers(1, 3))
def test_eviction_needs_no_more_fetches_than_the_best_possible(uses: list[str], slots: int) -> None:
    """Belady's choice, against a search of all choices: the pass is known from its record."""
    made = rig(5, slots, distance=0, compute=1.0)
    made.run(uses)
    held = frozenset(slot.occupant for slot in made.pool.slots if slot.occupant is not None)

    @cache
    def fewest(position: int, there: frozenset[str]) -> int:
        if position == len(uses):
            return 0
        block = uses[position]
        if block in there:
            return fewest(position + 1, there)
        if len(there) < slots:
            return 1 + fewest(position + 1, there | {block})
        return 1 + min(fewest(position + 1, there - {gone} | {block}) for gone in there)

    assert len(made.run(uses)) == fewest(0, held)


# Readers.


def test_every_slot_in_use_is_refused_in_words() -> None:
    made = rig(3, slots=2, distance=1, compute=0.0)
    held = [made.acquire("0"), made.acquire("1")]
    with pytest.raises(DeviceOutOfMemory, match=r"block 2: it needs 100 B .*\(0 \(100 B\), 1 \(100 B\)\)") as caught:
        made.pool.acquire("2")
    assert (caught.value.needed, caught.value.allowed) == (NBYTES, 0)
    made.release(held[0])
    assert made.acquire("2") is held[0]


def test_a_prefetch_takes_no_slot_from_a_reader() -> None:
    made = rig(4, slots=2, distance=2, compute=0.0)
    made.run(there_and_back(4))
    made.pool.order.begin("training")
    first, second = made.acquire("0"), made.acquire("1")
    assert (first.occupant, second.occupant) == ("0", "1")
    before = len(made.source.fetched)
    made.pool.prefetch()
    assert made.source.fetched[before:] == []
    made.release(first)
    made.pool.prefetch()
    assert made.source.fetched[before:] == ["2"]


def test_two_readers_of_one_block_share_its_slot() -> None:
    made = rig(2, slots=1, distance=1, compute=0.0)
    first, second = made.acquire("0"), made.acquire("0")
    assert first is second and first.readers == 2
    made.release(first)
    with pytest.raises(DeviceOutOfMemory):
        made.pool.acquire("1")
    made.release(first)
    made.use("1")
    assert made.source.fetched == ["0", "1"]


def test_a_stale_block_with_readers_is_refused_and_stays_known() -> None:
    made = rig(2, slots=1, distance=0, compute=0.0)
    held = made.acquire("0")
    for _ in range(2):
        with pytest.raises(ForebayError, match="parameters of block 0 are about to change, and something still looks"):
            made.pool.invalidate("0")
    assert made.pool.slot_of("0") is held
    made.release(held)
    made.pool.invalidate("0")
    made.use("1")
    assert made.source.fetched == ["0", "1"]


def test_a_stale_block_is_fetched_again() -> None:
    made = rig(2, slots=2, distance=1, compute=0.0)
    made.run(["0", "1", "0"])
    made.pool.invalidate("0")
    made.pool.invalidate("never fetched")
    assert made.pool.slot_of("0") is None
    made.use("0")
    made.use("1")
    assert made.source.fetched == ["0", "1", "0"]


def test_whoever_leaves_a_slot_is_announced() -> None:
    """The runtime poisons there: once for every block that goes, never while it is there."""
    made = rig(3, slots=1, distance=0, compute=0.0)
    buffer = made.pool.slots[0].buffer
    made.vacated.clear()
    held = made.acquire("0")
    vacated = list(made.vacated)
    made.release(held)
    made.use("0")
    assert made.vacated == vacated
    made.use("1")
    assert made.vacated == [*vacated, buffer]


# What the record did not say.


def test_a_skipped_block_is_counted_and_costs_no_more_than_its_fetch() -> None:
    made = rig(6, slots=3, distance=1, compute=20.0)
    uses = there_and_back(6)
    made.run(uses)
    made.step(uses)
    assert made.pool.order.deviations == 0
    on_demand = made.pool.on_demand
    # Block 4 is fetched for nothing. Block 5 comes before it was announced; then the record is found again.
    assert made.step([block for block in uses if block != "4"]) == [*names(6), "2", "1", "0"]
    assert made.pool.order.deviations == 2  # forward and backward
    assert made.pool.on_demand == on_demand + 1


def test_an_unknown_block_is_fetched_on_demand_and_the_record_goes_on() -> None:
    made = rig(6, slots=3, distance=1, compute=20.0)
    made.run(["0", "1", "2", "3", "4"])
    on_demand = made.pool.on_demand
    # Block 5 takes no slot from block 2, which was fetched ahead before it; block 3 still announces block 4.
    assert made.step(["0", "1", "5", "2", "3"]) == ["0", "1", "2", "5", "3", "4"]
    assert made.pool.order.deviations == 1
    assert made.pool.on_demand == on_demand + 1


def test_a_prefetch_that_the_pass_then_skips_is_over_before_its_slot_is_reused() -> None:
    made = rig(4, slots=2, distance=1, compute=1.0)
    made.run(["0", "1", "2"])
    made.pool.invalidate("1")
    made.pool.invalidate("2")
    made.pool.order.begin("training")
    slot = made.acquire("0")
    start = made.device.now()
    assert made.source.fetched[-1] == "1"
    other = made.acquire("3")  # into the slot that block 1 is still on its way to
    assert made.device.now() == start + 2 * FETCH
    assert {slot.occupant, other.occupant} == {"0", "3"}
