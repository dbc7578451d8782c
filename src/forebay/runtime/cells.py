"""Updates on the device of what is at home elsewhere: chunk by chunk to the device, updated there, and home again.

Copies. A *cell* is a device buffer with one chunk in it: its states as they are at home, the parameters of its elements
and their landed gradients (``layout.Cell``). The home copy stays where it is and is out of date from the load until the
store; nobody reads it in between, since whoever does waits for ``Home.written``.

Over the link go, for each element, to the device: all states, the gradient, and the parameter where it has no fp32
master (with one the update writes it and never reads it); back: all states and the parameter. For AdamW that is, in
fp32, 8 + 4 + 4 = 16 bytes there and 8 + 4 = 12 back; in 16 bits with a master 12 + 2 = 14 there and 12 + 2 = 14 back.
An update on the host moves none of these over the link.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from forebay.device.base import Completion, Device
from forebay.layout import Cell, Chunk, Span, cell_of, spans_of
from forebay.runtime.homes import Checkout
from forebay.scheduling.staging import StagingRing
from forebay.timeline import Lane

__all__ = ["Cells", "Load"]


@dataclass(frozen=True)
class Load:
    """One chunk of ``block`` that is to be updated on the device: of the parameters in ``names``, whose gradients are
    at ``offsets`` (bytes) of ``gradients`` (1-D uint8, host) once all of ``landed`` are done."""

    block: str
    chunk: Chunk
    names: Collection[str]
    parameters: Checkout
    states: Checkout
    gradients: torch.Tensor
    offsets: Mapping[str, int]
    landed: tuple[Completion, ...]


@final
class Cells:
    """The cells of a session: as many of ``cell`` bytes as ``window`` (1-D uint8, device) holds, beside ``widening``
    bytes in which one update at a time makes 16-bit gradients fp32 (None: there is nothing to widen)."""

    def __init__(self, device: Device, window: torch.Tensor, cell: int, widening: int) -> None:
        self._device = device
        count = (window.numel() - widening) // cell if cell else 0
        self._ring = StagingRing([window[i * cell : (i + 1) * cell] for i in range(count)])
        self.widening = window[count * cell : count * cell + widening] if widening else None

    def update(
        self, load: Load, compute: Callable[[Cell, torch.Tensor], None], touched: int
    ) -> tuple[Completion, Completion]:
        """Queues the way of a chunk to the device, ``compute`` on its cell, and the way home.

        ``touched`` are the bytes that ``compute`` reads and writes. Returns the completions at which the gradients have
        been read and at which parameters and states are where they were checked out.
        """
        chunk = load.chunk
        cell, spans = cell_of(chunk), spans_of(chunk, load.offsets, load.names)
        # Who had the cell before is home again before this one comes in; and so there is never more on the device
        # than the window.
        staging, free = self._ring.take(cell.nbytes)
        buffer = staging.view(cell.nbytes)
        arrived = self._bring(load, cell, spans, buffer, free)
        updated = self._device.launch(
            partial(compute, cell, buffer),
            # All of them, although the lane keeps their order: of what did not arrive whole nothing is written home.
            after=arrived,
            nbytes=touched,
            what=f"update {load.block}",
        )
        staging.busy = self._take_home(load, cell, spans, buffer, updated)
        # The lane runs in order: where the last copy is done, all of them are.
        return arrived[-1], staging.busy

    def close(self) -> None:
        """Lets go of the memory. The caller has waited for all jobs."""
        self._ring = StagingRing([])
        self.widening = None

    def _bring(
        self, load: Load, cell: Cell, spans: list[Span], buffer: torch.Tensor, free: tuple[Completion, ...]
    ) -> list[Completion]:
        arrived = []

        def bring(start: int, source: torch.Tensor, after: tuple[Completion, ...], what: str) -> None:
            if source.numel():
                target = buffer[start : start + source.numel()]
                arrived.append(
                    self._device.copy(Lane.H2D, target, source, after=(*free, *after), what=f"load {what} {load.block}")
                )

        bring(0, load.states.buffer[: load.chunk.nbytes], load.states.ready, "states of")
        for span in spans:
            if not span.written:
                home = load.parameters.buffer[span.home : span.home + span.nbytes]
                bring(cell.parameters + span.cell, home, load.parameters.ready, "parameters of")
        for span in spans:
            # Gradients that are still landing must be there before they are read.
            landed = load.gradients[span.landed : span.landed + span.nbytes]
            bring(cell.gradients + span.cell, landed, load.landed, "gradients of")
        return arrived

    def _take_home(
        self, load: Load, cell: Cell, spans: list[Span], buffer: torch.Tensor, updated: Completion
    ) -> Completion:
        home = updated
        # Beside the update, what the loans wait for: a read from disk into the buffer that is written here, a fetch
        # that still reads the parameters which were not loaded.
        after = (updated, *load.parameters.ready, *load.states.ready)
        moves = [(load.states.buffer[: load.chunk.nbytes], 0, "states of ")]
        moves += [
            (load.parameters.buffer[span.home : span.home + span.nbytes], cell.parameters + span.cell, "")
            for span in spans
        ]
        for target, start, what in moves:
            if target.numel():
                source = buffer[start : start + target.numel()]
                home = self._device.copy(Lane.D2H, target, source, after=after, what=f"store {what}{load.block}")
        return home
