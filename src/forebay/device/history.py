"""What a device was asked for lately and what of it is there, for the moment in which it has no more.

Kept in the form of PyTorch's memory snapshots (``torch.cuda.memory._snapshot``), so that what reads those reads this:
``forebay fragmentation``, and https://pytorch.org/memory_viz. Where the allocator of a device keeps such a record
itself, that is used, and not this one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, final

from forebay.errors import BudgetExceeded, DeviceOutOfMemory

__all__ = ["MOST", "History"]

MOST: Final = 20_000
"""Entries that are kept: those of several steps of a model of some dozen layers, in a few MB."""


class _Piece(NamedTuple):
    """``nbytes`` for ``what`` (an op, or words), asked for ``where``; ``address`` is its own."""

    address: int
    nbytes: int
    what: object
    where: str


class _Entry(NamedTuple):
    """A piece was made, or is gone."""

    piece: _Piece
    made: bool


@final
class History:
    """The last ``most`` entries, and all pieces that are there. Thousands of ops a step pass here: words are made when
    somebody asks.

    No address stands for two pieces, and none is the machine's: its allocator places each piece by itself. Threads may
    tell of pieces at the same time.
    """

    def __init__(self, most: int = MOST) -> None:
        self._entries: deque[_Entry] = deque(maxlen=most)
        self._there: dict[int, _Piece] = {}
        self._next = 512
        self._lock = threading.Lock()

    def made(self, nbytes: int, what: object, where: str = "") -> int:
        """Notes a piece; returns its address, for ``gone``."""
        with self._lock:
            address, self._next = self._next, self._next + nbytes
        piece = self._there[address] = _Piece(address, nbytes, what, where)
        self._entries.append(_Entry(piece, made=True))
        return address

    def gone(self, address: int) -> None:
        """Notes that the piece at ``address`` was given back."""
        piece = self._there.pop(address, None)
        if piece is not None:
            self._entries.append(_Entry(piece, made=False))

    def told(self, error: BudgetExceeded, nbytes: int, what: object, where: str = "") -> BudgetExceeded:
        """``error``, which says that there is no room for ``nbytes`` more, with a snapshot of this moment."""
        if isinstance(error, DeviceOutOfMemory):
            error.snapshot = self.snapshot(nbytes, what, where)
        return error

    def snapshot(self, nbytes: int, what: object, where: str = "") -> Mapping[str, Any]:
        """What is there and what came before, when ``nbytes`` more were asked for; plain values."""
        entries, there = self._copied()
        trace = [_entry(entry, at) for at, entry in enumerate(entries)]
        asked = _Piece(0, nbytes, what, where)
        short = {"action": "oom", "addr": 0, "size": nbytes, "stream": 0, "time_us": len(trace)}
        return {
            "segments": [_segment(piece) for piece in there],
            "device_traces": [[*trace, {**short, "device_free": 0, "frames": _frames(asked)}]],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def _copied(self) -> tuple[list[_Entry], list[_Piece]]:
        while True:
            try:
                return list(self._entries), list(self._there.values())
            except RuntimeError:
                continue  # another thread, or a finalizer in this one, told of a piece in between


def _entry(entry: _Entry, at: int) -> dict[str, Any]:
    piece = entry.piece
    return {
        "action": "alloc" if entry.made else "free_completed",
        "addr": piece.address,
        "size": piece.nbytes,
        "stream": 0,
        "time_us": at,
        "frames": _frames(piece),
    }


def _segment(piece: _Piece) -> dict[str, Any]:
    block = {
        "address": piece.address,
        "size": piece.nbytes,
        "requested_size": piece.nbytes,
        "state": "active_allocated",
        "frames": _frames(piece),
    }
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), piece.nbytes)
    kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
    return {"device": 0, "address": piece.address, "stream": 0, "frames": [], "blocks": [block], **sizes, **kind}


def _frames(piece: _Piece) -> list[dict[str, Any]]:
    """A stack of one call: what was asked for in the place of a function, where in that of its file."""
    where = piece.where.removesuffix(": ").removeprefix("block ")
    return [{"name": str(piece.what), "filename": where or "forebay", "line": 0}]
