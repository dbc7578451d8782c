"""A search that learns from what failed: of every variable one option, so that all of them are possible together. No
torch.

What is possible is only known by a test, and only that it stays possible with fewer choices. Where one choice more is
not, the fewest of the earlier ones that are to blame are looked for, and remembered with it (a *nogood*); where none of
the options of a variable is left, the choices that its nogoods name are one together, and all that was chosen since the
latest of them is taken back (Junker, "QuickXplain: preferred explanations and relaxations for over-constrained
problems", AAAI 2004, section 3; Ginsberg, "Dynamic backtracking", JAIR 1, 1993, section 2, whose eliminations these
are).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar, final

import numpy as np

__all__ = ["Choice", "Conflicts", "Steps"]

SEED = 1
"""Where the pseudo-random numbers begin: the same search for the same question."""

FAILURES = 30
"""Nogoods that tests have given before the search begins again, with another order of the variables and what it has
learned; each further time half as many more. Of 20 sets whose sizes are powers of two a prototype found 12 without, and
18 with it (docs/log.md, 2026-11-29)."""

Choice = tuple[int, int]
"""A variable, and one of its options."""

Nogood = frozenset[Choice]
"""Choices that are not possible together."""

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""A part of a search, which pauses before every test."""


@final
class Conflicts:
    """Searches for one of so many ``options`` of each variable, the first of them first, so that ``possible`` says yes
    to all of them. It must also say yes to any part of what it says yes to."""

    def __init__(self, options: Sequence[int], possible: Callable[[Sequence[Choice]], bool]) -> None:
        self._options, self._possible = options, possible
        self._chosen: dict[Choice, None] = {}  # in the order in which they were
        self._open = set(range(len(options)))
        self._nogoods: dict[Choice, list[Nogood]] = {}  # of each choice those that it is in
        self._rank: Sequence[float] = options
        self._draw = np.random.default_rng(SEED)
        self._failures, self._patience = 0, FAILURES

    def solve(self) -> Steps[tuple[Choice, ...] | None]:
        """A choice for every variable; None where there is none that is possible."""
        while self._open:
            if self._failures > self._patience:
                self._begin_again()
            blamed = yield from self._choose(min(self._open, key=self._urgency))
            if blamed is None:
                continue
            if not blamed:
                return None
            self._learn(blamed)
            self._take_back(blamed)
        return tuple(self._chosen)

    def _urgency(self, variable: int) -> tuple[int, float]:
        """What has no option left comes first, since that says who is to blame, and then what has no choice."""
        left = sum(self._excluded((variable, option)) is None for option in range(self._options[variable]))
        return min(left, 2), self._rank[variable]

    def _choose(self, variable: int) -> Steps[Nogood | None]:
        """Chooses the first option of ``variable`` that is possible. Returns None, or the choices to blame where there
        is none."""
        blamed = Nogood()
        for choice in ((variable, option) for option in range(self._options[variable])):
            nogood = self._excluded(choice)
            if nogood is None:
                yield
                if self._possible([*self._chosen, choice]):
                    self._chosen[choice] = None
                    self._open.remove(variable)
                    return None
                nogood = Nogood([choice, *(yield from self._fewest([choice], True, list(self._chosen)))])
                self._learn(nogood)
                self._failures += 1
            blamed |= nogood - {choice}
        return blamed

    def _fewest(self, given: list[Choice], changed: bool, suspects: list[Choice]) -> Steps[list[Choice]]:
        """Choices among ``suspects`` that are not possible beside the ``given`` ones, none of which could be left out
        (QuickXplain). ``changed``: whether more is given than when it was last tested."""
        if not suspects:
            return []
        if changed:
            yield
            if not self._possible(given):
                return []
        if len(suspects) == 1:
            return suspects
        half = len(suspects) // 2
        early, late = suspects[:half], suspects[half:]
        of_late = yield from self._fewest([*given, *early], True, late)
        of_early = yield from self._fewest([*given, *of_late], bool(of_late), early)
        return of_early + of_late

    def _excluded(self, choice: Choice) -> Nogood | None:
        """A nogood of whose choices this is the only one that is not made."""
        for nogood in self._nogoods.get(choice, ()):
            if all(other in self._chosen or other == choice for other in nogood):
                return nogood
        return None

    def _learn(self, nogood: Nogood) -> None:
        for choice in nogood:
            self._nogoods.setdefault(choice, []).append(nogood)

    def _take_back(self, blamed: Nogood) -> None:
        """All that was chosen since the latest of the ``blamed`` choices, and that one."""
        while True:
            latest, _ = self._chosen.popitem()
            self._open.add(latest[0])
            if latest in blamed:
                return

    def _begin_again(self) -> None:
        self._chosen.clear()
        self._open = set(range(len(self._options)))
        self._rank = self._draw.permutation(len(self._options)).tolist()
        self._failures, self._patience = 0, self._patience + self._patience // 2
