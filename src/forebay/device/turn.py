"""Whose turn it is to compute, where several threads train on one device. No torch.

Each takes part (``taken``) and computes in its turn, one at a time. Whoever waits for bytes gives the turn away until
they are there, and comes back at the end of the queue: who is ready first goes first. One that never waits would keep
the others from computing, so that it also lets those that are ready go first wherever it begins a block (``offer``).
That is how the simulator has it (``simulation.several``).

For a thread that does not take part, everything here does nothing.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import final

from forebay.errors import UsageError

__all__ = ["Cancelled", "Part", "Turn"]


class Cancelled(Exception):
    """Raised inside of a function whose caller wants it to end. An ``Exception``, so that torch calls the hooks of the
    modules that it goes through."""


class Part(ABC):
    """What takes part. What all threads of a process have in common (generators of random numbers) changes with the
    turn: ``pause`` keeps what is there now, ``resume`` puts back what was kept."""

    @abstractmethod
    def may_pause(self) -> bool:
        """Whether another may go on now. Asked in the thread of this one, which has the turn."""

    @abstractmethod
    def pause(self) -> None:
        """Another one goes on. Called in whatever thread that runs in."""

    @abstractmethod
    def resume(self) -> None:
        """This one goes on, after another."""


class _State(Enum):
    """Whether threads may take part, and whether those that do shall end."""

    CLOSED = "closed"
    OPEN = "open"
    CANCELLED = "cancelled"


@final
class _Seat:
    """The place of a part in the queue. ``told``: it has been cancelled, and ends without giving its turn away."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.thread = threading.get_ident()
        self.called = threading.Semaphore(0)
        self.told = False


@final
class Turn:
    """At most one of the threads that take part computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[_Seat] = deque()
        self._holder: _Seat | None = None
        # Whose random numbers are drawn: the last that had the turn.
        self._latest: Part | None = None
        self._state = _State.CLOSED

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Threads may take part inside, and have ended when it is left. Raises ``UsageError`` inside of another one."""
        with self._lock:
            if self._state is not _State.CLOSED:
                raise UsageError("these models take turns already, in a call around this one or in another thread")
            self._state, self._latest = _State.OPEN, None
        try:
            yield
        finally:
            self._state = _State.CLOSED

    @contextmanager
    def taken(self, part: Part) -> Iterator[None]:
        """The calling thread takes part: inside, it computes in its turns, and what it leaves is kept. Raises
        ``Cancelled``."""
        seat = _Seat(part)
        try:
            self._come(seat)
            yield
        finally:
            part.pause()
            self._pass_on()

    @contextmanager
    def given_away(self) -> Iterator[None]:
        """Others may compute while the calling thread waits for something that none of them holds. Raises
        ``Cancelled``."""
        seat = self._mine()
        if seat is None or seat.told or not seat.part.may_pause():
            yield
            return
        self._pass_on()
        try:
            yield
        finally:
            self._come(seat)

    def offer(self) -> None:
        """Lets all those go first that are ready. Raises ``Cancelled``."""
        seat = self._mine()
        if seat is not None and not seat.told and (self._queue or self._state is _State.CANCELLED):
            with self.given_away():
                pass

    def cancel(self) -> None:
        """Has ``Cancelled`` raised, once, in every thread that takes part, at its next turn."""
        self._state = _State.CANCELLED

    def _mine(self) -> _Seat | None:
        """The seat of the calling thread, if it has the turn. Only that thread makes this true or false for itself, so
        that no lock is needed."""
        holder = self._holder
        return holder if holder is not None and holder.thread == threading.get_ident() else None

    def _come(self, seat: _Seat) -> None:
        """Waits for the turn."""
        with self._lock:
            free = self._holder is None
            if free:
                self._holder = seat
            else:
                self._queue.append(seat)
        if not free:
            seat.called.acquire()
        if self._latest is not seat.part:
            # Whoever had the turn before draws nothing until it has it again: what is there now is what it left.
            if self._latest is not None:
                self._latest.pause()
            seat.part.resume()
            self._latest = seat.part
        if self._state is _State.CANCELLED and not seat.told:
            # It keeps the turn while it unwinds: never two at once, also then.
            seat.told = True
            raise Cancelled

    def _pass_on(self) -> None:
        """The next one in the queue has the turn, or nobody."""
        with self._lock:
            self._holder = self._queue.popleft() if self._queue else None
            if self._holder is not None:
                self._holder.called.release()
