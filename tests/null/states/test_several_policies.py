"""``hydra`` and ``tmo``: refused for one model and one device, and simulated for several."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.planners import PLANNERS, SEVERAL, STATES, make_plan
from forebay.planners.states import tmo_plans
from forebay.planners.states.tmo import swapped_blocks
from forebay.simulation import Costs, side_by_side
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.units import format_enough
from tests.null.planning import ENOUGH, asked, chain, machine

LAYERS, LINK = 8, 1e8
TRACE = chain(LAYERS, activation=1 << 16)
ON = machine(compute=2e8, h2d=LINK, d2h=LINK)
ALL_STAY = make_plan(asked(TRACE, ON, device=ENOUGH), "resident").device
STEPS = 4


@pytest.mark.parametrize(("policy", "words"), [("hydra", "several models"), ("tmo", "several devices")])
def test_one_is_refused_with_what_would_do(policy: str, words: str) -> None:
    assert PLANNERS[policy] is SEVERAL[policy] and not set(SEVERAL) & set(STATES)
    with pytest.raises(CannotServe, match=rf"policy {policy} .*{words}.*What would fit: policy .* auto") as refused:
        make_plan(asked(TRACE, ON, device=ENOUGH), policy)
    assert refused.value.nearest[0].what == "policy"


# tmo.


@cache
def device(share: float) -> int:
    """Bytes with room for all that stands and a share of the rest."""
    least = min(p.device for p in tmo_plans(asked(TRACE, ON, device=ALL_STAY), 2))
    swapped = make_plan(asked(TRACE, ON, device=ENOUGH), "offload-all").device
    return round(swapped + share * (least - swapped))


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("count", range(1, LAYERS + 1))
def test_the_devices_swap_other_blocks_as_far_as_there_are_any(devices: int, count: int) -> None:
    able = [f"layers.{i}" for i in range(LAYERS)]
    sets = [set(swapped_blocks(able, count, place, devices)) for place in range(devices)]
    assert all(len(own) == count for own in sets)
    if devices * count <= LAYERS:
        assert len(set.union(*sets)) == devices * count
    assert count == LAYERS or len({frozenset(own) for own in sets}) > 1


def test_with_room_for_all_nobody_swaps() -> None:
    for plan in tmo_plans(asked(TRACE, ON, device=ALL_STAY), 2):
        assert not plan.activations and plan.planner == "tmo"


def test_each_plan_is_right_and_swaps_no_more_than_it_must() -> None:
    plans = tmo_plans(asked(TRACE, ON, device=device(0.6)), 2)
    swapping = [{b for s in plan.activations for b in s.blocks} for plan in plans]
    assert swapping[0] and not swapping[0] & swapping[1]
    for plan in plans:
        check(TRACE, ON, plan)
        assert plan.device <= device(0.6)
    alike = tmo_plans(asked(TRACE, ON, device=device(0.6)), 2, disjoint=False)
    assert alike[0] == alike[1] and alike[0].activations == plans[0].activations


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_in_turns_is_never_the_slower_and_never_faster_than_a_channel_for_all(share: float) -> None:
    """Where devices share a channel fairly, what orders their copies moves no byte less: it is worth what of them then
    hides under computation."""
    on = replace(ON, compute={"float32": 1e9})
    wanted, costs = asked(TRACE, on, device=device(share)), Costs(TRACE, on, Masters.WHOLE)
    plans = tmo_plans(wanted, 2, disjoint=False)
    oblivious = side_by_side(plans, costs, STEPS, channel=LINK, in_turns=False)
    in_turns = side_by_side(plans, costs, STEPS, channel=LINK, in_turns=True)
    free = side_by_side(plans, costs, STEPS, channel=2 * LINK, in_turns=False)
    assert free.seconds < in_turns.seconds < oblivious.seconds
    assert in_turns.seconds >= in_turns.busy[Lane.H2D]


def test_too_small_a_device_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="device memory") as refused:
        tmo_plans(asked(TRACE, ON, device=1), 2)
    assert refused.value.needed > 1
    assert "What would fit: device_memory" in str(refused.value) and refused.value.nearest[0].what == "device"
    least = refused.value.nearest[0].needed
    assert max(plan.device for plan in tmo_plans(asked(TRACE, ON, device=least), 2)) <= least


def test_too_small_a_host_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"host memory: .* of activations are swapped and 1 B are allowed") as refused:
        tmo_plans(asked(TRACE, ON, device=device(0.5), host=1), 2)
    host = refused.value.nearest[0]
    assert host.what == "host" and f"host_memory {format_enough(host.needed)}" in str(refused.value)
    plans = tmo_plans(asked(TRACE, ON, device=device(0.5), host=host.needed), 2)
    assert max(plan.host for plan in plans) <= host.needed


def test_one_device_has_nobody_to_tell_apart() -> None:
    with pytest.raises(ConfigError, match="two devices or more"):
        tmo_plans(asked(TRACE, ON, device=ENOUGH), 1)
