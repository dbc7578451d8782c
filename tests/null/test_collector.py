"""The collector's pause: nothing is collected inside, and afterwards the collector is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from forebay.collector import _MANY, collector_paused


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    """What other tests have frozen is thawed meanwhile."""
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


def test_what_was_made_is_old_afterwards() -> None:
    with collector_paused():
        made = [[number] for number in range(2 * _MANY)]
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in old for each in made)
    assert not gc.get_freeze_count()


def test_what_somebody_else_has_frozen_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with collector_paused():
        made = [[number] for number in range(2 * _MANY)]
    assert before and gc.get_freeze_count() == before
    assert len(made) == 2 * _MANY
