"""PatrickStar: how large chunks are, how many there is room for, and which uses of a block find it in one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners import Bench, make_plan
from forebay.planners.parts import Draft
from forebay.planners.shapes import streamed_through, usual_window
from forebay.planners.states.patrickstar import chunk_size, chunks
from forebay.plans import Plan, Update
from forebay.simulation import forecast, simulate
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.states.test_state_policies import ends_trace
from tests.null.synthetic import block, problem

LAYERS = 8
TRACE, ON = chain(LAYERS), machine()
BLOCK = TRACE.model.blocks[0].nbytes
GRADIENT = TRACE.model.blocks[0].gradient_nbytes


def made(device: int, *, trace: Trace = TRACE, on: Machine = ON, host: int = ENOUGH) -> Plan:
    return make_plan(asked(trace, on, device=device, host=host), "patrickstar")


def room_for(*slots: int, trace: Trace = TRACE) -> int:
    """The device with which these slots fit and no more, beside a window for the gradients of a block and all
    activations."""
    bench = Bench(asked(trace, ON, device=ENOUGH))
    return bench.device(streamed_through(bench, slots, usual_window(bench)))


FOUR = room_for(*[BLOCK] * 4)


def of_size(*kib: int) -> list[Block]:
    return [block(f"layers.{i}", ((size, 256), "float32", True)) for i, size in enumerate(kib)]


# How large.


def test_chunks_of_layers_that_are_alike_are_as_large_as_they() -> None:
    assert chunk_size(of_size(64, 64, 64)) == 64 * 1024


def test_a_chunk_leaves_the_least_empty() -> None:
    """Twelve layers of 60 KiB and twelve of 80: in chunks of 60 the larger ones take two (40 KiB are empty of each), in
    chunks of 80 the smaller ones leave 20."""
    encoder, decoder = [60] * 12, [80] * 12
    assert chunk_size(of_size(*encoder, *decoder)) == 80 * 1024
    # 36 smaller ones leave 36 x 20, more than the 12 x 40 of the larger ones.
    assert chunk_size(of_size(*encoder * 3, *decoder)) == 60 * 1024


def test_the_ends_of_a_model_do_not_make_the_layers_chunks_larger() -> None:
    """211 KiB in chunks of 64: 45 empty of each end, beside 147 of each layer."""
    blocks = of_size(211, *[64] * 6, 211)
    assert chunk_size(blocks) == 64 * 1024
    assert chunks(blocks, 64 * 1024, 3) == (211 * 1024, 64 * 1024, 64 * 1024, 64 * 1024)


def test_what_is_smaller_than_the_layers_is_no_size_of_a_chunk() -> None:
    assert chunk_size(of_size(1, *[64] * 6, 1)) == 64 * 1024


# How many, and what they hold.


@pytest.mark.parametrize("count", [3, 5])
def test_there_are_as_many_as_fit_beside_the_peak_of_everything_else(count: int) -> None:
    needed = room_for(*[BLOCK] * count)
    for device in (needed, needed + BLOCK // 2, needed + BLOCK - 1):
        plan = made(device)
        assert plan.streaming.slots == (BLOCK,) * count and plan.device == needed
        assert plan.device - count * BLOCK == Bench(asked(TRACE, ON, device=device)).beside(Draft.of(plan))
        check(TRACE, ON, plan)
    assert len(made(needed + BLOCK).streaming.slots) == count + 1


@pytest.mark.parametrize("count", [3, 4, 6, LAYERS - 1])
def test_the_chunk_that_goes_is_the_one_used_again_last(count: int) -> None:
    """Forward fetches every layer; of n chunks the last n layers are still there when backward asks for them, which is
    the most that any rule can keep: 2 L - n fetches."""
    plan = made(room_for(*[BLOCK] * count))
    assert len(plan.streaming.slots) == count
    assert forecast(TRACE, ON, plan).moved[Lane.H2D] == (2 * LAYERS - count) * BLOCK


def test_a_chunk_moves_when_it_is_asked_for_and_not_before() -> None:
    plan = made(FOUR)
    assert plan.streaming.prefetch_distance == 0
    events = simulate(TRACE, ON, plan).events
    compute = sorted((e for e in events if e.lane is Lane.COMPUTE), key=lambda e: e.start)
    assert any(one.end < other.start for one, other in pairwise(compute))
    for fetch in (e for e in events if e.lane is Lane.H2D):
        assert not any(c.start < fetch.start < c.end for c in compute), fetch


def test_updates_are_over_before_the_next_forward() -> None:
    plan = made(FOUR)
    assert not plan.streaming.overlap_update and not plan.updated(Update.AHEAD)


def test_where_all_parameters_fit_the_margin_holds_states() -> None:
    device = make_plan(asked(TRACE, ON, device=ENOUGH), "zero-offload").device
    homes = []
    for more in (0, 2, 4):
        # A block that stays as a whole: its gradients, and two states of four bytes an element.
        plan = made(device + more * 3 * BLOCK + more * GRADIENT)
        check(TRACE, ON, plan)
        assert {p.parameters for p in plan.placements} == {Tier.DEVICE} and not plan.streaming.slots
        homes.append(sum(p.resident for p in plan.placements))
    assert homes[0] < homes[1] < homes[2]
    assert all(p.resident for p in made(ENOUGH).placements)


def test_without_room_for_all_parameters_no_states_are_on_the_device() -> None:
    assert not any(p.resident for p in made(room_for(*[BLOCK] * (LAYERS - 1))).placements)


def test_a_larger_block_has_a_slot_of_its_size() -> None:
    trace = ends_trace()
    larger, layer = sorted({b.nbytes for b in trace.model.blocks}, reverse=True)
    slots = (larger, layer, layer, layer)
    plan = made(room_for(*slots, trace=trace), trace=trace)
    assert plan.streaming.slots == slots
    check(trace, ON, plan)


# What it refuses.


def test_a_device_without_room_for_a_chunk_names_the_largest_block() -> None:
    with pytest.raises(DoesNotFit, match=r"for the largest block \(layers\.0\)") as refused:
        made(1)
    assert refused.value.tier == "device" and refused.value.needed > BLOCK
    assert made(refused.value.needed).streaming.slots == (BLOCK,)


def test_it_uses_no_disk() -> None:
    trace = chain(LAYERS, width=512)
    device = room_for(*[trace.model.blocks[0].nbytes] * 4, trace=trace)
    host = made(device, trace=trace).host - 1
    with pytest.raises(DoesNotFit, match=r"policy patrickstar keeps .* nothing on disk") as refused:
        made(device, trace=trace, host=host)
    assert refused.value.tier == "host"
    assert any("policy zero-infinity with a disk of" in remedy.words for remedy in refused.value.nearest)


def test_it_asks_for_a_batch() -> None:
    with pytest.raises(ConfigError, match=r"policy patrickstar needs .* give one"):
        make_plan(problem(of_size(4), device=ENOUGH), "patrickstar")
