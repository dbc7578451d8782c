"""``moccasin``: which ops run again, by constraint programming over the intervals in which results are held.

Bartan, Li, Teague, Lott and Dilkina, "Moccasin: efficient tensor rematerialization for neural networks", ICML 2023. The
order of ops is fixed, and each may come back into it C - 1 times. Every result has at most C retention intervals
``[start, end]``, each of which begins with its computation; a reader lies in an interval of each of its inputs; the
intervals that cover an instant take no more bytes than there are (a cumulative constraint); the least seconds of
computation are looked for. O(C n) integers, where Checkmate has O(n^2) binaries; C = 2 is enough as a rule. CP-SAT
solves it.

Ours departs in three things. Of the two intervals of a result a plan can say three pairs: one from its forward to its
block's backward; none, as nobody saves it; or a second one in its block's backward, with the computation that this
begins. So their ends are fixed, what is left to decide are the booleans of ``checkmate``, and the cumulative constraint
is a row for each instant, from which the solver learns more: 0.01 s where it took minutes with intervals (12 blocks of
up to 12 ops). An instant is the begin of a block's backward; what is there beside is the bench's to say. And the search
ends by the solver's count of its own work, on one thread and from one seed, so that the same problem has the same plan;
how far from the optimum it may be is said.

CP-SAT is part of OR-tools, which forebay does not install by itself: ``pip install 'forebay[cpsat]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from forebay.planners.activations.literature.branching import Found, Programme
from forebay.planners.activations.literature.chained import step_of
from forebay.planners.activations.literature.chaining import Link, best_chain
from forebay.planners.activations.literature.checkmate import choice_of, programme_of, rerun
from forebay.planners.activations.literature.layers import Choice, Layer, every_again, reruns
from forebay.planners.activations.literature.placing import Answer, Room, placed, searched
from forebay.planners.activations.literature.rotor import whole_blocks
from forebay.planners.bench import Bench
from forebay.planners.cpsat import INSTALL, PACKAGE, cpsat_is_there, solver_of
from forebay.planners.parts import KEPT
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import cannot_serve
from forebay.plans import Plan

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

__all__ = ["moccasin", "solved"]

NAME: Final = "moccasin"

WORK: Final = 10
"""Portions of work that the last search may take; those before it, for the room, may take one each."""

PORTION: Final = 0.2
"""Work of one portion in the solver's own units, each about a second: what a search costs is counted, not timed."""

GRAIN: Final = 1_000_000_000
"""Parts into which the seconds of all that can run again are cut: the solver counts in whole numbers."""


def moccasin(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``DoesNotFit``, ``CannotServe`` where the solver is not installed, and ``ConfigError`` without a batch."""
    if not cpsat_is_there():
        why = f"solves with CP-SAT, and {PACKAGE} is not installed: {INSTALL}"
        raise cannot_serve(NAME, why, "checkmate, which looks for the same by integer programming, rockmate or auto")
    return placed(bench or Bench(problem), NAME, "the ops of every block", _decide, every_again)


def _decide(room: Room) -> Answer | None:
    if room.fits(KEPT):
        return Answer(KEPT)

    def solve(allowed: int, portions: int) -> tuple[Choice, Found] | None:
        found = solved(room.layers, allowed, portions)
        return None if found is None else (choice_of(room.layers, found.x), found)

    best = searched(room, solve, sum(layer.items.held for layer in room.layers), WORK)
    if best is None:
        return None
    choice, found = best
    again = sum(map(reruns, choice.values()))
    return Answer(room.level(choice), (f"ops of {again} blocks run again: {found.proof('made again')}",))


def solved(layers: Sequence[Layer], allowed: float, portions: int) -> Found | None:
    """The least seconds that run again with ``allowed`` bytes for activations, found in ``portions`` of work from
    whole blocks on; None if nothing fits, or nothing was found. Variables are those of ``checkmate.programme_of``."""
    from ortools.sat.python import cp_model

    programme = programme_of(layers, allowed)
    model = cp_model.CpModel()
    decisions = [model.new_bool_var("") for _ in programme.target]
    _limit(model, decisions, programme)
    unit = float(programme.target.sum()) / GRAIN or 1.0
    # Rounded down: what the solver proves of these is true of the seconds themselves.
    costs = [int(seconds / unit) for seconds in programme.target]
    start = _whole_blocks(layers, allowed)
    for decision, value in zip(decisions, start, strict=True) if start is not None else ():
        model.add_hint(decision, bool(value))
    model.minimize(cp_model.LinearExpr.weighted_sum(decisions, costs))
    solver = solver_of(seed=0)
    # Blocks that are alike leave a search nothing to cut: relaxations do it (GPT-2: a gap of 2 % for one of 69 %).
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = portions * PORTION
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        x = np.array([solver.value(decision) for decision in decisions], dtype=float)
    elif status == cp_model.UNKNOWN and start is not None:
        x = start
    else:
        return None
    seconds = float(programme.target @ x)
    proven = status == cp_model.OPTIMAL
    return Found(x, seconds, seconds if proven else min(seconds, max(0.0, solver.best_objective_bound * unit)))


def _whole_blocks(layers: Sequence[Layer], allowed: float) -> NDArray[Any] | None:
    """The decisions of ``rotor``, from which the search begins: of large models it finds none for itself in the work
    that it has. None where nothing fits so."""
    steps = [[step_of(option) for option in whole_blocks(layer)] for layer in layers]
    places = best_chain(steps, [Link(0.0, 0.0)] * len(layers), allowed)
    if places is None:
        return None
    able = [(place, layer) for place, layer in zip(places, layers, strict=True) if layer.may_rerun]
    return np.concatenate([np.zeros(0), *(np.full(1 + len(rerun(layer)), float(place)) for place, layer in able)])


def _limit(model: CpModel, decisions: Sequence[IntVar], programme: Programme) -> None:
    """The rows of ``programme``, which are of whole bytes: of every instant those that intervals cover it with, and
    that an op runs again with its block alone."""
    from ortools.sat.python import cp_model

    upper = programme.upper
    for row, most in enumerate(programme.most):
        own = slice(upper.indptr[row], upper.indptr[row + 1])
        covering = [decisions[place] for place in upper.indices[own]]
        nbytes = [int(value) for value in upper.data[own]]
        model.add(cp_model.LinearExpr.weighted_sum(covering, nbytes) <= floor(most))
