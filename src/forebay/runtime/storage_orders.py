"""What a session and the process beside its storage tell each other: one ``Setup``, then for each ``Order`` an answer.
All of it crosses by pickle; bytes of gradients and parameters are in shared memory, those of states on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay.model import Block
from forebay.optim.rules import UpdateRule
from forebay.runtime.applying import Task
from forebay.tiers.handed import HandedFile

__all__ = ["Answer", "Done", "Failed", "Order", "Setup"]


@dataclass(frozen=True)
class Setup:
    """Who updates what: ``rule`` the states of ``blocks``, each at an offset (bytes) in ``file``, in chunks of
    ``update_chunk`` elements. ``density`` is the share of the elements of gradients that come (None: they come as they
    are). ``memory`` is the descriptor of ``nbytes`` of shared memory, whose last ``widening`` make 16-bit gradients
    fp32. ``session`` is the process for which all this is done."""

    rule: UpdateRule
    update_chunk: int
    density: float | None
    blocks: tuple[tuple[Block, int], ...]
    file: HandedFile
    memory: int
    nbytes: int
    widening: int
    session: int


@dataclass(frozen=True)
class Order:
    """Update chunk number ``chunk`` of ``block`` for ``tasks``; its cell begins at byte ``start`` of the memory."""

    block: str
    chunk: int
    start: int
    tasks: Mapping[str, Task]


@dataclass(frozen=True)
class Done:
    """It is: states on disk, parameters in the cell. ``written`` are the bytes that went to disk."""

    written: int


@dataclass(frozen=True)
class Failed:
    """It is not, and what was to be updated is in no state that means anything."""

    why: str


Answer = Done | Failed
