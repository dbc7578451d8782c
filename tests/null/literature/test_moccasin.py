"""``moccasin``: what it says without its solver, and what is proven when its search ends early."""

from __future__ import annotations

from importlib import import_module
from random import Random

import pytest

from forebay.errors import CannotServe
from forebay.planners import make_plan
from forebay.planners.activations.literature.moccasin import solved
from tests.null.literature.graphs import ON, drawn, graph_trace, layers_in
from tests.null.planning import ENOUGH, asked, chain

MODULE = "forebay.planners.activations.literature.moccasin"


def test_without_its_solver_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module(MODULE), "cpsat_is_there", lambda: False)
    with pytest.raises(CannotServe, match=r"pip install 'forebay\[cpsat\]'.*policy checkmate") as refused:
        make_plan(asked(chain(3), ON, device=ENOUGH), "moccasin")
    assert "\n" not in str(refused.value) and "ortools" in str(refused.value)


def test_a_search_that_ends_early_has_an_answer_and_says_how_good_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_in(graph_trace(drawn(Random(1), 12, 12)))
    allowed = round(0.5 * sum(layer.items.held for layer in layers))
    best = solved(layers, allowed, 100)
    monkeypatch.setattr(import_module(MODULE), "PORTION", 0.002)
    early = solved(layers, allowed, 1)
    assert best is not None and best.gap == 0.0 and best.proof("made again") == "the optimum of the integer programme"
    assert early is not None and early.bound <= best.value <= early.value
    assert early.gap > 0 and "fewer seconds made again" in early.proof("made again")
    again = solved(layers, allowed, 1)
    assert again is not None and (again.x == early.x).all() and again.bound == early.bound


def test_a_search_without_time_says_what_whole_blocks_can(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_in(graph_trace(drawn(Random(1), 12, 12)))
    monkeypatch.setattr(import_module(MODULE), "PORTION", 0.0)
    found = solved(layers, round(0.6 * sum(layer.items.held for layer in layers)), 1)
    assert found is not None and found.gap == 1.0 and 0 < found.x.sum() < len(found.x)
    places = iter(found.x)
    for layer in layers:
        own = {next(places) for _ in range(1 + sum(item.reruns for item in layer.items.again or ()))}
        assert len(own) == 1


def test_less_room_than_nothing_is_no_room() -> None:
    layers = layers_in(graph_trace(drawn(Random(2), 2, 2)))
    assert solved(layers, -1, 10) is None and solved(layers, 0, 10) is None
