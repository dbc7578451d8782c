"""What is known of drafts, worked out once for all searches over one model on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from forebay.arenas import Arenas, Sizer
from forebay.errors import ConfigError
from forebay.lowering.liveness import Liveness
from forebay.planners.activations.groups import Group
from forebay.planners.in_backward import Early, Usable, searched
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.program import Outline, Sketch
from forebay.simulation import Costs, Score

__all__ = ["Known"]

SKETCHED = 120_000
"""Programs of drafts that were simulated last are kept, of so many actions: who asks what would change about one of
them asks soon."""


@final
class Known:
    """What is known of the drafts of one model on one machine, whatever the limits. ``paced`` are the seconds of a step
    and the actions of its program, ``eased`` and ``relieved`` what they would be if something were out of the way
    (``Bench.eased``, ``device_updates.at_best``). ``early`` are updates in backward, where the user allows them; drafts
    that have no slots for gradients then are given ``slots`` (None: ``in_backward.searched``). ``groups`` follow from
    ``Problem.compress`` and whether there is a disk."""

    def __init__(self, problem: Problem, slots: int | None = None) -> None:
        trace, machine = problem.trace, problem.machine
        self.liveness = None if trace is None else Liveness(trace)
        self.costs = None if trace is None or machine is None else Costs(trace, machine, problem.masters)
        self._of = problem.model, problem.state_names, problem.masters
        self._sizers: dict[int, Sizer] = {}
        self.arenas: dict[Draft, Arenas] = {}
        self.beside: dict[tuple[object, ...], int] = {}
        self.paced: dict[Draft, tuple[float, int]] = {}
        self.eased: dict[tuple[Draft, Callable[[Outline], float]], float] = {}
        self.relieved: dict[tuple[Draft, tuple[str, ...]], float] = {}
        self.sketches: dict[Draft, tuple[Sketch, Score]] = {}
        self._sketched = 0
        self.slots: dict[int, list[tuple[int, ...]]] = {}
        self.groups: dict[tuple[int, bool], tuple[Group, ...]] = {}
        self.early: Early | None = None
        if self.liveness is not None and problem.update == "backward":
            count = searched(problem) if slots is None else slots
            self.early = Early(self.liveness.trace, problem.masters, Usable.of(self.liveness), count)

    @property
    def priced(self) -> Costs:
        """Seconds of ops and actions. Raises ``ConfigError`` for a problem without a trace."""
        if self.costs is None:
            raise ConfigError("nothing can be simulated without a trace and a machine; give a batch")
        return self.costs

    def sizer(self, update_chunk: int) -> Sizer:
        """The sizer for chunks of ``update_chunk`` elements."""
        if update_chunk not in self._sizers:
            model, states, masters = self._of
            self._sizers[update_chunk] = Sizer(model, states, update_chunk, masters)
        return self._sizers[update_chunk]

    def keep(self, draft: Draft, program: Sketch, score: Score) -> None:
        """Notes the program of ``draft``, and forgets the oldest ones where they have too many actions together."""
        while self.sketches and self._sketched + len(program.actions) > SKETCHED:
            oldest, _ = self.sketches.pop(next(iter(self.sketches)))
            self._sketched -= len(oldest.actions)
        self.sketches[draft] = program, score
        self._sketched += len(program.actions)
