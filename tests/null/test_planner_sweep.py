"""Over several budgets more of the device is never slower, to the last digit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.budgets import Budget
from forebay.cli.compare import compare_policies
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planners.sweep import no_slower
from tests.null.planning import asked, chain, machine

SECONDS = st.one_of(st.none(), st.floats(0.1, 10.0))


@given(st.lists(st.tuples(st.integers(1, 1 << 40), SECONDS), max_size=12))
def test_the_curve_never_rises(answers: list[tuple[int, float | None]]) -> None:
    devices, seconds = [device for device, _ in answers], [taking for _, taking in answers]
    taken = no_slower(devices, seconds)
    assert len(taken) == len(answers)
    for place, own in zip(taken, range(len(answers)), strict=True):
        # What is taken fits, and of all that fit it is the fastest; its own answer where that is one of them.
        fitting = [s for d, s in answers if d <= devices[own] and s is not None]
        assert devices[place] <= devices[own]
        assert seconds[place] == min(fitting, default=None)
        assert place == own or seconds[own] is None or seconds[place] < seconds[own]  # type: ignore[operator]


def test_as_many_seconds_as_budgets() -> None:
    with pytest.raises(ValueError, match="zip"):
        no_slower([1, 2], [1.0])


PARTS = (0.9, 0.5, 0.8)
"""Shares of what the activations take, not in order."""


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_comparison_is_monotonic_where_single_plans_are_not(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With time for a few drafts a search misses within more memory what it has found within less."""
    import forebay.planners.bench as workbench

    for name, value in {"ACTIONS": 200, "SIMULATIONS": 8, "SIMULATIONS_LEAST": 2}.items():
        monkeypatch.setattr(workbench, name, value)
    trace = chain(5, saved=3, activation=1 << 17)
    on = machine(compute=4e8, h2d=4e8, d2h=4e8, update=2e8)
    live = Bench(asked(trace, on, device=1 << 50)).liveness
    assert live is not None
    budgets = [Budget(round(part * micro_batches * live.profile().peak)) for part in PARTS]
    rows = compare_policies(trace, on, budgets, ["auto"], micro_batches)
    assert [row.budget for row in rows] == [budget.device for budget in budgets]
    assert all(row.peaks[Tier.DEVICE] <= row.budget for row in rows)
    most, least, middle = (row.step_seconds or 0.0 for row in rows)
    assert 0 < most <= middle <= least
    if micro_batches == 1:
        alone = make_plan(asked(trace, on, device=budgets[0].device), "auto").step_seconds
        assert alone is not None and most < alone
