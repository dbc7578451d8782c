"""Plans of a model of many layers, of which there is time to simulate a few drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planning import traced
from forebay.budgets import Budget
from forebay.catalogue import load_machine
from forebay.planners import make_plan
from forebay.planning import problem_of
from forebay.plans import Plan
from forebay.trace import Trace
from forebay.units import TiB

LAYERS = 80


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(LAYERS)


def planned(trace: Trace, share: float) -> Plan:
    on = replace(load_machine("gh200"), host_capacity=8 * TiB, pinned_capacity=8 * TiB)
    return make_plan(problem_of(trace, on, Budget(int(share * on.device_capacity))), "auto")


def test_more_of_the_device_is_no_slower(trace: Trace) -> None:
    """Whatever the search begins with: what runs again is the fastest while updates are in its way, and computes more
    than what moves once they run under backward; and the next forward waits for no update of the blocks that stay."""
    less, more = planned(trace, 0.4), planned(trace, 0.9)
    assert less.step_seconds is not None and more.step_seconds is not None
    assert more.step_seconds <= less.step_seconds
    for plan in (less, more):
        assert plan.activations and not plan.recompute  # all that is saved moves
        stay = [place for place, p in enumerate(plan.placements) if p.resident]
        assert len(stay) > 4 and max(stay) < LAYERS // 2
