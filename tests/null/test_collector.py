"""The collector's pause: nothing is collected inside, and afterwards the collector is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import pytest

from forebay.budgets import Budget, DiskBudget
from forebay.collector import _MANY, collector_paused
from forebay.lowering.liveness import Liveness
from forebay.planning import assess
from forebay.trace import Trace
from tests.null.planning import chain, machine


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """What other tests have frozen is thawed meanwhile. A collection looks at all of it."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_nothing_is_collected_inside() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_exception_switches_it_on_again() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_made_is_old_afterwards() -> None:
    with collector_paused():
        made = [[number] for number in range(2 * _MANY)]
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in old for each in made)
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_else_has_frozen_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with collector_paused():
        made = [[number] for number in range(2 * _MANY)]
    assert before and gc.get_freeze_count() == before
    assert len(made) == 2 * _MANY


@cache
def trace() -> Trace:
    return chain(8)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["auto", "offload-all", "capuchin", "zero-infinity"])
@pytest.mark.parametrize("disk", [0, 1 << 40])
@pytest.mark.parametrize(("device", "host"), [(0.7, 10.0), (0.5, 1.0), (0.05, 10.0)])
def test_a_plan_leaves_nothing_to_collect(device: float, host: float, disk: int, policy: str) -> None:
    """A search makes hundreds of programs while nothing is collected: each has to die with its last reader, where there
    is a plan and where there is none."""
    peak = Liveness(trace()).profile().peak
    on = machine(compute=1e9, h2d=4e8, d2h=4e8, disk=1e8)
    budget = Budget(int(device * peak), int(host * peak), None, DiskBudget("/disk", disk) if disk else None)
    assess("warm", trace(), on, budget, policy)
    gc.collect()
    gc.disable()
    try:
        report = assess("chain", trace(), on, budget, policy)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert (report.plan is not None) == (device == 0.7)
