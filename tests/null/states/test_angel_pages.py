"""Angel-PTM: slots for any run of blocks, filled as early as they are free; what the host has no room for on disk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import make_plan
from forebay.planners.states.angel_ptm import pages
from forebay.plans import Plan, Update
from forebay.simulation import forecast
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.states.test_patrickstar_chunks import room_for
from tests.null.synthetic import block, problem

LAYERS = 8
TRACE = chain(LAYERS)
LARGE = chain(LAYERS, width=512)
ON = machine(disk=1e8)
BLOCK = TRACE.model.blocks[0].nbytes


def made(
    device: int, *, policy: str = "angel-ptm", trace: Trace = TRACE, on: Machine = ON, host: int = ENOUGH, disk: int = 0
) -> Plan:
    return make_plan(asked(trace, on, device=device, host=host, disk=disk), policy)


COUNT = 5
SOME = room_for(*[BLOCK] * COUNT)
FEW_OF_LARGE = room_for(*[LARGE.model.blocks[0].nbytes] * 4, trace=LARGE)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), data=st.data())
@settings(max_examples=40)
def test_any_run_of_blocks_has_room(sizes: list[int], data: st.DataObject) -> None:
    """Each block of a run in a slot of its own; and no slot is larger than some run needs it."""
    blocks = [block(f"layers.{i}", ((size, 16), "float32", True)) for i, size in enumerate(sizes)]
    count = data.draw(st.integers(1, len(blocks)))
    slots = pages(blocks, count)
    runs = [sorted((b.nbytes for b in blocks[i : i + count]), reverse=True) for i in range(len(blocks) - count + 1)]
    assert len(slots) == count and list(slots) == sorted(slots, reverse=True)
    assert all(size <= slot for run in runs for size, slot in zip(run, slots, strict=True))
    assert all(any(run[place] == slot for run in runs) for place, slot in enumerate(slots))


def test_it_fills_the_device_and_fetches_as_far_ahead_as_there_are_slots() -> None:
    plan = made(SOME)
    assert plan.streaming.slots == (BLOCK,) * COUNT and plan.streaming.prefetch_distance == COUNT - 1
    assert plan.device == SOME
    check(TRACE, ON, plan)


def test_it_moves_no_more_than_chunks_on_demand_and_is_no_later() -> None:
    """What comes early takes the place of nothing that is used sooner: 2 L - n fetches, as with Belady's rule alone."""
    early, on_demand = made(SOME), made(SOME, policy="patrickstar")
    assert early.streaming.slots == on_demand.streaming.slots
    moved = [forecast(TRACE, ON, plan).moved[Lane.H2D] for plan in (early, on_demand)]
    assert moved == [(2 * LAYERS - COUNT) * BLOCK] * 2
    assert early.step_seconds is not None and on_demand.step_seconds is not None
    assert early.step_seconds < on_demand.step_seconds


def test_where_all_parameters_fit_the_rest_is_for_states() -> None:
    assert all(p.resident for p in made(ENOUGH).placements)
    plan = made(made(ENOUGH, policy="zero-offload").device)
    assert {p.parameters for p in plan.placements} == {Tier.DEVICE} and not plan.streaming.slots
    assert plan.streaming.prefetch_distance >= sum(not p.resident for p in plan.placements)


def test_what_the_host_has_no_room_for_is_on_disk_states_first() -> None:
    free = made(FEW_OF_LARGE, trace=LARGE)
    some = made(FEW_OF_LARGE, trace=LARGE, host=free.host * 3 // 4, disk=ENOUGH)
    few = made(FEW_OF_LARGE, trace=LARGE, host=free.host * 9 // 20, disk=ENOUGH)
    for plan in (some, few):
        check(LARGE, ON, plan)
    assert {p.states for p in free.placements} == {Tier.HOST} and not free.disk
    assert any(p.states is Tier.DISK for p in some.placements)
    assert all(p.parameters is Tier.HOST for p in some.placements)
    assert all(p.states is Tier.DISK for p in few.placements)
    assert any(p.parameters is Tier.DISK for p in few.placements)


def test_without_a_disk_it_asks_for_one() -> None:
    host = made(FEW_OF_LARGE, trace=LARGE).host - 1
    with pytest.raises(DoesNotFit) as refused:
        made(FEW_OF_LARGE, trace=LARGE, host=host)
    assert refused.value.tier == "host" and any(remedy.what == "disk" for remedy in refused.value.nearest)


def test_numbers_are_those_of_plain_pytorch() -> None:
    """No update is late."""
    plan = made(SOME)
    assert not plan.changes_numbers and not plan.streaming.overlap_update and not plan.updated(Update.AHEAD)


def test_it_asks_for_a_batch() -> None:
    with pytest.raises(ConfigError, match=r"policy angel-ptm needs .* give one"):
        make_plan(problem([block("one", ((8, 8), "float32", True))], device=ENOUGH), "angel-ptm")
