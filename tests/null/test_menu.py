"""The menu of a block beside every choice there is, and the items that it is made from. No torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.lowering.index import TraceIndex
from forebay.memory import Kind
from forebay.model import Model
from forebay.planners.activations.items import INPUT, Item, Items, items_of
from forebay.planners.activations.menu import GRID, MOST, Option, menu, thresholds
from forebay.simulation import Costs
from forebay.states import Masters
from forebay.trace import Phase, Trace, Work
from forebay.treatments import Fate, Treatment
from tests.null.planning import machine
from tests.null.synthetic import block
from tests.null.tracing import TraceBuilder

RATE = 1e8
"""Bytes/s of both directions of the link of ``planning.machine``."""


def item(op: str, seconds: float, nbytes: int, *, moves: bool = True, reruns: bool = True) -> Item:
    """An item whose way out and way back take as long as its bytes at ``RATE``."""
    one_way = nbytes / RATE if moves else 0.0
    moved = nbytes if moves else 0
    return Item(op, 0, seconds, nbytes, moved, nbytes, one_way, one_way, reruns=reruns, named=reruns)


SIZES = st.sampled_from([0, 4096, 8192, 10_000, 1 << 20])


@st.composite
def families(draw: st.DrawFn, most: int = 5) -> Items:
    """A block of a few ops."""

    def some(reruns: bool) -> tuple[Item, ...]:
        return tuple(
            item(
                f"op{i}",
                draw(st.sampled_from([0.0, 1e-5, 1e-4, 3e-4, 2e-3])) if reruns else 0.0,
                nbytes := draw(SIZES),
                moves=bool(nbytes) and draw(st.booleans()),
                reruns=reruns,
            )
            for i in range(draw(st.integers(0, most)))
        )

    again = None
    if draw(st.booleans()):
        arriving = (item(INPUT, 0.0, 65536, moves=draw(st.booleans()), reruns=False),) * draw(st.integers(0, 1))
        again = (*some(True), *arriving)
    return Items(some(False), draw(st.sampled_from([0, 4096])), again, draw(st.sampled_from([0.0, 1e-4])))


def everything(items: Items) -> list[tuple[float, float, float]]:
    """(bytes held, seconds on the link, seconds of compute) of every choice there is."""
    found = []
    for family, held, seconds in ((items.kept, items.kept_held, 0.0), (items.again, 0, items.again_seconds)):
        if family is None:
            continue
        fates = []
        for one in family:
            costs = [(float(one.held), 0.0, 0.0)]
            if one.moved:
                costs.append((0.0, 2 * one.moved / RATE, 0.0))
            if one.reruns:
                costs.append((0.0, 0.0, one.seconds))
            fates.append(costs)
        for choice in product(*fates):
            total = [sum(c[axis] for c in choice) for axis in range(3)]
            found.append((held + total[0], total[1], seconds + total[2]))
    return found


def rounded(points: list[tuple[float, float, float]]) -> set[tuple[float, ...]]:
    return {tuple(round(x, 9) for x in p) for p in points}


@settings(max_examples=80)
@given(families())
def test_the_menu_is_every_choice_that_no_other_beats(items: Items) -> None:
    points = sorted(rounded(everything(items)))
    best = {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}
    assert rounded([option.axes for option in menu(items)]) == best


@settings(max_examples=60)
@given(families(), st.floats(0, 1e-7), st.floats(0, 3))
def test_at_any_prices_a_threshold_is_the_best(items: Items, device: float, link: float) -> None:
    """Seconds that a byte of the device and a second of the link are worth; where everything can move."""
    movable = Items(
        tuple(item(i.op, i.seconds, i.held, reruns=i.reruns) for i in items.kept if i.held),
        0,
        items.again and tuple(item(i.op, i.seconds, i.held, reruns=i.reruns) for i in items.again if i.held),
        items.again_seconds,
    )

    def price(point: tuple[float, float, float]) -> float:
        return point[0] * device + point[1] * link + point[2]

    best = min(price(p) for p in everything(movable))
    assert min(price(o.axes) for o in thresholds(movable)) <= best + 1e-12


def test_of_items_that_are_worth_the_same_all_or_none_are_at_a_vertex() -> None:
    """As the experts of a mixture that runs them one after the other: what lies between is on an edge of the hull."""
    alike = tuple(item(f"expert{i}", 1e-5 * size, 4096 * size) for i, size in enumerate((3, 1, 2) * 100))
    router = item("router", 2e-5, 4096)
    found = thresholds(Items((), 0, (*alike, router), 0.0))
    held = sorted({option.held for option in found if option.recompute and not option.moved})
    assert held == [0, 4096, 4096 * 601]


def test_a_block_of_many_ops_keeps_a_point_a_cell() -> None:
    """Forty ops, of no two equal sizes: 3 ** 40 choices. What is left is undominated and near everything."""
    family = tuple(item(f"op{i}", 1e-5 * (1 + i % 7), 4096 * (i + 3)) for i in range(40))
    items = Items(family, 0, family, 0.0)
    options = menu(items)
    axes = np.array([o.axes for o in options])
    below = (axes[None] <= axes[:, None]).all(axis=2)
    assert not (below & ~np.eye(len(axes), dtype=bool)).any()
    # Two families, each thinned to the cells of the last item's choices at most, and the thresholds of both.
    assert len(options) <= 2 * max(MOST, (GRID + 1) ** 2) + 2 * (2 + len(family))
    everything_again = min(o.held + o.moved for o in options)
    assert everything_again == 0
    assert max(o.seconds for o in options) == sum(i.seconds for i in family)


# From a trace.

WIDE = 65536


def traced() -> Trace:
    """One block: x -> linear a (saved) -> mul b -> linear c (saved) -> mul_ in place on c -> a view of b -> tiny d
    (saved) -> out. The block's input goes after its last op, as do all it makes but its result."""
    model = Model((block("layer", ((16, 16), "float32", True)),))
    b = TraceBuilder(model, {"x": 256})
    v = b.begin("", Phase.FORWARD)
    x = v.make("embed", [b.ids["x"]], WIDE)
    b.end(v)
    v = b.begin("layer", Phase.FORWARD)
    weight = b.ids["layer.0"]
    a = v.make("linear", [x, weight], 2 * WIDE, saved=True)
    product_ = v.make("mul", [a], WIDE)
    c = v.make("linear", [product_], 3 * WIDE, saved=True)
    v.make("mul_", [c], 3 * WIDE, view_of=c)
    v.works[-1] = b.work(Work("mul_", "mul_", "float32", WIDE, WIDE))  # what writes is no view
    view = v.make("view", [product_], WIDE, view_of=product_)
    d = v.make("sum", [view], 64, saved=True)
    v.save()
    out = v.make("out", [d], WIDE)
    v.drop(a, product_, c, d, x)
    b.end(v)
    v = b.begin("layer", Phase.BACKWARD)
    g = v.make("backward", [a, c, d], 64, Kind.GRADIENT)
    v.complete(weight, g)
    v.unsave(a, c, d)
    v.drop(out)
    b.end(v)
    return b.trace()


def layer_items(**more: object) -> Items:
    trace = traced()
    costs = Costs(trace, machine(), Masters.WHOLE)
    forward, named = trace.segments[trace.visits[1].segment], TraceIndex(trace).named(1)
    return items_of(costs, forward, named, recomputes=True, **more)  # type: ignore[arg-type]


def test_what_a_block_may_keep_or_move() -> None:
    """c is written in place, so that nobody may name its op; d is too small to move."""
    kept = {(i.op, i.occurrence): (i.held, i.moved) for i in layer_items().kept}
    assert kept == {("linear", 0): (2 * WIDE, 2 * WIDE), ("sum", 0): (64, 0)}
    assert layer_items().kept_held == 3 * WIDE


def test_what_an_op_in_place_returns_is_held_once() -> None:
    """As it is captured from a model: what mul_ returns is c, the same tensor."""
    trace = traced()
    forward, named = trace.segments[trace.visits[1].segment], TraceIndex(trace).named(1)
    c = forward.ops[2].outputs
    ops = (*forward.ops[:3], replace(forward.ops[3], outputs=c), *forward.ops[4:])
    items = items_of(Costs(trace, machine(), Masters.WHOLE), replace(forward, ops=ops), named, recomputes=True)
    assert items.kept_held == 3 * WIDE


def test_what_a_block_may_run_again() -> None:
    again = layer_items(arriving=WIDE, arriving_moves=True).again
    assert again is not None
    found = {(i.op, i.occurrence): (i.held, i.moved, i.reruns) for i in again}
    assert found == {
        ("linear", 0): (2 * WIDE, 2 * WIDE, True),
        ("mul", 0): (WIDE, WIDE, True),
        ("sum", 0): (64, 0, True),
        (INPUT, 0): (WIDE, WIDE, False),
    }


def test_running_a_block_again_costs_the_ops_before_its_last_save() -> None:
    """The second linear and the view run again whatever is named; "out" comes after the last save."""
    trace = traced()
    costs = Costs(trace, machine(), Masters.WHOLE)
    seconds = [costs.work(op.work).seconds for op in trace.segments[trace.visits[1].segment].ops]
    items = layer_items()
    whole = next(o for o in thresholds(items) if o.recompute and not o.treatments)
    assert whole.seconds == sum(seconds[:6]) and whole.held == 0
    assert whole.workspace == (2 + 3) * WIDE + 64
    named = [o for o in menu(items) if o.recompute and o.treatments == (Treatment("sum", 0, Fate.KEEP),)]
    assert [o.held for o in named] == [64]
    assert abs(named[0].seconds - sum(seconds[:5])) < 1e-15


def test_an_option_that_keeps_everything_names_nothing() -> None:
    option: Option = thresholds(layer_items())[0]
    assert (option.recompute, option.treatments, option.held, option.moved) == (False, (), 5 * WIDE + 64, 0)


def test_a_small_tensor_stays_when_everything_else_moves() -> None:
    option = thresholds(layer_items())[1]
    assert option.treatments == (Treatment("linear", 0, Fate.OFFLOAD),)
    assert (option.held, option.moved) == (3 * WIDE + 64, 2 * WIDE)
    assert option.out_seconds == option.back_seconds == 2 * WIDE / RATE


@pytest.mark.parametrize("bits", [0, 4])
def test_whatever_leaves_is_handed_over_on_its_way_out_and_back(bits: int) -> None:
    """Codes too. Each op here makes one tensor."""
    trace, each = traced(), 1e-3
    forward, named = trace.segments[trace.visits[1].segment], TraceIndex(trace).named(1)
    slow, free = (
        thresholds(items_of(Costs(trace, host, Masters.WHOLE), forward, named, recomputes=True, bits=bits))
        for host in (replace(machine(), device_kind="cpu", handover_seconds=seconds) for seconds in (each, 0.0))
    )
    assert [one.treatments for one in slow] == [one.treatments for one in free]
    leaving = [[t for t in one.treatments if t.fate is Fate.OFFLOAD] for one in slow]
    assert any(t.bits == bits for one in leaving for t in one)
    for one, other, left in zip(slow, free, leaving, strict=True):
        assert one.seconds - other.seconds == pytest.approx(2 * each * len(left))
