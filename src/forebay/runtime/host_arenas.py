"""The arenas on the host that a session has taken, and the account of what of them is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from forebay.memory import ArenaUsage, Kind, Ledger
from forebay.runtime.depots import Depot
from forebay.tiers.arena import HostArena, Pinner

__all__ = ["HostArenas", "Ledgers"]


@final
class Ledgers:
    """The accounts of the tiers beside the device."""

    def __init__(self, host: Ledger, pinned: Ledger, disk: Ledger) -> None:
        self.host = host
        self.pinned = pinned
        self.disk = disk


@final
class HostArenas:
    """Opens arenas, page-locked by ``pinner`` where that is asked for. ``notes`` say which are not, and why."""

    def __init__(self, ledgers: Ledgers, pinner: Pinner) -> None:
        self._ledgers = ledgers
        self._pinner = pinner
        self._opened: list[tuple[HostArena, list[Depot]]] = []
        self.notes: list[str] = []

    def open(self, nbytes: int, kind: Kind, what: str, stack: ExitStack, *, pinned: bool) -> HostArena | None:
        """An arena that ``stack`` closes; None for no bytes."""
        if nbytes == 0:
            return None
        arena = HostArena(
            nbytes,
            kind,
            ledger=self._ledgers.host,
            pinned_ledger=self._ledgers.pinned if pinned else None,
            pinner=self._pinner if pinned else None,
            what=what,
        )
        stack.enter_context(arena)
        self._opened.append((arena, []))
        if arena.note:
            self.notes.append(arena.note)
        return arena

    @contextmanager
    def all_or_none(self) -> Iterator[ExitStack]:
        """A stack for arenas that are wanted together: where one of them, or what they are for, fails, all are closed
        and in no account. Else they are the stack's, which the caller has taken over by then."""
        before, said = len(self._opened), len(self.notes)
        with ExitStack() as opened:
            try:
                yield opened
            except BaseException:
                # The account has what looks into the arenas, and so would keep them mapped.
                del self._opened[before:], self.notes[said:]
                raise

    def given_to(self, arena: HostArena, depots: Sequence[Depot]) -> None:
        """All of ``arena`` is for ``depots``, which know how much of it is in use."""
        next(known for one, known in self._opened if one is arena).extend(depots)

    def usages(self) -> tuple[ArenaUsage, ...]:
        """The account of every arena so far, those included that are closed."""
        return tuple(one.usage(sum(d.most for d in depots) if depots else None) for one, depots in self._opened)
