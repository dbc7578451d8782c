"""Which blocks are in use by modules whose forward runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from forebay.model import Block
from forebay.runtime.session import Session

__all__ = ["OpenBlocks"]


@final
class OpenBlocks:
    """The blocks of ``session`` that modules have opened and not closed yet. The modules of a block may be inside of
    each other: the outermost one that opens it exposes its parameters, if it is among ``streamed``, and hides them
    again when it closes it."""

    def __init__(self, session: Session, streamed: Collection[str]) -> None:
        self._session = session
        self._streamed = streamed
        self._depth: dict[str, int] = {}

    def open(self, block: Block) -> None:
        """One more module begins that reads ``block``."""
        session, depth = self._session, self._depth.get(block.name, 0)
        if depth == 0:
            since = session.measure.opening(block)
            session.device.turn.offer()
            if block.name in self._streamed:
                session.writes.expose(block)
            session.measure.enter(block, since)
        self._depth[block.name] = depth + 1

    def close(self, block: Block, *, whole: bool) -> list[str]:
        """The last module that opened ``block`` ends; ``whole``: with a result. Returns the names of the parameters
        that it has changed. Does nothing for a block that is not open."""
        depth, changed = self._depth.get(block.name, 0), list[str]()
        if depth == 0:
            return changed
        self._depth[block.name] = depth - 1
        if depth == 1:
            if whole and block.name in self._streamed:
                changed = self._session.writes.changed(block)
            self._hide(block)
            self._session.measure.leave(block)
        return changed

    def close_all(self) -> None:
        """The modules that opened blocks have ended without a word."""
        for block in self._session.model.blocks:
            if self._depth.pop(block.name, 0):
                self._hide(block)

    def _hide(self, block: Block) -> None:
        if block.name in self._streamed:
            for spec in block.parameters:
                self._session.hide(spec.name)
