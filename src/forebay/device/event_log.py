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
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=limit)
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many events were dropped, oldest first, because nobody drained the log."""
        return self._dropped

    def add(self, event: Event) -> None:
        """Adds one event."""
        with self._lock:
            if len(self._events) == self._events.maxlen:
                self._dropped += 1
            self._events.append(event)

    def drain(self) -> list[Event]:
        """The events since the last call, in order of their start."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return sorted(events, key=attrgetter("start"))
