"""A plan for a card that leaves what pages of its allocator need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from forebay.errors import DoesNotFit
from forebay.memory import PAGES, Tier
from forebay.planners.bench import Bench
from forebay.planners.nearest import refused
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.planners.refusals import pages_too_small
from forebay.plans import Plan
from forebay.simulation import Played

__all__ = ["with_pages"]

ROUNDS: Final = 3
"""Plans that are made, each with as much more left as the one before has turned out to need."""


def with_pages(bench: Bench, make: Callable[[Problem, Bench], Plan]) -> Plan:
    """The plan that ``make`` makes for the problem of ``bench``, within a budget that is smaller by what pages of the
    allocator need beyond ``PAGES``, which traces recorded for a card count. Raises what ``make`` raises, and
    ``DoesNotFit`` where it makes none but plans that have no room for their pages."""
    problem, trace = bench.problem, bench.problem.trace
    plan = make(problem, bench)
    if trace is None or trace.device != "cuda" or trace.workspace_nbytes < PAGES:
        return plan
    limit, made = problem.limit(Tier.DEVICE), 1
    while True:
        room = limit - plan.device + PAGES
        needed = Played(trace, plan, liveness=bench.liveness).needed(room)
        if needed <= room:
            return plan
        refusal = pages_too_small(bench, plan, needed)
        if (plan.step_seconds or 0.0) >= problem.faster_than:
            raise refusal  # who asks has a plan that is faster; with less this one would hardly become so
        if made == ROUNDS:
            raise refused(bench, refusal, Draft.of(plan))
        less = replace(problem, budget=problem.budget.with_planned_device(limit - (needed - PAGES)))
        try:
            found = make(less, bench.with_limits(less))
        except DoesNotFit as error:
            raise refused(bench, refusal, Draft.of(plan)) from error
        plan, made = replace(found, budget=problem.budget), made + 1
