"""``tsplit``: what it takes first, what it takes in part, and what it does where the link is slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forebay.checking import check
from forebay.planners import Bench, make_plan
from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.moments import Idle
from forebay.planners.activations.literature.tsplit import PARTS, Bottlenecks, share
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.states import Masters
from forebay.treatments import Split
from tests.null.literature.graphs import layers_in
from tests.null.literature.test_literature_policies import TRACE, made, moved, tight
from tests.null.planning import asked, chain, machine

TURN, OPS = 100.0, 20
LAYER = layers_in(chain(1))[0]
COSTS = Costs(chain(1), replace(machine(), device_bandwidth=1e3), Masters.WHOLE)
"""A thousand bytes a second on the device, so that what stays of a tensor costs a little."""


def lying(*tensors: tuple[int, float, float, float | None], first: int = 0) -> Bottlenecks:
    """Tensors by bytes, seconds of their last use in forward and of the first in backward, and those to make them again
    (None: that cannot be): a byte a second on the link. All lie idle from op ``first`` on to the end."""
    able = []
    for place, (nbytes, left, back, again) in enumerate(tensors):
        item = Item(f"op{place}", 0, again or 0.0, nbytes, nbytes, nbytes, nbytes, nbytes, reruns=again is not None)
        able.append(Idle(LAYER, (item.op, 0), item, item, 0.0, left, back, (first, OPS)))
    return Bottlenecks(able, (TURN, TURN), COSTS, np.zeros(OPS))


def said(bottlenecks: Bottlenecks) -> list[tuple[str, str]]:
    return [(m.what.name[0], "again" if m.again else str(m.split or "all")) for m in bottlenecks.all_moves()]


def test_what_hides_comes_first_and_of_that_what_has_the_most_time() -> None:
    some = lying((40, 90, 120, 1.0), (20, 50, 150, 1.0), (20, 10, 190, 1.0))
    assert said(some)[:2] == [("op2", "all"), ("op1", "all")]


def test_as_much_moves_as_hides_and_the_rest_when_there_is_no_other_way() -> None:
    """Half of 40 bytes goes and comes back in 40 seconds, and nothing can make it again: then part after part."""
    parts = ["1 of 2 parts", "5 of 8 parts", "3 of 4 parts", "7 of 8 parts", "all"]
    assert said(lying((40, 80, 120, None))) == [("op0", words) for words in parts]


def test_what_is_cheap_to_make_again_is_not_cut() -> None:
    assert said(lying((40, 80, 120, 1e-6))) == [("op0", "again")]


def test_the_link_is_shared() -> None:
    """Both would hide by themselves. The link has 100 seconds in each direction, and 20 are left for the second one."""
    first, second = said(lying((80, 0, 200, None), (80, 1, 199, None)))[:2]
    assert first == ("op0", "all") and second == ("op1", "1 of 4 parts")


def test_what_is_over_before_the_bottleneck_is_left_alone_until_it_counts() -> None:
    """Of two tensors the one that is idle where the most is needed goes first, though the other has more time."""
    item = Item("late", 0, 0.0, 8, 8, 8, 8.0, 8.0)
    idle = [Idle(LAYER, ("early", 0), replace(item, op="early"), None, 0.0, 0.0, 200.0, (0, 5))]
    idle.append(Idle(LAYER, ("late", 0), item, None, 0.0, 50.0, 150.0, (8, OPS)))
    need = np.zeros(OPS)
    need[3], need[10] = 10.0, 12.0
    assert said(Bottlenecks(idle, (TURN, TURN), COSTS, need)) == [("late", "all"), ("early", "all")]


@pytest.mark.parametrize(("parts", "expected"), [(1, Split(1, 8)), (2, Split(1, 4)), (6, Split(3, 4)), (PARTS, None)])
def test_shares_are_in_lowest_terms(parts: int, expected: Split | None) -> None:
    assert share(parts) == expected


def splits(plan: Plan) -> list[Split]:
    return [t.split for s in plan.activations for t in s.treatments if t.split is not None for _ in s.blocks]


def test_a_plan_has_parts_where_they_hide() -> None:
    """A link on which a part of a tensor passes between its uses, and copies on the device that cost next to
    nothing."""
    on = replace(machine(compute=1e9, h2d=1e8, d2h=1e8), device_bandwidth=1e15)
    plan = made("tsplit", tight(0.8), on=on)
    assert splits(plan) and moved(plan)
    check(TRACE, on, plan)
    assert any(" of them in part" in reason for reason in plan.reasons)


def test_a_link_that_is_trusted_less_gains_where_little_may_be_under_way() -> None:
    """All copies of the first order hide between the uses of their tensors, and wait for each other all the same."""
    on = machine(compute=1e9, h2d=1e8, d2h=1e8)
    bench = Bench(asked(TRACE, on, device=tight(0.5)))
    plan = make_plan(bench.problem, "tsplit", bench)
    (first,) = (said for said in plan.reasons if "tensors are swapped" in said)
    assert bench.simulated > 1 and plan.recompute and not first.startswith("0 tensors")


def test_tensors_that_are_alike_are_looked_at_through_one_of_them() -> None:
    """The same moves as with each by itself, as a little more time to make each again has it."""
    alike = [(40, 10.0 * place, 200.0 - 7 * place, 30.0) for place in range(9)]
    apart = [(size, left, back, again + place * 1e-9) for place, (size, left, back, again) in enumerate(alike)]
    assert said(lying(*alike)) == said(lying(*apart))


def test_the_plan_is_the_same_each_time() -> None:
    on = machine(compute=1e10, h2d=1e8, d2h=1e8)
    plans = [make_plan(asked(TRACE, on, device=tight(0.5)), "tsplit") for _ in range(2)]
    assert plans[0] == plans[1]
