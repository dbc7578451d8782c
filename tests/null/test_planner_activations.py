"""From the programme's choices to what a plan says of activations, and to drafts that fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planners.activations.chain import Chain
from forebay.planners.activations.choosing import all_moved, drafted, leanest, level_of, seeds, staying, still
from forebay.planners.activations.menu import Option
from forebay.planners.activations.named import again_seconds, moved_nbytes
from forebay.planners.homes import at_home
from forebay.planners.parts import Level, all_resident
from forebay.planners.search import TIE
from forebay.planners.speculation import ahead
from forebay.plans import Placement, Plan, Streaming
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.planning import ENOUGH, asked, chain, machine

SIZE = 65536
"""Bytes of each activation."""

LAYERS, SAVED = 4, 3


def traced() -> Trace:
    """Each layer: three linears whose results are saved, and a result that the layer after it saves."""
    return chain(LAYERS, saved=SAVED, activation=SIZE)


def opened(device: int = ENOUGH, on: Machine | None = None) -> tuple[Bench, Chain]:
    bench = Bench(asked(traced(), on or machine(), device=device))
    assert bench.chain is not None
    return bench, bench.chain


def option(recompute: bool, *treatments: Treatment, input_moves: bool = False) -> Option:
    return Option(recompute, treatments, input_moves, 0, 0, 0.0, 0.0, 0.0, 0)


def moved(occurrence: int) -> Treatment:
    return Treatment("linear", occurrence, Fate.OFFLOAD)


def level(bench: Bench, chain: Chain, *options: Option) -> Level:
    """With ``options`` for the layers in order."""
    assert bench.liveness is not None
    names = [f"layers.{i}" for i in range(LAYERS)]
    by_name = dict(zip(names, options, strict=True))
    return level_of(bench.liveness, chain, [[by_name[b] for b in g.blocks] for g in chain.groups])


def test_blocks_that_are_treated_alike_share_a_selection() -> None:
    bench, chain = opened()
    keep = Treatment("linear", 1, Fate.KEEP)
    found = level(bench, chain, option(True, keep), option(False, moved(0)), option(True, keep), option(False))
    assert found.recompute == ("layers.0", "layers.2")
    assert found.activations == (Selection(("layers.0", "layers.2"), (keep,)), Selection(("layers.1",), (moved(0),)))
    assert (found.window, found.moved) == (2 * SIZE, SIZE)


def test_nothing_is_under_way_where_those_that_compute_copy() -> None:
    """What moves is the same: no window takes room of the device for it."""
    there = machine(kind="cpu")
    windows = {}
    for on in (there, replace(there, offload=there.d2h)):
        bench, _ = opened(on=on)
        found = all_moved(bench)
        assert found.moved == LAYERS * (SAVED + 1) * SIZE
        windows[on.copies_between_ops] = found.window
    assert windows == {False: 2 * SIZE, True: 0}


def test_an_input_moves_only_out_of_a_block_that_recomputes() -> None:
    """Else nobody would have saved it, and a plan may not name it."""
    bench, chain = opened()
    sources = {b: s for g in chain.groups for b, s in zip(g.blocks, g.inputs, strict=True)}
    whole = option(True, input_moves=True)
    found = level(bench, chain, whole, whole, option(False), whole)
    named = {b: s.treatments for s in found.activations for b in s.blocks}
    if sources["layers.1"] is None:  # what the layers put out is saved by the next one: it is no input of this kind
        assert named == {}
    else:
        assert set(named) == {"layers.0"}


def test_what_a_level_says_a_streaming_does() -> None:
    made = Level(("a",), (), window=100, moved=300).through(Streaming(slots=(64,)))
    assert (made.offload_window, made.reload_window, made.host_activations, made.slots) == (100, 100, 300, (64,))


def test_every_saved_tensor_moves() -> None:
    """All three of every layer, and what it puts out."""
    bench, _ = opened()
    found = all_moved(bench)
    assert bench.liveness is not None
    assert found.moved == LAYERS * (SAVED + 1) * SIZE
    assert moved_nbytes(bench.liveness.index, found.activations) == [SIZE] * LAYERS * (SAVED + 1)
    # A plan may say so.
    Plan("", bench.problem.budget, (), Streaming(), 0, 0, 0, recompute=found.recompute, activations=found.activations)


def test_seconds_that_run_again_leave_out_what_is_named() -> None:
    bench, _ = opened()
    assert bench.liveness is not None
    index, costs = bench.liveness.index, bench.costs
    forward = bench.liveness.trace.segments[bench.liveness.trace.visits[0].segment]
    each = [costs.work(op.work).seconds for op in forward.ops]
    whole = again_seconds(costs, index, ("layers.0",), ())
    assert whole == pytest.approx(sum(each[:SAVED]))  # up to the last save: what the layer puts out comes after it
    named = (Selection(("layers.0",), (Treatment("linear", 1, Fate.KEEP),)),)
    assert again_seconds(costs, index, ("layers.0",), named) == pytest.approx(whole - each[1])
    assert again_seconds(costs, index, (), named) == 0.0


@pytest.mark.parametrize("part", [0.35, 0.5, 0.8])
def test_seeds_fit_and_fill_the_device(part: float) -> None:
    everything, _ = opened()
    standing = sum(16 * b.trainable_numel for b in everything.model.blocks)
    assert everything.liveness is not None
    room = round(part * (standing + everything.liveness.profile().peak))
    bench, _ = opened(room)
    found = list(seeds(bench))
    assert found and bench.simulated == 0
    for draft in found:
        assert bench.device(draft) <= room
        assert [p.block for p in draft.placements] == [b.name for b in bench.model.blocks]
        assert all(isinstance(p, Placement) and p.states is not Tier.DISK for p in draft.placements)


@pytest.mark.parametrize("part", [0.35, 0.9])
def test_seeds_in_which_nothing_moves(part: float) -> None:
    """Where everything but a tenth fits, in some of them nothing is elsewhere at all."""
    everything, _ = opened()
    standing = sum(16 * b.trainable_numel for b in everything.model.blocks)
    assert everything.liveness is not None
    room = round(part * (standing + everything.liveness.profile().peak))
    bench, _ = opened(room)
    found = list(still(bench))
    assert found and all(bench.device(draft) <= room for draft in found)
    assert not any(t.fate is Fate.OFFLOAD for draft in found for s in draft.activations for t in s.treatments)
    assert any(draft.recompute for draft in found)
    assert any(len(draft.resident) == len(bench.model.blocks) for draft in found) == (part > 0.5)


@pytest.mark.parametrize("part", [0.5, 0.7, 0.9])
def test_everything_but_activations_may_stay(part: float) -> None:
    """All that is saved moved is one of the levels, where it fits; each level comes once."""
    whole, _ = opened()
    bench, _ = opened(int(part * whole.device(all_resident(whole.model))))
    found = list(staying(bench))
    moved = all_resident(bench.model, all_moved(bench))
    assert (moved in found) == bench.fits_device(moved)
    assert bool(found) == bench.fits_device(moved) and len(set(found)) == len(found)
    for draft in found:
        assert len(draft.resident) == len(bench.model.blocks) and bench.fits_device(draft)
        assert draft.activations or draft.recompute


@pytest.mark.thinned(2)
@pytest.mark.parametrize("part", [0.7, 0.8, 0.9])
@pytest.mark.parametrize("handed", [0.0, 1e-3])
def test_auto_is_not_behind_a_step_in_which_everything_but_activations_stays(part: float, handed: float) -> None:
    trace, host = traced(), replace(machine(), device_kind="cpu", handover_seconds=handed)
    whole = Bench(asked(trace, host, device=ENOUGH))
    problem = asked(trace, host, device=int(part * whole.device(all_resident(whole.model))))
    bench = Bench(problem)
    others = [bench.seconds(at_home(bench, draft)) for draft in staying(bench)]
    best = make_plan(problem, "auto").step_seconds
    assert others and best is not None and best <= min(others) * (1 + TIE)


def test_the_leanest_levels_are_drafted_where_they_fit() -> None:
    bench, _ = opened()
    levels = leanest(bench)
    assert [(one.recompute, one.moved > 0) for one in levels] == [(bench.recomputable, False), ((), True)]
    assert [draft.level for draft in drafted(bench, levels)] == levels
    small, _ = opened(1)
    assert list(drafted(small, levels)) == []


def test_the_bound_is_below_and_near_the_step() -> None:
    """A machine on which compute is all that counts: nothing but the ops, and then some updates."""
    bench = Bench(asked(traced(), machine(compute=2e7, update=1e12), device=ENOUGH))
    draft = next(seeds(bench))
    assert bench.bound <= bench.seconds(draft) <= 1.01 * bench.bound


@pytest.mark.parametrize("bandwidth", [1e10, 1e7])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_no_step_takes_less_than_is_said(kind: str, bandwidth: float) -> None:
    """Updates of blocks that stay take time of compute, much of it where the device's memory is slow."""
    whole, _ = opened()
    everything = all_resident(whole.model)
    bench, _ = opened(int(0.7 * whole.device(everything)), replace(machine(kind=kind), device_bandwidth=bandwidth))
    drafts = [at_home(bench, draft) for draft in (*seeds(bench), *staying(bench))] + [everything]
    assert len({len(draft.resident) for draft in drafts}) > 1
    for draft in drafts:
        assert 0 < bench.best_rates.step(draft) <= bench.seconds(draft) * (1 + 1e-9)
        more = ahead(bench, draft)
        assert bench.best_rates.step(draft) <= bench.best_rates.step(more) <= bench.seconds(more) * (1 + 1e-9)
    updates = bench.best_rates.step(everything) - bench.best_rates.computing(everything)
    touched = sum(bench.costs.touched(block) for block in bench.model.blocks)
    assert updates == pytest.approx(touched / bandwidth)
