"""Orders of ops: allowed, never above program order, as low as any where that can be known, and their bounds true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from forebay.checking.orders import check_order
from forebay.errors import ConfigError, PlanInvalid
from forebay.op_graph import GraphOp, GraphTensor, OpGraph, Ordered
from forebay.planners.layout.aim import Deadline
from forebay.planners.ordering import order_ops
from forebay.planners.ordering.cuts import LARGEST, least_before
from forebay.planners.ordering.parts import Part, cut_at, parts_of
from forebay.planners.ordering.refine import refined
from forebay.planners.ordering.search import searched
from tests.null.ordering.making import graphs, least_peak, live_while, step

ENOUGH = Deadline(1e6)


def whole(graph: OpGraph) -> Part:
    """A graph that is not cut."""
    return cut_at(graph, (0, len(graph.ops)))[0]


@settings(max_examples=60)
@given(graphs())
def test_no_order_is_better(graph: OpGraph) -> None:
    found = order_ops(graph)
    check_order(found)
    assert found.peak == found.lower_bound == least_peak(graph) <= found.program_peak
    program = order_ops(graph, "program")
    check_order(program)
    assert program.order == tuple(range(len(graph.ops)))
    assert program.lower_bound <= found.peak <= program.peak == found.program_peak


@settings(max_examples=60)
@given(graphs())
def test_cuts_alone_are_allowed_and_their_bound_is_true(graph: OpGraph) -> None:
    part = whole(graph)
    answer = refined(part, 0, ENOUGH, few=0)
    found = Ordered(graph, answer.order, answer.lower_bound, "cuts", 0.0)
    check_order(found)
    assert answer.lower_bound <= least_peak(graph) <= found.peak <= found.program_peak
    stopped = refined(part, 0, Deadline(0.0), few=0)
    check_order(Ordered(graph, stopped.order, stopped.lower_bound, "none", 0.0))
    assert max(part.levels(stopped.order)) <= part.peak


@settings(max_examples=60)
@given(graphs(6))
def test_the_fewest_bytes_while_an_op_runs(graph: OpGraph) -> None:
    part = whole(graph)
    for op in range(len(graph.ops)):
        before, nbytes = least_before(part, op)
        order = (*sorted(before), op, *sorted(set(range(len(graph.ops))) - before - {op}))
        check_order(Ordered(graph, order, 0, "", 0.0))
        assert part.levels(order)[len(before)] == nbytes == live_while(graph, op)


def test_a_bound_in_units_is_below() -> None:
    graph = OpGraph(tuple(map(GraphOp, "abc")), tuple(GraphTensor(LARGEST * 4 + 3, op, (2,)) for op in range(2)))
    _, nbytes = least_before(whole(graph), 2)
    assert 0 < 2 * (LARGEST * 4 + 3) - nbytes < 64


@settings(max_examples=60)
@given(graphs())
def test_parts_are_the_graph(graph: OpGraph) -> None:
    levels = whole(graph).levels(range(len(graph.ops)))
    buffers = graph.buffers(tuple(range(len(graph.ops))))
    assert levels == [sum(b.size for b in buffers if b.lower <= at < b.upper) for at in range(len(graph.ops))]
    parts = parts_of(graph)
    assert [op for part in parts for op in part.ops] == list(range(len(graph.ops)))
    assert [level for part in parts for level in part.levels(range(len(part.ops)))] == levels
    assert all(part.floor <= least_peak(graph) for part in parts)


@settings(max_examples=60)
@given(graphs())
def test_a_search_that_gives_up_says_what_it_knows(graph: OpGraph) -> None:
    part = whole(graph)
    for states in (1, 3):
        found = searched(part, 0, ENOUGH, states)
        assert found.bound <= least_peak(graph)
        assert found.order is None or max(part.levels(found.order)) == found.bound


@pytest.mark.parametrize("layers", [2, 30])
def test_updates_run_as_soon_as_their_gradients_are_there(layers: int) -> None:
    """In program order all gradients wait; where they do not, the peak is one of them beside what forward keeps."""
    graph = step(layers, activation=100, gradient=90)
    found = order_ops(graph)
    check_order(found)
    assert found.program_peak > found.peak == 100 * layers + 90
    assert 100 * layers <= found.lower_bound <= found.peak
    assert found.solve_seconds < 9, "it ends by itself"
    place = {op: at for at, op in enumerate(found.order)}
    waits = [place[3 * layers + layer] - place[3 * layers - 2 * layer - 2] for layer in range(layers)]
    assert waits == [1] * layers


def test_a_large_tensor_waits_until_it_is_needed() -> None:
    """What a cut puts off: it is made first in the program and read last."""
    rest = 60
    ops = tuple(GraphOp(f"op{n}") for n in range(rest + 2))
    chain = [GraphTensor(100 if n % 2 else 10, n, (n + 1,)) for n in range(1, rest + 1)]
    graph = OpGraph(ops, (GraphTensor(1000, 0, (rest + 1,)), *chain))
    found = order_ops(graph)
    check_order(found)
    assert (found.program_peak, found.peak, found.lower_bound) == (1110, 1010, 1010)
    assert found.order[-2:] == (0, rest + 1)


def test_orders_that_are_none() -> None:
    graph = step(2)
    good = order_ops(graph)
    for order, words in (
        (good.order[:-1], "each of them once"),
        ((good.order[1], good.order[0], *good.order[2:]), "has to come behind"),
        ((*good.order[:-1], good.order[0]), "each of them once"),
    ):
        with pytest.raises(PlanInvalid, match=words):
            check_order(replace(good, order=order))
    with pytest.raises(PlanInvalid, match="is above"):
        check_order(replace(good, lower_bound=good.peak + 1))
    behind = OpGraph((GraphOp("a"), GraphOp("b", (0,))), ())
    with pytest.raises(PlanInvalid, match=r"op 1 \(b\) runs before op 0 \(a\)"):
        check_order(Ordered(behind, (1, 0), 0, "", 0.0))


def test_what_cannot_be_used() -> None:
    for make, words in (
        (lambda: order_ops(step(1), "best"), "no order 'best'; orders are program, roam"),
        (lambda: order_ops(step(1), seconds=0), "more than 0"),
        (lambda: OpGraph((GraphOp("a", (0,)),), ()), "comes behind op 0"),
        (lambda: OpGraph((GraphOp("a"),), (GraphTensor(1, 1),)), "its maker is op 1"),
        (lambda: OpGraph((GraphOp("a"),), (GraphTensor(1, 0, (0,)),)), "op 0 reads what op 0 makes"),
        (lambda: OpGraph((GraphOp("a"),), (GraphTensor(-1, 0),)), "got -1"),
        (lambda: OpGraph((), (), 2), "schema 2"),
        (lambda: OpGraph.from_json("{}"), "ops"),
        (lambda: OpGraph.from_json('{"ops": [], "tensors": [], "schema": 9}'), "schema 9"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    assert OpGraph.from_json(step(3).to_json()) == step(3)
    assert order_ops(OpGraph((), ())).peak == 0
