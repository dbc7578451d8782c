"""Blocks that a step runs several times: what may be done with all their runs, and plans that do it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planners.activations.coding import Coded
from forebay.planners.activations.items import INPUT, Item, Items, together
from forebay.simulation import simulate
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

SAVED = 3 * (65536,)
RUNS = 6
WIDE = ((64, 64), "float32", True)
CODES = Coded(4, 30, 20, 1.0, 2.0, 3.0, 4.0, 0.5)


def item(op: str, held: int = 100, *, moves: bool = True, reruns: bool = False, codes: Coded | None = None) -> Item:
    seconds, moved, link = 0.25 * reruns, held * moves, 0.5 * moves
    return Item(op, 0, seconds, held, moved, held, link, 2 * link, reruns, reruns, codes, link)


def shared(runs: int = RUNS) -> Trace:
    """Two layers, of which the first runs ``runs`` times, one behind the other."""
    layers = [Layer("shared", saved=SAVED, out=65536)] * runs
    return chain_trace([block("shared", WIDE), block("last", WIDE)], [*layers, Layer("last", saved=SAVED)])


def test_what_two_runs_make_is_added_up() -> None:
    """But for what is there for backward, which goes through one of them at a time."""
    one = Items((item("mm", codes=CODES),), 7, (item("mm", reruns=True),), 0.5, 0.125, 0.25)
    two = together([one, one])
    assert together([one]) is one
    assert two.kept == (Item("mm", 0, 0.0, 200, 200, 100, 1.0, 2.0, codes=CODES.beside(CODES), handover_seconds=1.0),)
    assert two.kept[0].codes == Coded(4, 60, 40, 2.0, 4.0, 6.0, 8.0, 1.0)
    assert two.again == (replace(two.kept[0], seconds=0.5, reruns=True, named=True, codes=None),)
    assert (two.kept_held, two.again_seconds, two.treat_seconds, two.treat_again_seconds) == (14, 1.0, 0.25, 0.5)


def test_what_one_run_cannot_move_no_run_moves() -> None:
    """A plan says the same of all runs: of one that saves nothing there, or that has no such op."""
    still, moving = item("mm", moves=False), item("mm", codes=CODES)
    (mixed,) = together([Items((moving,)), Items((still,))]).kept
    assert (mixed.held, mixed.moved, mixed.link_seconds, mixed.codes) == (200, 0, 0.0, None)
    (alone,) = together([Items((moving,)), Items(())]).kept
    assert (alone.held, alone.moved, alone.link_seconds, alone.codes) == (100, 0, 0.0, None)


def test_what_only_one_run_has_runs_again_in_any_case() -> None:
    """No plan names it; of what comes in there is one item for all runs."""
    common, own, given = (item(op, reruns=True) for op in ("mm", "add", INPUT))
    both = together([Items((), again=(common, own, given), again_seconds=0.5), Items((), again=(common,))])
    assert both.again == (common.beside(common), given)
    assert both.again_seconds == 0.5 + own.seconds


def test_a_run_that_saves_nothing_has_nothing_that_runs_again() -> None:
    again, never = Items((), again=(item("mm", reruns=True),)), Items((item("add"),))
    both = together([again, never])
    assert both.again == () and both.again_seconds == 0.25
    assert both.kept == (item("add", moves=False),)
    assert together([never, never]).again is None


def test_all_runs_are_kept_or_none() -> None:
    """A menu holds what ``RUNS`` runs hold: what they save, and their results, which the next ones save."""
    once, often = (Bench(asked(shared(runs), machine(), device=ENOUGH)).chain for runs in (1, RUNS))
    assert once is not None and often is not None
    (one,), (all_,) = ([g for g in made.groups if g.blocks == ("shared",)] for made in (once, often))
    assert all_.items.held == RUNS * one.items.held == RUNS * (sum(SAVED) + 65536)


@pytest.mark.parametrize(
    ("policy", "on"), [("recompute", machine()), ("auto", machine(h2d=1e7, d2h=1e7)), ("auto", machine(compute=1e6))]
)
def test_within_half_of_what_all_runs_keep(policy: str, on: Machine) -> None:
    """Recomputed where the link is slow, moved where compute is."""
    trace = shared()
    plain = make_plan(asked(trace, on, device=ENOUGH), "keep")
    plan = make_plan(asked(trace, on, device=plain.device // 2), policy)
    check(trace, on, plan)
    assert "shared" in plan.recompute or any("shared" in s.blocks for s in plan.activations)
    assert simulate(trace, on, plan).peaks[Tier.DEVICE] <= plan.device <= plain.device // 2


def test_the_least_has_one_run_and_the_inputs_of_the_others() -> None:
    """What each run is given, and all that one run and the gradient of what it makes take."""
    with pytest.raises(DoesNotFit) as refused:
        make_plan(asked(shared(), machine(h2d=1e7, d2h=1e7), device=1), "stream-recompute")
    with pytest.raises(DoesNotFit) as more:
        make_plan(asked(shared(RUNS + 4), machine(h2d=1e7, d2h=1e7), device=1), "stream-recompute")
    assert more.value.needed - refused.value.needed == 4 * 65536 < 4 * sum(SAVED)
