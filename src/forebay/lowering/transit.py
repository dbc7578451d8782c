"""The most bytes on the device beside the arenas, with what is under way in either direction. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

import numpy as np

from forebay.lowering.arrangement import positions
from forebay.lowering.columns import Column, column
from forebay.lowering.index import NEVER, TraceIndex
from forebay.lowering.lives import Profile
from forebay.plans import Streaming

__all__ = ["Landings", "Transit"]


@final
class Landings:
    """The gradients of a pass in the order in which they are complete: after which op, of which block, their bytes, and
    what their root has beyond them: a root may be larger than the gradient in it, and the window counts the gradient.
    """

    def __init__(self, index: TraceIndex) -> None:
        done = sorted((c for visit in index.completed for c in visit), key=lambda c: c.op)
        # The roots of all gradients, each with the op after which the last one in it is complete, and their bytes.
        last = {c.root: c.op for c in done}
        held = {root: index.roots[root].nbytes if root in index.roots else 0 for root in last}
        sizes = [index.trace.sources[c.parameter].nbytes for c in done]
        self.ops = column([c.op for c in done])
        self.nbytes = column(sizes)
        self.excess = column([max(0, held[c.root] - size) for c, size in zip(done, sizes, strict=True)])
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(index.blocks))}
        self._block = column([self._numbers[index.blocks[c.parameter]] for c in done])
        places = {root: place for place, root in enumerate(last)}
        self._root = column([places[c.root] for c in done])
        self._root_ops, self._root_nbytes = column(list(last.values())), column(list(held.values()))
        latest = {c.root: index.blocks[c.parameter] for c in done}
        self._root_block = column([self._numbers[latest[root]] for root in last])
        # After which op the last gradient of each block is complete.
        self._ends = {index.blocks[c.parameter]: c.op for c in done}

    def of(self, blocks: Collection[str]) -> Column:
        """The places of the gradients of ``blocks``."""
        return self._places(blocks, self._block)

    def _places(self, blocks: Collection[str], numbers: Column) -> Column:
        """The places in ``numbers`` of those of ``blocks``."""
        chosen = np.zeros(len(self._numbers), bool)
        chosen[[self._numbers[name] for name in blocks if name in self._numbers]] = True
        return np.flatnonzero(chosen[numbers])

    def waiting(self, blocks: Collection[str]) -> tuple[Column, Column]:
        """What is complete of gradients of ``blocks`` that share no root with others' and are there until the last one
        of their block is: after which ops, and by how many bytes, that becomes more (or less, where it is negative)."""
        roots = self._places(blocks, self._root_block)
        nbytes, ends = self._root_nbytes[roots], np.zeros(len(self._numbers), np.int64)
        for name in blocks:
            if name in self._ends:
                ends[self._numbers[name]] = self._ends[name]
        return np.r_[self._root_ops[roots], ends[self._root_block[roots]]], np.r_[nbytes, -nbytes]

    def ends(self, blocks: Mapping[str, int]) -> tuple[Column, Column]:
        """After which op the last gradient of each of ``blocks`` is complete, and what the mapping says of it."""
        there = [(self._ends[name], nbytes) for name, nbytes in blocks.items() if name in self._ends]
        return column([op for op, _ in there]), column([nbytes for _, nbytes in there])

    def beyond(self, blocks: Collection[str]) -> tuple[Column, Column]:
        """What stays with gradients of ``blocks`` and is none of them, root by root: after which op, and the bytes. A
        gradient that is a view of something larger keeps all of it."""
        places, within = self.of(blocks), np.zeros_like(self._root_nbytes)
        np.add.at(within, self._root[places], self.nbytes[places])
        return self._root_ops, np.where(within > 0, np.maximum(self._root_nbytes - within, 0), 0)


@final
class Transit:
    """What ``profile`` of a trace of ``ops`` takes with activations and gradients under way."""

    def __init__(self, profile: Profile, ops: int) -> None:
        self._profile = profile
        self._whole = column(profile.with_outputs)
        self._place = column(positions(profile.runs, ops))
        self._moving = self._moves()

    def most(
        self,
        streaming: Streaming,
        landings: Landings,
        hosted: Collection[str],
        missing: int,
        staying: Collection[str],
        used_up: Mapping[str, int],
        accumulates: bool,
    ) -> int:
        """The most bytes at any time. Gradients of the blocks ``hosted`` leave; ``missing`` bytes of such more are
        complete as soon as the first one is. Those of the blocks ``staying`` have room elsewhere, but for what is in
        their roots beside them. If a step ``accumulates``, both are there from its first pass on; if not, that room is
        empty until they are complete: what else is there may use it until then. Those of the blocks ``used_up`` are
        there until the last one of the block is complete, and the update of the block then takes so many bytes."""
        window, there = streaming.gradient_window, self._with_moves(streaming)
        if accumulates:
            there = there + landings.beyond(staying)[1].sum()
        else:
            there = there - self._to_come(landings, staying) + self._since(*landings.beyond(staying))
        if used_up:
            there = there + self._since(*landings.waiting(used_up))
            ops, nbytes = landings.ends(used_up)
            np.add.at(there, self._place[ops], nbytes)
        leaving = landings.of(hosted) if window > 0 else column(())
        if not len(leaving):
            return int(there.max(initial=0))
        # Before a gradient is complete, those before it may be under way, and what is in no gradient of their roots.
        ends = self._place[landings.ops[leaving]] + 1
        complete = np.cumsum(landings.nbytes[leaving]) + missing
        under_way = np.r_[0, complete]
        beside = np.minimum(under_way, window) + landings.excess[leaving].sum()
        beside[:-1][under_way[:-1] == 0] = 0
        # Of gradients that are complete after the same op, what counts is what was there before the first.
        first = np.flatnonzero(np.diff(ends, prepend=0) > 0)
        starts, beside = np.r_[0, ends[first]], np.r_[beside[first], beside[-1]]
        if starts[-1] == len(there):
            return int(max((np.maximum.reduceat(there, starts[:-1]) + beside[:-1]).max(), beside[-1]))
        return max(0, int((np.maximum.reduceat(there, starts) + beside).max()))

    def _to_come(self, landings: Landings, blocks: Collection[str]) -> Column:
        """Of each position the bytes of gradients of ``blocks`` that the pass completes then or later."""
        places = landings.of(blocks)
        nbytes = landings.nbytes[places]
        return np.asarray(nbytes.sum() - self._since(landings.ops[places], nbytes))

    def _since(self, ops: Column, nbytes: Column) -> Column:
        """Of each position the sum of ``nbytes`` whose op of ``ops`` is behind it."""
        complete = np.zeros(len(self._whole) + 1, np.int64)
        np.add.at(complete, self._place[ops] + 1, nbytes)
        return np.cumsum(complete)[: len(self._whole)]

    def _with_moves(self, streaming: Streaming) -> Column:
        """The most bytes at each position with activations under way, gradients left out.

        Until backward asks for the first one, of those that Python has let go at most ``offload_window`` bytes are
        still on the device, on their way to the host: when a copy is queued compute waits until no more are. From the
        first position of backward on, of those that were not asked for yet at most ``reload_window`` bytes are there.
        """
        if self._moving is None:
            return self._whole
        let_go, waiting = self._moving
        leaving = np.minimum(let_go, streaming.offload_window)
        leaving[self._profile.asking + 1 :] = 0
        coming = np.minimum(waiting, streaming.reload_window)
        coming[: self._profile.forward] = 0
        return self._whole + np.maximum(leaving, coming)

    def _moves(self) -> tuple[Column, Column] | None:
        """Of each position the bytes that forward has let go, and those that backward has not asked for; None where
        nothing moves."""
        if not self._profile.moves:
            return None
        end = len(self._whole)
        gone, asked = np.zeros(end + 1, np.int64), np.zeros(end + 1, np.int64)
        for move in self._profile.moves:
            if move.leaves:
                gone[move.until + 1] += move.in_transit
                if move.asked != NEVER:
                    asked[move.asked] += move.in_transit
        return np.cumsum(gone)[:end], asked.sum() - np.cumsum(asked)[:end]
