"""Planners that promise an optimum, on small random graphs: as good as trying everything, and nobody is better."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners import LITERATURE, Bench, make_plan
from forebay.planners.activations.literature.chained import links_of, step_of
from forebay.planners.activations.literature.chaining import best_chain, seconds_of
from forebay.planners.activations.literature.checkmate import solved as by_integers
from forebay.planners.activations.literature.joins import chains_of
from forebay.planners.activations.literature.layers import Layer, all_again, all_moved
from forebay.planners.activations.literature.moccasin import solved as by_constraints
from forebay.planners.activations.menu import Option
from forebay.planners.parts import KEPT, all_resident
from forebay.plans import Plan
from forebay.simulation import simulate
from forebay.trace import Trace
from tests.null.literature.graphs import ON, account, drawn, graph_trace, layers_in, tried, two_towers
from tests.null.planning import ENOUGH, asked
from tests.null.tracing import validate

SEEDS = range(8)
SHARES = (0.3, 0.5, 0.7, 0.9)
BY_OPS = ("checkmate", "moccasin", "rockmate")
BY_BLOCKS = ("rotor", "joins")
WITH_ATTENTION = {"selective", "distflashattn", "loongtrain"}


def whole(trace: Trace) -> tuple[int, int]:
    """Bytes of the device without activations, and with all of them."""
    bench = Bench(asked(trace, ON, device=ENOUGH))
    draft = all_resident(trace.model, KEPT)
    return bench.arenas(draft).device, bench.device(draft)


def served(trace: Trace, policies: tuple[str, ...], share: float) -> dict[str, Plan]:
    """The plans of those that have one within ``share`` of what activations take."""
    standing, everything = whole(trace)
    found, problem = {}, asked(trace, ON, device=standing + round(share * (everything - standing)))
    bench = Bench(problem)
    for policy in policies:
        try:
            found[policy] = make_plan(problem, policy, bench)
        except DoesNotFit:
            continue
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_on_graphs_of_ops_the_programmes_are_as_good_as_trying_everything(seed: int) -> None:
    trace = graph_trace(drawn(Random(seed), 3, 3, joins=seed % 2 == 1))
    validate(trace)
    layers = layers_in(trace)
    for share in SHARES:
        allowed = round(share * sum(layer.items.held for layer in layers))
        best = tried(layers, allowed)
        for solved in (by_integers, by_constraints):
            found = solved(layers, allowed, 500)
            if best is None:
                assert found is None
            else:
                assert found is not None and found.value == pytest.approx(best) and found.gap < 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_who_makes_again_is_better_than_the_programmes(seed: int) -> None:
    """By their own account: in the bytes that any other plan takes, the programmes find no more seconds."""
    trace = graph_trace(drawn(Random(100 + seed), 4, 4, joins=seed % 2 == 1))
    layers = layers_in(trace)
    plans = served(trace, (*BY_BLOCKS, *BY_OPS, "chen", "superneurons", "capuchin", "str"), 0.6 + 0.04 * seed)
    compared = 0
    for plan in plans.values():
        if plan.streaming.host_activations or not plan.recompute:
            continue
        fullest, seconds = account(layers, plan)
        for solved in (by_integers, by_constraints):
            found = solved(layers, round(fullest), 500)
            assert found is not None and found.value <= seconds * (1 + 1e-9)
        compared += 1
    assert compared > 2


@pytest.mark.parametrize("seed", SEEDS)
def test_on_chains_of_blocks_of_one_op_checkmate_is_rotor(seed: int) -> None:
    trace = graph_trace(drawn(Random(200 + seed), 5, 1))
    layers = layers_in(trace)
    steps, links = [[step_of(option) for option in ends(layer)] for layer in layers], links_for(trace)
    for share in SHARES:
        allowed = round(share * sum(layer.items.held for layer in layers))
        chain, found = best_chain(steps, links, allowed), by_integers(layers, allowed, 500)
        assert (chain is None) == (found is None)
        if chain is not None and found is not None:
            seconds = seconds_of([own[place] for own, place in zip(steps, chain, strict=True)], links, allowed)
            assert found.value == pytest.approx(seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_joins_is_as_good_as_trying_everything(seed: int) -> None:
    trace = graph_trace(drawn(Random(300 + seed), 6, 3, joins=True))
    layers = layers_in(trace)
    options = [ends(layer) for layer in layers]
    steps, links = [[step_of(option) for option in able] for able in options], links_for(trace)
    for share in SHARES:
        allowed = share * sum(layer.items.held for layer in layers)
        costs = [cost for ways in product(*options) if (cost := seconds_within(ways, allowed)) is not None]
        places = best_chain(steps, links, allowed)
        assert (places is None) == (not costs)
        if places is not None:
            taken = [able[place] for able, place in zip(options, places, strict=True)]
            assert seconds_within(taken, allowed) == pytest.approx(min(costs))


def seconds_within(ways: tuple[Option, ...] | list[Option], allowed: float) -> float | None:
    held = 0.0
    for option in ways:
        held += option.held
        if held + option.workspace > allowed:
            return None
    return sum(option.seconds for option in ways)


def ends(layer: Layer) -> list[Option]:
    """All of it kept, and all of it made again."""
    return [layer.kept(), all_again(layer)] if layer.may_rerun else [layer.kept()]


def links_for(trace: Trace):  # type: ignore[no-untyped-def]
    bench = Bench(asked(trace, ON, device=ENOUGH))
    return links_of(bench, layers_in(trace))


def test_joins_sees_where_chains_meet() -> None:
    """Two towers and what is behind them; a chain is one, however many of its blocks read its first."""
    assert chains(two_towers(3)) == (0, 0, 0, 3, 3, 3, 6)
    graph = [(before, ops) for before, ops in two_towers(1)[:1]] + [([0], two_towers(1)[0][1])]
    ops = graph[0][1]
    assert chains([*graph, ([0, 1], ops), ([0, 2], ops)]) == (0, 0, 0, 0)
    assert chains([([], ops), ([0], ops), ([0], ops)]) == (0, 0, 2)


def chains(graph) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    trace = graph_trace(graph)
    return chains_of(Bench(asked(trace, ON, device=ENOUGH)), layers_in(trace))


@pytest.mark.parametrize("seed", SEEDS)
def test_pofo_is_no_slower_than_anybody_who_takes_whole_blocks(seed: int) -> None:
    """By its own account: one block after the other kept, made again or moved, as rotor, chen, te and vdnn do."""
    trace = graph_trace(drawn(Random(400 + seed), 5, 2))
    layers, links = layers_in(trace), links_for(trace)
    options = [list(dict.fromkeys((*ends(layer), all_moved(layer)))) for layer in layers]
    steps = [[step_of(option) for option in able] for able in options]
    rate = ON.d2h.curve.best
    held = sum(layer.items.held for layer in layers)
    for share in SHARES:
        places = best_chain(steps, links, share * held, rate)
        costs = [seconds_of(chain, links, share * held, rate) for chain in product(*steps)]
        least = min((cost for cost in costs if cost is not None), default=None)
        if least is None:
            assert places is None
        else:
            assert places is not None
            chosen = [own[place] for own, place in zip(steps, places, strict=True)]
            assert seconds_of(chosen, links, share * held, rate) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(3))
def test_on_random_graphs_all_of_them_are_right_and_within_their_budgets(seed: int) -> None:
    trace = graph_trace(drawn(Random(500 + seed), 5, 4, joins=seed > 0))
    policies = tuple(sorted(set(LITERATURE) - WITH_ATTENTION))
    plans = served(trace, policies, 0.7)
    assert len(plans) > len(policies) // 2
    for plan in plans.values():
        check(trace, ON, plan)
        peaks = simulate(trace, ON, plan).peaks
        assert peaks[Tier.DEVICE] <= plan.device <= plan.budget.device
