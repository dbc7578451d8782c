"""Bytes of every tier while a step runs, noted where compute goes from one block to the next.

A step is noted whose bytes are all seen (``vigil``), since the account of another one leaves out what it makes. Of
these the last is kept: steps on batches of one shape hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from forebay.device.base import Device
from forebay.memory import Kind, Ledger, Tier
from forebay.timeline import Level

__all__ = ["Levels"]

LIMIT = 10_000
"""Levels of one step that are kept; a step with more is known up to there."""


@final
class Levels:
    """The levels of the device and of ``beside``, the ledgers of the other tiers."""

    def __init__(self, device: Device, beside: Sequence[Ledger]) -> None:
        self._device = device
        self._beside = beside
        self._noting = False
        self._step: list[Level] = []
        self._said: dict[Tier, tuple[dict[Kind, int], int]] = {}
        self._last: tuple[Level, ...] = ()

    def begin(self, time: float, *, seen: bool) -> None:
        """A step begins at ``time``; ``seen``: all that it makes is counted."""
        self._noting, self._step = seen, []
        self._said.clear()
        if seen:
            self._look()  # what was before is not this step's
            self.note(time)

    def note(self, time: float) -> None:
        """Something may have changed until ``time``."""
        if not self._noting:
            return
        for ledger, held in self._look():
            # What stands all the time is said once.
            if self._said.get(ledger.tier) != held:
                self._said[ledger.tier] = held
                self._step.append(Level(time, ledger.tier, *held))
        self._noting = len(self._step) < LIMIT

    def end(self, time: float) -> None:
        """The step is over."""
        self.note(time)
        if self._step:
            self._last = tuple(self._step)
        self._noting, self._step = False, []

    def collect(self) -> tuple[Level, ...]:
        """Those of the last step that was seen, in order."""
        return self._last

    def _look(self) -> list[tuple[Ledger, tuple[dict[Kind, int], int]]]:
        device = (self._device.ledger, self._device.level())
        return [device, *((ledger, ledger.level()) for ledger in self._beside)]
