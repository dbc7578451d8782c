"""Branch and bound over linear programmes: what the policies that are integer programmes share.

The relaxations are solved by HiGHS (``scipy.optimize.linprog``). The library's own branch and bound writes to stdout
now and then, and stops by the clock; here nodes are counted, so that the same problem has the same answer, and what is
not proven is said (``Found.gap``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

__all__ = ["SAME", "THRESHOLDS", "Found", "Programme", "affordable", "branch_and_bound"]

WHOLE = 1e-6
"""A value so near to a whole number is one."""

VARIABLES: Final = 3_000
"""Relaxations times variables that one search may take ..."""

LEAST: Final = 20
"""... but so many relaxations in any case."""

THRESHOLDS: Final = (0.5, 0.25, 0.1, 1e-6)
"""From which value on a variable is rounded up, the first with which the programme allows it; Checkmate has only the
first of them."""

SLACK: Final = 1e-6
"""Bytes by which rounding in the solver may be over."""

SAME = 1e-9
"""Share of a value by which another has to be better to be better."""


@dataclass(frozen=True)
class Programme:
    """Least ``target @ x`` with ``upper @ x <= most`` and 0 <= x <= ``highest``, of which the first ``whole`` variables
    are 0 or 1."""

    target: NDArray[Any]
    upper: csr_array
    most: NDArray[Any]
    highest: NDArray[Any]
    whole: int

    def allows(self, x: NDArray[Any]) -> bool:
        """Whether ``x`` is within the limits of every row."""
        return bool((self.upper @ x <= self.most + SLACK).all())


@dataclass(frozen=True)
class Found:
    """``x`` has the value ``value``, and nothing has less than ``bound``."""

    x: NDArray[Any]
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """How much less another might have, as a share of ``value``; 0: proven."""
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0

    def proof(self, what: str) -> str:
        """In words, how near to the optimum it is; ``what`` the value counts."""
        if not self.gap:
            return "the optimum of the integer programme"
        return f"the optimum of the integer programme has at most {self.gap:.1%} fewer seconds {what}"


def affordable(variables: int) -> int:
    """Relaxations that a search over so many variables may take."""
    return max(LEAST, VARIABLES // max(1, variables))


def branch_and_bound(
    programme: Programme, rounded: Callable[[NDArray[Any]], NDArray[Any] | None], nodes: int
) -> Found | None:
    """The best found in at most ``nodes`` relaxations, the lowest bound first; None if there is nothing, or nothing was
    found. ``rounded`` makes whole numbers, within the limits, of a relaxation's solution, or None."""
    if not len(programme.target):
        return Found(programme.target, 0.0, 0.0) if (programme.most >= 0).all() else None
    low, high = np.zeros(len(programme.target)), programme.highest.copy()
    number = count()
    scaled = _scaled(programme)
    first = _relaxed(scaled, low, high)
    if first is None:
        return None
    unit = float(np.abs(programme.target).sum()) or 1.0
    waiting = [(unit * first[0], next(number), first[1], low, high)]
    best: NDArray[Any] | None = None
    value, solved = inf, 1
    while waiting and waiting[0][0] < value * (1 - SAME):
        bound, _, x, low, high = heapq.heappop(waiting)
        whole = x[: programme.whole]
        away = np.abs(whole - np.round(whole))
        candidate = np.r_[np.round(whole), x[programme.whole :]] if away.max(initial=0.0) <= WHOLE else rounded(x)
        if candidate is not None and float(programme.target @ candidate) < value:
            best, value = candidate, float(programme.target @ candidate)
        if away.max(initial=0.0) <= WHOLE:
            continue
        if solved >= nodes:
            heapq.heappush(waiting, (bound, next(number), x, low, high))
            break
        place = int(np.argmax(away))
        for one in (0.0, 1.0):
            ends = low.copy(), high.copy()
            ends[0][place] = ends[1][place] = one
            solved += 1
            found = _relaxed(scaled, *ends)
            if found is not None and unit * found[0] < value:
                heapq.heappush(waiting, (unit * found[0], next(number), found[1], *ends))
    if best is None:
        return None
    return Found(best, value, min([value, *(node[0] for node in waiting)]))


def _scaled(programme: Programme) -> Programme:
    """The same with rows and target of a size with 1, which the tolerances of the solver are for: bytes and seconds are
    twelve orders apart. The value is in units of the sum of the target."""
    largest = abs(programme.upper).max(axis=1).toarray().ravel()
    units = np.maximum(largest, np.where(largest > 0, np.abs(programme.most), 1.0))
    units[units == 0] = 1.0
    upper = csr_array(programme.upper.multiply(1 / units[:, None]))
    target = programme.target / (np.abs(programme.target).sum() or 1.0)
    return Programme(target, upper, programme.most / units, programme.highest, programme.whole)


def _relaxed(programme: Programme, low: NDArray[Any], high: NDArray[Any]) -> tuple[float, NDArray[Any]] | None:
    """Value and solution of the linear programme with x between ``low`` and ``high``; None if there is none."""
    limits = np.c_[low, high]
    found = linprog(programme.target, programme.upper, programme.most, bounds=limits, method="highs")
    return None if found.x is None else (float(found.fun), np.asarray(found.x))
