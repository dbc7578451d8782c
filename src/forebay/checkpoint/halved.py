"""Masters of which a checkpoint has two halves (``forebay.states.Masters``), as the whole ones that a resume asks for.

Lower halves lie in place, among the states, of which the one that keeps ties does so by its sign. Upper halves, the
parameters, lie in place too, or were copied: ``upper.NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import final

import torch

from forebay.checkpoint.inventory import UPPER, Entry, entry_name, entry_of
from forebay.layout import LOWER, MASTER, needs_master
from forebay.model import Block
from forebay.optim.halves import join
from forebay.phases import PASSING
from forebay.states import TIES

__all__ = ["Halved", "JoiningReader", "halved_in"]

_PART = PASSING // 4
"""Bytes of a master that are made at a time, of halves (as many bytes), ties and what is spare (as many each)."""


@dataclass(frozen=True)
class Halved:
    """A master in halves: what the ``upper`` one is, and the names of the ``lower`` one and of the state that keeps
    ``ties``."""

    upper: Entry
    lower: str
    ties: str


def halved_in(block: Block, names: Collection[str]) -> dict[str, Halved]:
    """The masters of ``block`` whose lower halves are among ``names``, by the names that whole ones would have."""
    return {
        entry_name(MASTER, p): Halved(entry_of(UPPER, p), entry_name(LOWER, p), entry_name(TIES, p))
        for p in block.parameters
        if needs_master(p) and entry_name(LOWER, p) in names
    }


@final
class JoiningReader:
    """Reads tensors by ``read`` (a name, the first byte, what is filled), and puts those of ``halved`` together."""

    def __init__(self, halved: Mapping[str, Halved], read: Callable[[str, int, memoryview], None]) -> None:
        self._halved = halved
        self._ties = frozenset(one.ties for one in halved.values())
        self._read = read

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes of a tensor from ``offset`` on, of whole elements."""
        halved = self._halved.get(name)
        if halved is None:
            self._read(name, offset, buffer)
            if name in self._ties:
                torch.frombuffer(buffer, dtype=torch.float32).abs_()
            return
        for start in range(0, len(buffer), _PART):
            self._join(halved, offset + start, buffer[start : start + _PART])

    def _join(self, halved: Halved, offset: int, buffer: memoryview) -> None:
        master = torch.frombuffer(buffer, dtype=torch.float32)
        upper, lower = (torch.empty(len(master), dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.int16))
        ties, spare = torch.empty_like(master), torch.empty_like(master)
        for half, name in ((upper, halved.upper.name), (lower, halved.lower)):
            self._read(name, offset // 2, half.view(torch.uint8).numpy().data)
        self._read(halved.ties, offset, ties.view(torch.uint8).numpy().data)
        join([master], [upper], [lower], [ties], [spare])
