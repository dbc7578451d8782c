"""Plans of a model of many layers, of which there is time to simulate a few drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planning import traced
from forebay.budgets import Budget
from forebay.catalogue import load_machine
from forebay.planners import Bench, Problem, make_plan
from forebay.planners.search import TIE
from forebay.planning import problem_of
from forebay.trace import Trace
from forebay.units import TiB

LAYERS = 80


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(LAYERS)


def asked(trace: Trace, machine: str, share: float) -> Problem:
    on = replace(load_machine(machine), host_capacity=8 * TiB, pinned_capacity=8 * TiB)
    return problem_of(trace, on, Budget(int(share * on.device_capacity)))


@pytest.mark.slow
def test_more_of_the_device_is_no_slower(trace: Trace) -> None:
    """Whatever the search begins with: what runs again is the fastest while updates are in its way, and computes more
    than what moves once they run under backward."""
    less, more = (make_plan(asked(trace, "gh200", share), "auto") for share in (0.4, 0.9))
    assert less.step_seconds is not None and more.step_seconds is not None
    assert more.step_seconds <= less.step_seconds
    for plan in (less, more):
        assert plan.activations and not plan.recompute  # all that is saved moves


def test_auto_is_not_behind_where_updates_bind(trace: Trace) -> None:
    """How many of them run under backward is found last and counts most: 1.4 times as long where drafts are compared
    with none."""
    problem = asked(trace, "a100-40gb", 0.4)
    bench = Bench(problem)
    policies = ("auto", "offload-all")
    auto, other = (make_plan(problem, policy, bench.with_limits(problem)).step_seconds for policy in policies)
    assert bench.is_long and auto is not None and other is not None and auto <= other * (1 + TIE)
