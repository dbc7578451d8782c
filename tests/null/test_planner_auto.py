"""The planner ``auto`` on paper: what stays, what streams, what goes to disk, and refusals whose figures are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.arenas import GRADIENT_STAGING, arenas, home_nbytes
from forebay.budgets import Budget, DiskBudget
from forebay.errors import ConfigError, DoesNotFit
from forebay.layout import gradient_offsets, state_layout
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners import PLANNERS, Problem, make_plan
from forebay.plans import Plan, Streaming
from forebay.states import Masters
from forebay.units import GiB, KiB, MiB
from tests.null.synthetic import ADAM, block, problem

LAYER = 1024 * 1024  # elements
BF16 = (((1024, 1024), "bfloat16", True),)
LAYERS = [block(f"layer{i}", *BF16) for i in range(6)]
TRANSFORMER = [
    block("embedding", ((4096, 1024), "bfloat16", True)),
    *LAYERS,
    block("norm", ((1024,), "bfloat16", True), held=True),
    block("head", ((4096, 1024), "bfloat16", True)),
]
ACTIVATIONS = 10 * MiB

EVERYTHING = sum(b.nbytes + b.gradient_nbytes + 12 * b.trainable_numel for b in TRANSFORMER)
"""Bytes of a model trained in bf16 by Adam: parameters, gradients, and per element a master and two moments in fp32
(all of these blocks fill whole pages of state)."""

HOSTED = sum(b.nbytes + b.gradient_nbytes + 12 * b.trainable_numel for b in TRANSFORMER)
"""The same bytes on the host; what passes through staging comes on top."""

STAGING = GRADIENT_STAGING + 4 * 4 * LAYER
"""Bytes: the embedding's gradient is 8 MiB, and 4 Mi elements are widened to fp32 at a time."""


def plan_for(asked: Problem, policy: str = "auto") -> Plan:
    return make_plan(asked, policy)


def where(plan: Plan, what: str) -> dict[str, Tier]:
    return {p.block: getattr(p, what) for p in plan.placements}


def names(plan: Plan, tier: Tier, what: str) -> list[str]:
    return [block for block, home in where(plan, what).items() if home is tier]


# On the device.


def test_what_fits_stays() -> None:
    asked = problem(TRANSFORMER, device=EVERYTHING + ACTIVATIONS + 100, host=1, activations=ACTIVATIONS, buffers=100)
    plan = plan_for(asked)
    assert all(p.resident for p in plan.placements)
    assert plan.streaming.slots == ()
    assert (plan.device, plan.host, plan.disk) == (EVERYTHING + ACTIVATIONS + 100, 0, 0)


def test_a_byte_less_and_something_streams() -> None:
    plan = plan_for(problem(TRANSFORMER, device=EVERYTHING + ACTIVATIONS - 1, activations=ACTIVATIONS))
    assert 0 < sum(not p.resident for p in plan.placements) < len(plan.placements)
    assert plan.device <= EVERYTHING + ACTIVATIONS - 1


def test_a_small_device_streams_through_three_slots() -> None:
    """The embedding and the head need a slot of their size; three more serve the layers; the norm keeps its own."""
    window = 8 * MiB  # the largest gradient
    slots = (8 * MiB, 2 * MiB, 2 * MiB, 2 * MiB)
    budget = sum(slots) + 2 * KiB + window + ACTIVATIONS
    plan = plan_for(problem(TRANSFORMER, device=budget, activations=ACTIVATIONS))
    assert names(plan, Tier.DEVICE, "parameters") == ["norm"]
    assert not any(p.resident for p in plan.placements)
    assert plan.streaming.slots == slots and plan.streaming.gradient_window == window
    assert plan.device == budget
    assert (plan.host, plan.disk) == (HOSTED + STAGING, 0)


@pytest.mark.parametrize("spare", [0, 1, 2 * MiB - 1, 2 * MiB, 4 * MiB, 6 * MiB, 8 * MiB, 14 * MiB - 1])
def test_slots_come_before_the_gradient_window(spare: int) -> None:
    """The least that is accepted: one slot and no window. Then come slots of a layer's size, then the window."""
    least = 8 * MiB + 2 * KiB + ACTIVATIONS
    plan = plan_for(problem(TRANSFORMER, device=least + spare, activations=ACTIVATIONS))
    layers = min(3, spare // (2 * MiB))
    assert plan.streaming.slots == (8 * MiB, *[2 * MiB] * layers)
    assert plan.streaming.gradient_window == min(8 * MiB, spare - layers * 2 * MiB)
    assert plan.streaming.prefetch_distance == min(layers, 2)


def test_room_that_is_left_keeps_the_largest_blocks_then_the_last() -> None:
    """Of a block that stays, 16 bytes an element stay: 64 MiB of the embedding or the head, 16 MiB of a layer. The
    slot of 8 MiB shrinks to a layer's 2 MiB when neither the embedding nor the head needs it."""
    streamed = (8 + 3 * 2 + 8) * MiB + 2 * KiB
    norm = 1024 * 14 + 1024 * 2  # resident instead of in a slot of its own: less than a MiB in any case
    kept, slots = {}, {}
    for spare in (0, 64, 2 * 64 - 6, 2 * 64 - 6 + 2 * 16):
        plan = plan_for(problem(TRANSFORMER, device=streamed + spare * MiB + norm))
        kept[spare] = [name for name in names(plan, Tier.DEVICE, "states") if name != "norm"]
        slots[spare] = [nbytes // MiB for nbytes in plan.streaming.slots]
    ends = ["embedding", "head"]
    assert kept == {0: [], 64: ["embedding"], 122: ends, 154: [ends[0], "layer4", "layer5", ends[1]]}
    # At last the four layers that are left keep the four slots for themselves.
    assert slots == {0: [8, 2, 2, 2], 64: [8, 2, 2, 2], 122: [2, 2, 2, 2], 154: []}


def test_without_a_batch_half_of_the_device_is_left_to_the_activations() -> None:
    plan = plan_for(problem(TRANSFORMER, device=2 * EVERYTHING, measured=False))
    assert all(p.resident for p in plan.placements)
    assert any("its routing depends on values" in reason for reason in plan.reasons)
    plan = plan_for(problem(TRANSFORMER, device=2 * EVERYTHING - 1, measured=False))
    assert not any(p.resident for p in plan.placements)


def test_the_policy_stream_keeps_nothing() -> None:
    plan = plan_for(problem(TRANSFORMER, device=GiB), "stream")
    assert plan.planner == "stream"
    assert names(plan, Tier.DEVICE, "parameters") == ["norm"]
    assert names(plan, Tier.DEVICE, "states") == []


def test_frozen_blocks_have_neither_gradients_nor_states() -> None:
    frozen = [block(b.name, *[(p.shape, p.dtype, False) for p in b.parameters], held=b.held) for b in TRANSFORMER]
    whole = sum(b.nbytes for b in frozen)
    assert plan_for(problem(frozen, device=whole)).device == whole
    plan = plan_for(problem(frozen, device=14 * MiB + 2 * KiB), "stream")
    assert plan.streaming.gradient_window == 0 and plan.device == 14 * MiB + 2 * KiB
    assert plan.host == whole  # no gradients, no states, no staging


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"unknown policy 'fast'; there are {min(PLANNERS)}, .*, {max(PLANNERS)}"):
        plan_for(problem(TRANSFORMER, device=GiB), "fast")


# On the host and on disk.

STREAMED = 22 * MiB + 2 * KiB
"""A device budget that keeps nothing but a slot for the norm (without activations)."""


def test_states_go_to_disk_first_and_from_the_last_block_on() -> None:
    plan = plan_for(problem(TRANSFORMER, device=STREAMED, host=HOSTED + STAGING - 1, disk=GiB))
    on_disk = names(plan, Tier.DISK, "states")
    assert on_disk == [b.name for b in TRANSFORMER[len(TRANSFORMER) - len(on_disk) :]]
    assert 0 < len(on_disk) < len(TRANSFORMER)
    assert names(plan, Tier.DISK, "parameters") == []
    assert plan.host <= HOSTED + STAGING - 1
    assert plan.disk == 12 * sum(b.trainable_numel for b in TRANSFORMER if b.name in on_disk)


def test_parameters_follow_when_all_states_are_on_disk() -> None:
    host = 70 * MiB
    plan = plan_for(problem(TRANSFORMER, device=STREAMED, host=host, disk=GiB))
    assert names(plan, Tier.DISK, "states") == [b.name for b in TRANSFORMER]
    on_disk = names(plan, Tier.DISK, "parameters")
    assert on_disk and set(on_disk) <= {b.name for b in TRANSFORMER if not b.held}
    largest = max(home_nbytes(b) for b in TRANSFORMER if b.name in on_disk)
    assert plan.streaming.host_slots == (largest, largest)
    assert plan.host <= host


def test_without_need_nothing_goes_to_disk() -> None:
    plan = plan_for(problem(TRANSFORMER, device=STREAMED, host=HOSTED + STAGING, disk=GiB))
    assert plan.disk == 0 and plan.streaming.host_slots == ()


# Refusals.


def outcome(asked: Problem) -> DoesNotFit | None:
    try:
        make_plan(asked, "auto")
    except DoesNotFit as error:
        return error
    return None


def with_limit(asked: Problem, tier: Tier, nbytes: int) -> Problem:
    budget: Budget = asked.budget
    if tier is Tier.DEVICE:
        return replace(asked, budget=replace(budget, device=nbytes))
    if tier is Tier.HOST:
        return replace(asked, budget=replace(budget, host=nbytes), host_limit=nbytes)
    return replace(asked, budget=replace(budget, disk=DiskBudget("folder", nbytes)), disk_limit=nbytes)


def refusal(asked: Problem) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        plan_for(asked)
    return caught.value


def assert_needed_is_the_least(asked: Problem, error: DoesNotFit) -> None:
    tier = Tier(error.tier)
    assert error.needed > error.allowed
    assert outcome(with_limit(asked, tier, error.needed - 1)) is not None, error
    enough = outcome(with_limit(asked, tier, error.needed))
    # The device is looked at first: what does not stay there may then not fit on the host.
    assert enough is None or (tier is Tier.DEVICE and enough.tier != error.tier), (error, enough)


ONE = [block("only", *BF16)]
ALL_HELD = [block(f"outer{i}", *BF16, held=True) for i in range(3)]
UNEVEN = [block(f"b{i}", ((n, 1000), "float32", True)) for i, n in enumerate((1, 100, 30, 31, 32, 7))]
MODELS = {"transformer": TRANSFORMER, "one block": ONE, "all in use throughout": ALL_HELD, "uneven": UNEVEN}


@pytest.mark.parametrize("blocks", MODELS.values(), ids=MODELS)
def test_a_device_too_small_is_refused_with_the_least_that_is_enough(blocks: list[Block]) -> None:
    largest = max((b.nbytes for b in blocks if not b.held), default=0)
    held = sum(b.nbytes for b in blocks if b.held)
    asked = problem(blocks, device=max(1, largest), activations=ACTIVATIONS, buffers=1000)
    error = refusal(asked)
    assert (error.tier, error.allowed) == ("device", max(1, largest))
    # One slot for the largest block, the blocks in use throughout, and what the step needs beside parameters.
    assert error.needed == largest + held + ACTIVATIONS + 1000
    assert_needed_is_the_least(asked, error)


def test_a_device_refusal_says_what_for_and_what_to_change() -> None:
    error = refusal(problem(TRANSFORMER, device=16 * MiB, activations=ACTIVATIONS))
    assert str(error) == (
        "device memory: 18.0 MiB are needed and 16.0 MiB are allowed: 8.0 MiB for the largest block (embedding), "
        "2.0 KiB for blocks in use throughout, 10.0 MiB for the activations of one step; raise device_memory, or use "
        "a smaller batch or a shorter sequence"
    )


def test_a_host_too_small_is_refused_with_the_least_that_is_enough() -> None:
    asked = problem(TRANSFORMER, device=STREAMED, host=100 * MiB)
    error = refusal(asked)
    assert (error.tier, error.needed, error.allowed) == ("host", HOSTED + STAGING, 100 * MiB)
    assert "disk=PATH:SIZE" in str(error) and "100.0 MiB are allowed" in str(error)
    assert_needed_is_the_least(asked, error)


@pytest.mark.parametrize("host", [MiB, 16 * MiB, 40 * MiB])
def test_a_host_too_small_in_spite_of_a_disk(host: int) -> None:
    asked = problem(TRANSFORMER, device=STREAMED, host=host, disk=GiB)
    error = refusal(asked)
    assert error.tier == "host" and "disk=PATH:SIZE" not in str(error)
    assert_needed_is_the_least(asked, error)


def test_a_small_model_is_not_told_to_pay_for_a_disk_it_does_not_need() -> None:
    """What the disk's own buffers take on the host is more than the model."""
    small = [block(f"layer{i}", ((100, 100), "float32", True)) for i in range(3)]
    hosted = sum(
        b.nbytes + gradient_offsets(b)[1] + state_layout(b, ADAM, 1 << 22, Masters.WHOLE).nbytes for b in small
    )
    asked = problem(small, device=200 * KiB, host=hosted, disk=GiB)
    error = refusal(asked)
    assert error.needed == hosted + max(b.gradient_nbytes for b in small)
    assert_needed_is_the_least(asked, error)


@pytest.mark.parametrize("disk", [1, MiB, 40 * MiB])
def test_a_disk_too_small_is_refused_with_the_least_that_is_enough(disk: int) -> None:
    asked = problem(TRANSFORMER, device=STREAMED, host=150 * MiB, disk=disk)
    error = refusal(asked)
    assert (error.tier, error.allowed) == ("disk", disk)
    assert "raise host_memory" in str(error)
    assert_needed_is_the_least(asked, error)


# Whatever is asked.

PARAMETERS = st.tuples(
    st.tuples(st.integers(1, 300), st.integers(1, 3000)), st.sampled_from(["float32", "bfloat16"]), st.booleans()
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    repeated = draw(st.lists(PARAMETERS, min_size=1, max_size=3))
    blocks = [block(f"layer{i}", *repeated) for i in range(draw(st.integers(0, 5)))]
    for i in range(draw(st.integers(0 if blocks else 1, 3))):
        parameters = draw(st.lists(PARAMETERS, min_size=1, max_size=2))
        blocks.insert(draw(st.integers(0, len(blocks))), block(f"other{i}", *parameters, held=draw(st.booleans())))
    whole = sum(b.nbytes for b in blocks)

    def share(most: int) -> int:
        return max(1, draw(st.integers(1, 1000)) * most // 1000)

    activations = draw(st.sampled_from([0, 1000, whole]))
    return problem(
        blocks,
        device=activations + share(draw(st.sampled_from([whole, 10 * whole]))),
        host=share(draw(st.sampled_from([whole, 10 * whole]))) + draw(st.sampled_from([0, 6 * MiB])),
        disk=draw(st.sampled_from([0, 1])) * share(10 * whole),
        activations=activations,
        buffers=draw(st.integers(0, 1000)),
        measured=draw(st.booleans()),
        states=draw(st.sampled_from([(), ("momentum_buffer",), ADAM])),
    )


@settings(max_examples=300)
@given(problems(), st.sampled_from(["auto", "stream"]))
def test_no_plan_exceeds_a_budget(asked: Problem, policy: str) -> None:
    """Counted over from the placements; and whatever streams has a slot that holds it."""
    try:
        plan = make_plan(asked, policy)
    except DoesNotFit as error:
        limits = {Tier.DEVICE: asked.budget.device, Tier.HOST: asked.host_limit, Tier.DISK: asked.disk_limit}
        allowed, needed = error.allowed, error.needed
        tier = Tier(error.tier)
    else:
        assert_within(asked, plan)
        return
    assert needed > allowed == limits[tier]


def assert_within(asked: Problem, plan: Plan) -> None:
    sizes = arenas(asked.model, plan.placements, plan.streaming, asked.state_names)
    working_set = asked.footprint.peak + asked.model.buffer_nbytes
    assert plan.device == sizes.device + plan.streaming.gradient_window + working_set <= asked.budget.device
    assert plan.host == sizes.host <= asked.host_limit
    assert plan.disk == sizes.disk <= asked.disk_limit
    assert [p.block for p in plan.placements] == [b.name for b in asked.model.blocks]
    for placement in plan.placements:
        one = asked.model.block(placement.block)
        if placement.parameters is not Tier.DEVICE:
            assert not one.held and max(plan.streaming.slots) >= one.nbytes
        if placement.parameters is Tier.DISK:
            assert max(plan.streaming.host_slots) >= home_nbytes(one)


@settings(max_examples=300)
@given(problems())
def test_every_refusal_names_the_least_that_is_enough(asked: Problem) -> None:
    error = outcome(asked)
    if error is not None:
        assert_needed_is_the_least(asked, error)


def test_a_plan_has_the_defaults_of_streaming_where_nothing_speaks_against_them() -> None:
    plan = plan_for(problem(TRANSFORMER, device=STREAMED))
    assert plan.streaming.update_chunk == Streaming().update_chunk
    assert plan.changes_numbers == ()
