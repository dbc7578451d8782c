"""``mpress`` and ``ppaware`` on one device: what one stage of a pipeline gives up, and in which order. No torch."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forebay.machine import Machine
from forebay.planners import Bench, make_plan
from forebay.planners.activations.literature.layers import layers_of
from forebay.planners.activations.literature.moments import Idle, Moments, idle_of, under
from forebay.planners.activations.literature.mpress import by_idleness, run_again, with_swapped
from forebay.planners.activations.literature.ppaware import balanced
from forebay.plans import Plan
from tests.null.literature.test_literature_policies import TRACE, UNEVEN, moved, tight
from tests.null.planning import ENOUGH, asked, machine


def idle(on: Machine) -> tuple[list[Idle], Moments]:
    bench = Bench(asked(UNEVEN, on, device=ENOUGH))
    return idle_of(bench, layers_of(bench)), Moments.of(bench)


def made(policy: str, on: Machine, share: float = 0.6) -> Plan:
    return make_plan(asked(TRACE, on, device=tight(share)), policy)


@pytest.mark.parametrize("policy", ["mpress", "ppaware"])
def test_what_hides_is_swapped_and_with_a_slow_link_all_runs_again(policy: str) -> None:
    fast, slow = (made(policy, machine(compute=1e9, h2d=rate, d2h=rate)) for rate in (1e12, 1e3))
    assert moved(fast) and not fast.recompute
    assert slow.recompute and not moved(slow)


def test_mpress_is_no_slower_than_either_of_its_two_assignments() -> None:
    """Swaps of what lies idle for longest where they gain, nothing swapped where they do not."""
    for rate in (1e7, 1e8, 1e9):
        on = machine(compute=1e10, h2d=rate, d2h=rate)
        plan, again = made("mpress", on), made("rotor", on)
        assert (plan.step_seconds or 0.0) <= (again.step_seconds or 0.0) * 1.01


def test_the_longest_idle_come_first_as_far_as_the_link_has_time() -> None:
    tensors, moments = idle(machine(compute=1e9, h2d=1e8, d2h=1e8))
    waiting = by_idleness(tensors)
    assert len(waiting) > 2 and all(a.asked - a.left >= b.asked - b.left for a, b in pairwise(waiting))
    out = [one.kept.out_seconds for one in waiting]
    back = sum(one.kept.back_seconds for one in waiting)
    for count in range(len(waiting) + 1):
        assert under(waiting, sum(out[:count]) + 1e-12, back + 1e-12) == waiting[:count]
    assert under(waiting, sum(out), 0.0) == [] and moments.turn > 0


def test_each_tensor_is_given_up_once_and_the_cheapest_runs_again_first() -> None:
    tensors, _ = idle(machine(compute=1e9, h2d=1e8, d2h=1e8))
    able = [one for one in tensors if one.movable or one.rerun_seconds is not None]
    for moves in (
        with_swapped(tensors, by_idleness(tensors)[:3]),
        with_swapped(tensors, []),
        balanced(tensors, 1e-3, 1e-3),
        balanced(tensors, 0.0, 0.0),
    ):
        names = [(move.what.layer.name, move.what.name) for move in moves]
        assert len(names) == len(set(names)) == len(able)
    prices = [(one.rerun_seconds or 0.0) / one.nbytes for one in run_again(tensors)]
    assert prices == sorted(prices)
    assert not any(move.again for move in with_swapped(tensors, by_idleness(tensors)[:3])[:3])


def test_ppaware_offloads_the_dearest_to_make_again_within_its_share_of_the_link() -> None:
    tensors, moments = idle(machine(compute=1e9, h2d=1e8, d2h=1e8))
    moves = balanced(tensors, moments.turn / 2, moments.starts[-1])
    first = [move.what for move in moves[: next(place for place, move in enumerate(moves) if move.again)]]
    assert first and sum(one.kept.out_seconds for one in first) <= moments.turn / 2
    again = [move.what for move in moves if move.again]
    prices = [_flops(one) for one in again]
    assert prices == sorted(prices)
    able = [one for one in first if one.rerun_seconds is not None]
    assert all(_flops(one) >= max(prices) for one in able)


def _flops(one: Idle) -> float:
    graph = one.layer.graph
    return graph.nodes[graph.places[one.name]].flops / one.nbytes
