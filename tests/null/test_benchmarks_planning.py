"""The benchmark of planning: what it says of a plan, what it refuses. What it measures is not asserted."""

from __future__ import annotations

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.planning import MOST_LAYERS, Planned, compare, planned
from tests.null.planning import chain


def test_a_plan_is_made_and_its_figures_are_kept() -> None:
    one = planned(4, chain(4))
    assert one.layers == 4
    assert one.seconds > 0 and one.cpu_seconds > 0 and one.step_seconds > 0
    assert one.gap >= 0
    assert 0 < one.simulations < one.actions


def test_in_words() -> None:
    said = str(Planned(100, 1.9, 1.85, 5, 78_324, 22.19, 0.074))
    assert said.startswith("100 layers: planned in 1.90 s (1.85 s of the processor), 5 simulations of 78324 actions; ")
    assert said.endswith("22.19 s a step, at most 7.4 % above what any plan takes")


@pytest.mark.parametrize("count", [0, -1, MOST_LAYERS + 1])
def test_how_many_layers_there_may_be(count: int) -> None:
    with pytest.raises(BenchmarkError, match=f"1 to {MOST_LAYERS} layers, got {count}"):
        compare([count], say=print)
