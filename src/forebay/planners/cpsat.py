"""OR-Tools' CP-SAT, where that is installed; nothing of it is loaded before a solver is asked for. No torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

__all__ = ["INSTALL", "PACKAGE", "cpsat_is_there", "solver_of"]

PACKAGE: Final = "ortools"

INSTALL: Final = "pip install 'forebay[cpsat]'"


def cpsat_is_there() -> bool:
    """Whether OR-Tools is installed."""
    return find_spec(PACKAGE) is not None


def solver_of(seed: int) -> CpSolver:
    """A solver on one thread, as all searches here, whose pseudo-random numbers begin with ``seed``: the same problem
    has the same answer, after as much work."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    return solver
