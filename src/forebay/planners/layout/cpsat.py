"""Layouts by OR-Tools' CP-SAT, where that is installed (``pip install 'forebay[cpsat]'``). No torch.

Addresses are integers, lives are given, and no two rectangles overlap: the model that minimalloc's paper compares with
(Moffitt, ASPLOS 2023, section 6). What a solver brings that the searches here do not have is learning from conflicts.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from forebay.planners.cpsat import solver_of
from forebay.planners.layout.placing import Outcome
from forebay.planners.layout.table import Column, Table

__all__ = ["solve"]

SEED = 1
"""Where its pseudo-random numbers begin."""


def solve(table: Table, capacity: int, seconds: float) -> tuple[Outcome, Column]:
    """Addresses for ``table`` within ``capacity`` bytes, after ``seconds`` at most: ``FOUND`` with them, ``NONE`` where
    there are none, ``PAUSED`` where the time was over. On one thread, as all searches here."""
    from ortools.sat.python import cp_model

    # Where addresses need only be multiples of what divides all sizes, no others are needed: the same in small numbers.
    coarse = table.aligned
    steps = np.full(len(table), table.unit) if coarse else table.alignment
    unit = table.unit if coarse else gcd(table.unit, *table.alignment.tolist())
    model = cp_model.CpModel()
    lives, places, addresses = [], [], []
    rows = zip(table.lower.tolist(), table.upper.tolist(), table.size.tolist(), steps.tolist(), strict=True)
    for number, (lower, upper, size, step) in enumerate(rows):
        at = model.new_int_var(0, (capacity - size) // step, f"steps {number}")
        lives.append(model.new_fixed_size_interval_var(lower, upper - lower, f"life {number}"))
        places.append(model.new_fixed_size_interval_var(at * (step // unit), size // unit, f"place {number}"))
        addresses.append(at)
    model.add_no_overlap_2d(lives, places)
    solver = solver_of(SEED)
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = [solver.value(at) for at in addresses]
        return Outcome.FOUND, np.array(found, np.int64) * steps
    return (Outcome.NONE if status == cp_model.INFEASIBLE else Outcome.PAUSED), np.zeros(len(table), np.int64)
