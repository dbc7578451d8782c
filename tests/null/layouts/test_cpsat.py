"""CP-SAT as a fallback: what it finds is a layout, what it refutes has none, and without it everything works."""

from __future__ import annotations

import sys
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout.instances import Kind, instance
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.planners.layout import lay_out
from forebay.planners.layout.aim import Aim, Found
from forebay.planners.layout.cpsat import solve
from forebay.planners.layout.placing import Outcome
from forebay.planners.layout.table import Column, Table
from tests.null.layouts.making import buffer_tuples, least_height

pytest.importorskip("ortools")


@settings(max_examples=8, deadline=None)
@given(buffers=buffer_tuples(5, alignments=(1, 1, 4)), more=st.integers(-1, 2))
def test_it_finds_the_least_height_and_nothing_below(buffers: tuple[Buffer, ...], more: int) -> None:
    table = Table.of(buffers)
    if not len(table):
        return
    rows = tuple(buffers[number] for number in table.number)
    least = least_height(rows)
    capacity = max(least + more, int(table.size.max()))
    outcome, offsets = solve(table, capacity, 60)
    assert outcome is (Outcome.FOUND if capacity >= least else Outcome.NONE)
    if outcome is Outcome.FOUND:
        found = Addresses(BufferSet(rows, capacity), tuple(offsets.tolist()), "", False, 0.0)
        check_addresses(found)
        assert found.feasible


class Nothing:
    """Searches that find nothing."""

    def __init__(self, table: Table, aim: Aim, best: Found, improvers: object) -> None:
        self.best = best

    def advance(self, aim: Aim) -> Found:
        return self.best


def test_what_the_searches_do_not_find_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("forebay.planners.layout.arena"), "Turns", Nothing)
    given = instance(0, Kind(count=100))
    found = lay_out(given, seconds=60)
    check_addresses(found)
    assert found.feasible and found.found_by == "arena: CP-SAT"


def test_it_is_asked_again_for_longer_between_other_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def solve_in_the_end(table: Table, capacity: int, seconds: float) -> tuple[Outcome, Column]:
        asked.append((capacity, seconds))
        return (Outcome.NONE if len(asked) == 3 else Outcome.PAUSED), np.zeros(len(table), np.int64)

    module = import_module("forebay.planners.layout.arena")
    for name, value in (
        ("cpsat_is_there", lambda: True),
        ("solve", solve_in_the_end),
        ("ALONE", 0.125),
        ("Turns", Nothing),
    ):
        monkeypatch.setattr(module, name, value)
    given = instance(0, Kind(count=160))
    found = lay_out(given, seconds=60)
    check_addresses(found)
    assert [seconds for _, seconds in asked] == [0.25, 0.5, 1.0]
    assert given.capacity is not None
    # What is live in all sections has the bottom, and the rest what is above it.
    (room,) = {capacity for capacity, _ in asked}
    assert 0.9 * given.capacity < room < given.capacity
    assert "CP-SAT" not in found.found_by and (found.feasible, found.proven) == (False, True)


def test_it_is_not_asked_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that importing it fails, and none of it can be found.
    for name in [name for name in sys.modules if name.split(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    given = instance(0, Kind(count=160))
    found = lay_out(given, seconds=0.3)
    check_addresses(found)
    assert "CP-SAT" not in found.found_by and not found.proven
