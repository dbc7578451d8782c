"""Memory as addresses, for policies to which free bytes at different places are not the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

__all__ = ["FREE", "Piece", "Pool"]

FREE = -1
"""The holder of what nobody has."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` of neighbouring addresses that ``holder`` has."""

    holder: int
    nbytes: int


@final
class Pool:
    """``pieces`` of memory in the order of their addresses; no two that are free are neighbours."""

    def __init__(self, nbytes: int) -> None:
        self.pieces = [Piece(FREE, nbytes)] if nbytes > 0 else []

    @property
    def free(self) -> int:
        """Bytes that nobody has, wherever they are."""
        return sum(piece.nbytes for piece in self.pieces if piece.holder == FREE)

    def place(self, holder: int, nbytes: int, *, high: bool = False) -> bool:
        """Gives ``holder`` the lowest free addresses of so many bytes, or the highest ones; False where there are none
        that are neighbours."""
        places = range(len(self.pieces))
        for at in reversed(places) if high else places:
            piece = self.pieces[at]
            if piece.holder == FREE and piece.nbytes >= nbytes:
                parts = [Piece(holder, nbytes), Piece(FREE, piece.nbytes - nbytes)]
                self.pieces[at : at + 1] = [part for part in (parts[::-1] if high else parts) if part.nbytes]
                return True
        return False

    def release(self, holder: int) -> None:
        """Takes from ``holder`` what it has, if anything."""
        kept = (Piece(FREE, p.nbytes) if p.holder == holder else p for p in self.pieces)
        self.pieces = list(_joined(kept))

    def compact(self) -> None:
        """Moves all to the lowest addresses, in their order."""
        free = self.free
        self.pieces = [piece for piece in self.pieces if piece.holder != FREE]
        if free:
            self.pieces.append(Piece(FREE, free))

    def beside(self) -> dict[int, int]:
        """By holder the free bytes on either side."""
        found: dict[int, int] = {}
        for at, piece in enumerate(self.pieces):
            if piece.holder != FREE:
                around = self.pieces[max(0, at - 1) : at] + self.pieces[at + 1 : at + 2]
                found[piece.holder] = sum(other.nbytes for other in around if other.holder == FREE)
        return found

    def window(self, nbytes: int, cost: Callable[[int], float]) -> list[int] | None:
        """The holders of the neighbouring pieces of ``nbytes`` together at least that cost the least together; of an
        infinite ``cost`` are those that have to stay. None where they leave no such window."""
        best, least = None, float("inf")
        first, held, costs = 0, 0, 0.0
        for last, piece in enumerate(self.pieces):
            own = 0.0 if piece.holder == FREE else cost(piece.holder)
            if own == float("inf"):
                first, held, costs = last + 1, 0, 0.0
                continue
            held, costs = held + piece.nbytes, costs + own
            while held - self.pieces[first].nbytes >= nbytes:
                gone = self.pieces[first]
                held -= gone.nbytes
                costs -= 0.0 if gone.holder == FREE else cost(gone.holder)
                first += 1
            if held >= nbytes and costs < least:
                best, least = (first, last + 1), costs
        if best is None:
            return None
        return [piece.holder for piece in self.pieces[slice(*best)] if piece.holder != FREE]


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """``pieces`` with free neighbours as one."""
    free = 0
    for piece in pieces:
        if piece.holder == FREE:
            free += piece.nbytes
            continue
        if free:
            yield Piece(FREE, free)
        free = 0
        yield piece
    if free:
        yield Piece(FREE, free)
