"""Planners: each answers, in its own way, where every tensor is between its uses.

A planner is a function from a ``Problem`` to a ``Plan``; it imports no torch and nothing of the runtime. To change
how forebay decides, write one and name it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forebay.errors import ConfigError
from forebay.planners.auto import auto, stream
from forebay.planners.problem import Problem
from forebay.plans import Plan

__all__ = ["PLANNERS", "Problem", "make_plan"]

PLANNERS: Mapping[str, Callable[[Problem], Plan]] = MappingProxyType({"auto": auto, "stream": stream})


def make_plan(problem: Problem, policy: str) -> Plan:
    """The plan of the planner called ``policy``.

    Raises ``ConfigError`` for an unknown name and ``DoesNotFit`` when the budget cannot be met.
    """
    planner = PLANNERS.get(policy)
    if planner is None:
        raise ConfigError(f"unknown policy {policy!r}; there are {', '.join(sorted(PLANNERS))}")
    return planner(problem)
