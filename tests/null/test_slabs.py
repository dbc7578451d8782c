"""Addresses on the device: everything has a place of its own, and the slabs are the bytes that the plan counts."""

from __future__ import annotations

from hypothesis import given, settings

from forebay.arenas import arenas_of
from forebay.memory import ALIGNMENT, Kind, Tier
from forebay.slabs import RESIDENT, SLOTS, STATES, WINDOW, device_slabs
from tests.null.on_device import cases_on_device
from tests.null.strategies import Case


@settings(max_examples=60, deadline=None)
@given(case=cases_on_device())
def test_regions_are_those_of_the_plan_and_none_overlap(case: Case) -> None:
    trace, plan = case.trace, case.plan
    sizes = arenas_of(trace.model, plan, trace.state_names)
    slabs = {slab.what: slab for slab in device_slabs(trace.model, plan, trace.state_names)}
    assert set(slabs) <= {RESIDENT, STATES, SLOTS, WINDOW}
    for slab in slabs.values():
        end = 0
        for region in slab.regions:
            assert region.offset % ALIGNMENT == 0
            assert 0 <= region.offset - end < ALIGNMENT  # behind the one before, and no further than it must be
            end = region.offset + region.nbytes
        assert slab.nbytes == end
    used = sum(slab.used for slab in slabs.values())
    assert used == sizes.device - sizes.device_gradients
    kinds = {slab.what: slab.kind for slab in slabs.values()}
    assert {kinds.get(RESIDENT, Kind.PARAMETER), kinds.get(SLOTS, Kind.PARAMETER)} == {Kind.PARAMETER}
    slots = [region.nbytes for region in slabs[SLOTS].regions] if SLOTS in slabs else []
    dedicated = [p.block for p in plan.placements if p.parameters is Tier.DEVICE and not p.resident]
    assert [n for n in slots if n][-len(plan.streaming.slots) or len(slots) :] == [n for n in plan.streaming.slots if n]
    assert len(slots) in (0, len(dedicated) + len(plan.streaming.slots))
