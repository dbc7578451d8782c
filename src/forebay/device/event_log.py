"""The log of what lanes did, until somebody drains it. No torch here."""

from __future__ import annotations

import threading
from collections import deque
from operator import attrgetter
from typing import final

from forebay.timeline import Event

__all__ = ["EVENT_LIMIT", "EventLog"]

EVENT_LIMIT = 200_000
"""Events kept between two calls of ``drain_events`` (about 40 MB); older ones are dropped and counted."""


@final
class EventLog:
    """Events of all lanes until somebody drains them; safe to use from several threads."""

    def __init__(self, limit: int = EVENT_LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # of whoever takes events out
        self._events: deque[Event] = deque()
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many events were dropped, oldest first, because nobody drained the log."""
        return self._dropped

    def add(self, event: Event) -> None:
        """Adds one event."""
        # Without the lock, between two ops of a step: to append is one call of the interpreter's own.
        self._events.append(event)
        if len(self._events) > self._limit:
            self._drop()

    def _drop(self) -> None:
        with self._lock:
            while len(self._events) > self._limit:
                self._events.popleft()
                self._dropped += 1

    def drain(self) -> list[Event]:
        """The events since the last call, in order of their start."""
        with self._lock:
            # One by one: others may add more meanwhile, and nobody else takes any.
            events = [self._events.popleft() for _ in range(len(self._events))]
        return sorted(events, key=attrgetter("start"))
