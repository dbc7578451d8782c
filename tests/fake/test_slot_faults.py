"""Slots when fetches fail, memory is short, or anything at all happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.device.fake import FakeDevice
from forebay.errors import DeviceOutOfMemory
from forebay.scheduling.slots import Residency, Slot, SlotPool
from tests.fake.slot_rig import NBYTES, Rig, ScriptedSource, names, rig


def test_a_fetch_that_fails_raises_in_acquire_and_leaves_no_reader() -> None:
    made = rig(2, slots=1, distance=1, compute=0.0)
    made.source.broken.add("0")
    for _ in range(2):
        with pytest.raises(OSError, match="cannot read 0"):
            made.pool.acquire("0")
        assert made.pool.slot_of("0") is None
        assert (made.pool.slots[0].readers, made.pool.slots[0].residency) == (0, Residency.EMPTY)
    made.use("1")
    made.source.broken.clear()
    made.use("0")
    made.device.synchronize()


@pytest.mark.parametrize("distance", [1, 2])
def test_a_prefetch_that_failed_raises_where_its_block_is_wanted(distance: int) -> None:
    made = rig(4, slots=3, distance=distance, compute=1.0)
    made.run(names(4))
    made.pool.invalidate("1")
    made.source.broken.add("1")
    made.pool.order.begin("training")
    made.use("0")
    with pytest.raises(OSError, match="cannot read 1"):
        made.pool.acquire("1")
    made.source.broken.clear()
    made.run(names(4))
    assert [slot.readers for slot in made.pool.slots] == [0, 0, 0]


def invalidated(made: Rig) -> None:
    made.pool.invalidate("1")


def evicted_on_demand(made: Rig) -> None:
    made.pool.acquire("4")


def evicted_by_a_prefetch(made: Rig) -> None:
    made.pool.order.note("2")  # block 1 was passed over: what comes next is block 3
    made.pool.prefetch()


@pytest.mark.parametrize("lose", [invalidated, evicted_on_demand, evicted_by_a_prefetch])
def test_a_failed_prefetch_that_nobody_wanted_is_told_once(lose: Callable[[Rig], None]) -> None:
    """The error may come where another block is asked for, but once: the slot is good again, nobody holds it."""
    made = rig(5, slots=2, distance=1, compute=1.0)
    made.run(["0", "1", "0", "2", "3"])
    made.pool.invalidate("1")
    made.source.broken.add("1")
    made.pool.order.begin("training")
    held = made.acquire("0")
    assert made.source.fetched[-1] == "1" and made.pool.slot_of("1") is not None
    with pytest.raises(OSError, match="cannot read 1"):
        lose(made)
    made.release(held)
    assert made.pool.slot_of("1") is None
    assert [slot.readers for slot in made.pool.slots] == [0, 0]
    made.source.broken.clear()
    made.run(["0", "1", "0", "2", "3"])
    made.device.synchronize()


def test_a_failure_while_looking_ahead_leaves_no_reader() -> None:
    """The block that was asked for is there, and the caller never sees its slot: it must not count as a reader."""
    made = rig(4, slots=2, distance=1, compute=1.0)
    made.run(["0", "1", "2", "3"])
    made.pool.invalidate("1")
    made.source.broken.add("1")
    made.pool.order.begin("training")
    made.use("0")
    with pytest.raises(OSError, match="cannot read 1"):
        made.pool.acquire("2")
    assert [slot.readers for slot in made.pool.slots] == [0, 0]
    made.source.broken.clear()
    assert made.run(["0", "1", "2", "3"])


# Memory.


def test_slots_are_charged_to_the_byte_and_given_back() -> None:
    made = Rig({"0": 7, "1": 5}, [5, 5], dedicated=["0"])
    assert made.device.usage().live == 7 + 5 + 5
    made.use("1")
    made.pool.close()
    assert (made.device.usage().live, made.device.usage().peak) == (0, 17)


def test_slots_that_do_not_fit_leave_nothing_behind() -> None:
    device = FakeDevice(2 * NBYTES, {})
    sizes = dict.fromkeys(names(3), NBYTES)
    with pytest.raises(DeviceOutOfMemory, match="a slot needs 100 B"):
        SlotPool(device, ScriptedSource(device, sizes), sizes, [NBYTES, NBYTES], ["0"])
    assert device.usage().live == 0


# Whatever happens.


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, int], list[int], list[str]]:
    sizes = {name: draw(st.sampled_from([10, 20, 40])) for name in names(draw(st.integers(2, 6)))}
    dedicated = [name for name in sizes if draw(st.integers(0, 3)) == 0]
    largest = max(sizes.values())
    shared = [largest, *draw(st.lists(st.sampled_from([10, 20, 40]).filter(lambda n: n <= largest), max_size=3))]
    return sizes, sorted(shared, reverse=True), dedicated


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "acquire", "release", "pass", "prefetch", "invalidate", "break", "mend"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(layouts(), ACTIONS, st.integers(0, 3), st.sampled_from([0.0, 1.0, 9.0]))
def test_whoever_acquires_a_block_reads_that_block(
    layout: tuple[dict[str, int], list[int], list[str]],
    actions: list[tuple[str, int]],
    distance: int,
    compute: float,
) -> None:
    """Any sequence of uses, overlapping readers, stale homes and failing fetches: ``Rig.acquire`` and the source
    check the bytes; here, that the pool refuses exactly when it must and that its account of itself is right."""
    sizes, shared, dedicated = layout
    made = Rig(sizes, shared, dedicated=dedicated, distance=distance, compute=compute)
    held: list[Slot] = []
    for action, number in actions:
        block = list(sizes)[number % len(sizes)]
        if action in ("use", "acquire"):
            _acquire(made, block, sizes, held)
            if action == "use" and held and held[-1].occupant == block:
                made.device.compute(compute, block)
                made.release(held.pop())
        elif action == "release" and held:
            made.release(held.pop(number % len(held)))
        elif action == "pass":
            made.pool.order.begin("training" if number % 3 else "evaluation")
        elif action in ("prefetch", "invalidate"):
            _change(made, action, block)
        elif action == "break":
            made.source.broken.add(block)
        elif action == "mend":
            made.source.broken.discard(block)
        _check_account(made, held)
    while held:
        made.release(held.pop())
    made.source.broken.clear()
    _drain_failures(made)
    for block in sizes:
        made.use(block)


def _acquire(made: Rig, block: str, sizes: Mapping[str, int], held: list[Slot]) -> None:
    there = made.pool.slot_of(block) is not None
    own = [slot for slot in made.pool.slots if slot.dedicated_to == block]
    fitting = own or [s for s in made.pool.slots if s.dedicated_to is None and s.nbytes >= sizes[block]]
    free = there or any(slot.readers == 0 for slot in fitting)
    if not free:
        with pytest.raises(DeviceOutOfMemory):
            made.pool.acquire(block)
        return
    # A fetch that fails is told wherever somebody waits for it.
    with contextlib.suppress(OSError):
        held.append(made.acquire(block))


def _change(made: Rig, action: str, block: str) -> None:
    slot = made.pool.slot_of(block)
    with contextlib.suppress(OSError):
        if action == "prefetch":
            made.pool.prefetch()
        elif slot is None or slot.readers == 0:
            made.pool.invalidate(block)


def _drain_failures(made: Rig) -> None:
    """Lets every prefetch that failed tell so: each of them does it once."""
    for slot in list(made.pool.slots):
        if slot.occupant is not None:
            _change(made, "invalidate", slot.occupant)
    assert all(slot.residency is Residency.EMPTY for slot in made.pool.slots)


def _check_account(made: Rig, held: Sequence[Slot]) -> None:
    occupants = [slot.occupant for slot in made.pool.slots if slot.occupant is not None]
    assert len(occupants) == len(set(occupants))
    for slot in made.pool.slots:
        assert slot.readers == sum(other is slot for other in held)
        assert slot.dedicated_to is None or slot.occupant in (None, slot.dedicated_to)
        assert slot.occupant is None or made.pool.slot_of(slot.occupant) is slot
        assert (slot.occupant is None) == (slot.residency is Residency.EMPTY)
        if slot.readers:
            assert made.source.content[slot.buffer] == slot.occupant
