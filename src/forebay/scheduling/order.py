"""The order in which blocks are used: recorded in one pass, followed in the next. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

__all__ = ["AccessOrder"]

NEVER = 1 << 30
"""Distance of a block that the record does not name: it is the best one to evict."""


@final
class AccessOrder:
    """Records the blocks of each kind of pass and says what comes next.

    A pass is one forward and what follows it until the next forward. The record of the last pass of the same kind
    (training, evaluation) is the forecast of this one. A use that differs from the forecast is counted in
    ``deviations`` and answered by looking further on in the record: a skipped block costs nothing, an unknown one is
    fetched on demand.
    """

    def __init__(self) -> None:
        self._records: dict[str, tuple[str, ...]] = {}
        self._kind = ""
        self._now: list[str] = []
        self._position = 0
        # What was asked for last, for as long as nothing has been used since: every parameter asks.
        self._ahead: tuple[int, tuple[str, ...]] | None = None
        self.deviations = 0

    def begin(self, kind: str) -> None:
        """A pass of ``kind`` begins; what was used since the last ``begin`` becomes the record of its kind."""
        if self._now:
            self._records[self._kind] = tuple(self._now)
        self._kind = kind
        self._now = []
        self._position = 0
        self._ahead = None

    @property
    def latest(self) -> str | None:
        """The block that was used last in this pass."""
        return self._now[-1] if self._now else None

    def note(self, block: str) -> None:
        """``block`` is used now. Uses that follow each other directly count as one."""
        if self._now and self._now[-1] == block:
            return
        self._now.append(block)
        self._ahead = None
        record = self._records.get(self._kind, ())
        if self._position < len(record) and record[self._position] == block:
            self._position += 1
        elif record:
            self.deviations += 1
            if block in record[self._position :]:
                self._position = record.index(block, self._position) + 1
            # Else it is not ahead in the record: stay, so that what follows can still be found.

    def upcoming(self, count: int) -> tuple[str, ...]:
        """The next ``count`` different blocks of the record, in order."""
        if self._ahead is None or self._ahead[0] != count:
            self._ahead = count, self._look_ahead(count)
        return self._ahead[1]

    def _look_ahead(self, count: int) -> tuple[str, ...]:
        ahead: list[str] = []
        record = self._records.get(self._kind, ())
        for place in range(self._position, len(record)):
            if len(ahead) == count:
                break
            if record[place] not in ahead:
                ahead.append(record[place])
        return tuple(ahead)

    def distance(self, block: str) -> int:
        """Uses until ``block`` is used again in this pass; ``NEVER`` if the record does not say."""
        try:
            return self._records.get(self._kind, ()).index(block, self._position) - self._position
        except ValueError:
            return NEVER

    def record(self, kind: str) -> tuple[str, ...]:
        """The uses of the last pass of ``kind``, in order; empty before the first has ended."""
        return self._records.get(kind, ())

    def first_uses(self) -> list[str]:
        """Blocks in the order of their first use in the last finished or present training-like pass."""
        record = tuple(self._now) or self._records.get(self._kind, ())
        return list(dict.fromkeys(record))

    def in_order_of_use(self, blocks: Iterable[str]) -> list[str]:
        """``blocks`` in the order of ``first_uses``; those that were not used come last, in the order given.

        The order of the updates: what the next forward wants first is updated first.
        """
        known = dict.fromkeys(blocks)
        used = [block for block in self.first_uses() if block in known]
        return list(dict.fromkeys((*used, *known)))
