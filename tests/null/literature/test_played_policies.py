"""``dtr``, ``delta``, ``coop`` and ``megtaichi``: what a policy evicts to which a recorded step is played. No torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.machine import Machine
from forebay.planners import Bench, make_plan
from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.coop import Coop
from forebay.planners.activations.literature.delta import Delta
from forebay.planners.activations.literature.dtr import Dtr
from forebay.planners.activations.literature.graph import Node, OpGraph
from forebay.planners.activations.literature.layers import layers_of
from forebay.planners.activations.literature.megtaichi import MegTaichi
from forebay.planners.activations.literature.moments import Idle, idle_of
from forebay.planners.activations.literature.playing import INSTANT, Evicting, Neighbourhoods
from forebay.planners.activations.literature.pool import FREE, Pool
from forebay.plans import Plan
from tests.null.literature.graphs import drawn, graph_trace
from tests.null.literature.test_literature_policies import TRACE, moved, tight
from tests.null.planning import ENOUGH, asked, machine

KINDS: list[type[Evicting]] = [Dtr, Delta, Coop, MegTaichi]


def drawn_idle(seed: int) -> list[Idle]:
    bench = Bench(asked(graph_trace(drawn(Random(seed), 4, 6)), machine(compute=1e9, h2d=1e8, d2h=1e8), device=ENOUGH))
    return idle_of(bench, layers_of(bench))


def plan_of(policy: str, on: Machine) -> Plan:
    return make_plan(asked(TRACE, on, device=tight(0.5)), policy)


# What it takes to make something again.


def brute_neighbourhood(graph: OpGraph, place: int, there: frozenset[tuple[str, int]]) -> float:
    """Seconds of the ops that a walk over what is gone reaches, up from ``place`` and down from it."""
    nodes = graph.nodes
    up, down = {place}, {place}
    for _ in nodes:
        up |= {r for at in up for r in nodes[at].reads if nodes[r].name not in there}
        down |= {at for at, node in enumerate(nodes) if set(node.reads) & down and node.name not in there}
    return sum(nodes[at].seconds for at in up | down)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_neighbourhood_is_what_is_gone_up_and_down_from_it(seed: int) -> None:
    draw = Random(seed)
    count = draw.randint(1, 9)
    reads = [tuple(sorted(draw.sample(range(at), draw.randint(0, min(at, 2))))) for at in range(count)]
    graph = OpGraph(tuple(Node(("op", at), 0, float(1 << at), reads[at], False) for at in range(count)))
    there = frozenset(node.name for node in graph.nodes if draw.random() < 0.5)
    found = Neighbourhoods().seconds(graph, there)
    assert found == {node.name: brute_neighbourhood(graph, at, there) for at, node in enumerate(graph.nodes)}


# What is evicted.


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_dtr_evicts_what_costs_the_least(seed: int, share: float) -> None:
    """As it is written here, with lists and without arrays."""
    idle = drawn_idle(seed)
    allowed = int(share * sum(one.nbytes for one in idle))
    there: list[int] = []
    gone: list[int] = []
    for number, one in enumerate(idle):
        while sum(idle[n].nbytes for n in there) + one.nbytes > allowed:
            able = [n for n in there if idle[n].rerun_seconds is not None and idle[n].left <= one.made]
            if not able:
                break

            def cost(n: int, now: float = one.made) -> float:
                layer = idle[n].layer
                own = [k for k in range(len(idle)) if idle[k].layer is layer and k not in gone]
                around = brute_neighbourhood(
                    layer.graph, layer.graph.places[idle[n].name], frozenset(idle[k].name for k in own)
                )
                return around / (idle[n].nbytes * max(now - idle[n].left, INSTANT))

            victim = min(able, key=cost)
            there.remove(victim)
            gone.append(victim)
        there.append(number)
    moves = Dtr(idle, allowed, Neighbourhoods()).play()
    assert [(move.what.layer.name, move.what.name) for move in moves] == [
        (idle[n].layer.name, idle[n].name) for n in gone
    ]
    assert gone and all(move.again for move in moves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_all_that_can_be_kept_is_and_nothing_goes_twice(kind: type[Evicting], seed: int) -> None:
    idle = drawn_idle(seed)
    everything = sum(one.nbytes for one in idle)
    assert not kind(idle, everything, Neighbourhoods()).play()
    for allowed in (0, everything // 3, everything // 2):
        policy = kind(idle, allowed, Neighbourhoods())
        moves = policy.play()
        assert moves and len({(move.what.layer.name, move.what.name) for move in moves}) == len(moves)
        assert policy.held + sum(move.what.nbytes for move in moves) == everything


def test_delta_swaps_over_a_fast_link_and_makes_again_over_a_slow_one() -> None:
    for rate in (1e12, 1e3):
        bench = Bench(asked(TRACE, machine(compute=1e9, h2d=rate, d2h=rate), device=ENOUGH))
        idle = idle_of(bench, layers_of(bench))
        moves = Delta(idle, sum(one.nbytes for one in idle) // 4, Neighbourhoods()).play()
        either = [move.again for move in moves if move.what.movable and move.what.rerun_seconds is not None]
        assert len(either) > 3 and set(either) == {rate == 1e3}
        assert all(move.again is not move.what.movable for move in moves if move.what.rerun_seconds is None)


@pytest.mark.parametrize("policy", ["dtr", "coop", "megtaichi"])
def test_the_others_swap_nothing(policy: str) -> None:
    plan = plan_of(policy, machine(compute=1e9, h2d=1e12, d2h=1e12))
    assert plan.recompute and not moved(plan)


def in_a_row(*nbytes: int, wanted: int) -> list[Idle]:
    """Tensors that are made one after the other and used at once, and long behind them one of ``wanted`` bytes. Each is
    made in ten seconds by an op that reads nothing: those of many bytes are cheap, and all are stale alike."""
    names = [("op", number) for number in range(len(nbytes) + 1)]
    graph = OpGraph(tuple(Node(name, 0, 10.0, (), False) for name in names))
    layer = replace(layers_of(Bench(asked(TRACE, machine(), device=ENOUGH)))[0], graph=graph)
    idle = []
    for name, size in zip(names, (*nbytes, wanted), strict=True):
        item = Item(*name, 10.0, size, size, size, 1.0, 1.0, reruns=True)
        made = 1e9 if name == names[-1] else 1e-3 * name[1]
        idle.append(Idle(layer, name, item, item, made, made, 2e9, (0, 0)))
    return idle


def evicted(policy: Evicting) -> list[int]:
    return [move.what.name[1] for move in policy.play()]


def lying(policy: Coop | MegTaichi, *nbytes: int) -> None:
    """The first of its tensors in their order in memory, one beside the other, and long ago."""
    policy.now = 1e9
    for number, size in enumerate(nbytes):
        assert policy.pool.place(number, size)
        policy.there[number] = True


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_elements_is_in_nobodys_way(kind: type[Evicting]) -> None:
    with np.errstate(all="raise"):
        assert evicted(kind(in_a_row(0, 30, 40, wanted=20), 80, Neighbourhoods())) == [2]


def test_coop_evicts_neighbours_and_dtr_what_is_scattered() -> None:
    """Of 40, 10, 40 and 10 bytes the large ones cost the least: without both of them 80 are free, and no 50 together.
    Without two neighbours there are 50."""
    idle = in_a_row(40, 10, 40, 10, wanted=50)
    assert evicted(Dtr(idle, 100, Neighbourhoods())) == [0, 2]
    coop = Coop(idle, 100, Neighbourhoods())
    lying(coop, 40, 10, 40, 10)
    coop.make_room(4)
    gone = sorted(move.what.name[1] for move in coop.moves)
    assert gone in ([0, 1], [1, 2], [2, 3]) and 4 in coop.pool.holders


def test_coop_places_cheap_and_dear_at_either_end() -> None:
    policy = Coop(in_a_row(40, 10, 40, wanted=10), 200, Neighbourhoods())
    assert not policy.play()
    assert policy.pool.holders == [0, 2, FREE, 3, 1]


def test_megtaichi_counts_free_neighbours() -> None:
    """35 bytes beside ten free ones are more than 40 beside none."""
    idle = in_a_row(35, 40, 35, wanted=20)
    assert evicted(MegTaichi(idle, 120, Neighbourhoods())) == [2]
    assert evicted(Dtr(idle, 120, Neighbourhoods())) == [1]


def test_megtaichi_moves_together_what_is_left_where_that_is_enough() -> None:
    """25 bytes are free in two pieces, and 20 are wanted."""
    policy = MegTaichi(in_a_row(15, 30, 15, wanted=20), 70, Neighbourhoods())
    lying(policy, 15, 30, 15)
    policy.pool.release(0)
    policy.make_room(3)
    assert not policy.moves and policy.pool.holders == [1, 2, 3, FREE]


# Addresses.


@settings(max_examples=60, deadline=None)
@given(data=st.data(), nbytes=st.integers(0, 60))
def test_a_pool_has_each_byte_once_and_free_ones_together(data: st.DataObject, nbytes: int) -> None:
    pool, held = Pool(nbytes), dict[int, int]()
    for holder in range(data.draw(st.integers(0, 12))):
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            pool.release(gone)
            del held[gone]
        want = data.draw(st.integers(1, 20))
        largest = max((size for owner, size in pieces(pool) if owner == FREE), default=0)
        if pool.place(holder, want, high=data.draw(st.booleans())):
            held[holder] = want
        else:
            assert want > largest
        assert {owner: size for owner, size in pieces(pool) if owner != FREE} == held
        assert sum(pool.sizes) == nbytes and pool.free == nbytes - sum(held.values())
        assert all(one != FREE or one != other for one, other in pairwise(pool.holders))
        beside = pool.beside(12).tolist()
        for owner in range(12):
            at = pool.holders.index(owner) if owner in held else -5
            around = [
                size for place, (whose, size) in enumerate(pieces(pool)) if whose == FREE and abs(place - at) == 1
            ]
            assert beside[owner] == sum(around)
    order = [holder for holder in pool.holders if holder != FREE]
    pool.compact()
    assert pool.holders == order + ([FREE] if pool.free else []) and sum(pool.sizes) == nbytes


def pieces(pool: Pool) -> list[tuple[int, int]]:
    return list(zip(pool.holders, pool.sizes, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    given_pieces=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0, 2.5, 4.0, 1e9, inf])), max_size=8),
    wanted=st.integers(1, 30),
)
def test_a_window_is_the_cheapest_of_all(given_pieces: list[tuple[int, float]], wanted: int) -> None:
    """Costs of 0 are those of free bytes."""
    pool = Pool(1)
    pool.holders = [FREE if cost == 0.0 else at for at, (_, cost) in enumerate(given_pieces)]
    pool.sizes = [nbytes for nbytes, _ in given_pieces]
    found = pool.window(wanted, [cost for _, cost in given_pieces])
    costs = [
        sum(cost for _, cost in given_pieces[a:b])
        for a, b in combinations(range(len(given_pieces) + 1), 2)
        if sum(nbytes for nbytes, _ in given_pieces[a:b]) >= wanted
    ]
    if min(costs, default=inf) == inf:
        assert found is None
    else:
        assert found is not None and sum(given_pieces[holder][1] for holder in found) == min(costs)
