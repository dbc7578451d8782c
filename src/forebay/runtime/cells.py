"""Updates elsewhere than at home, on the device or beside the storage: chunk by chunk there, updated, and home again.

Copies. A *cell* is a buffer with one chunk in it: its states as they are at home, the parameters of its elements
and their landed gradients (``layout.Cell``). The home copy stays where it is and is out of date from the load until the
store; nobody reads it in between, since whoever does waits for ``Home.written``.

Over the link go, for each element, to the device: all states, the gradient, and the parameter where it has no fp32
master (with one the update writes it and never reads it); back: all states and the parameter. For AdamW that is, in
fp32, 8 + 4 + 4 = 16 bytes there and 8 + 4 = 12 back; in 16 bits with a master 12 + 2 = 14 there and 12 + 2 = 14 back.
An update on the host moves none of these over the link.

Beside the storage (``storage_side``) a cell is memory that is shared with the process that updates; the states are on
disk and go through memory of that process, in the place of their part of the cell. What moves is the rest: in 16 bits
with a master 2 bytes there and 2 back. Of gradients it may be the largest elements alone (``sparse``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch

from forebay.cells import Cell, Span, cell_of, spans_of
from forebay.device.base import Completion, Device
from forebay.layout import Chunk
from forebay.runtime.homes import Checkout
from forebay.runtime.sparse import send_largest
from forebay.runtime.tensors import elements
from forebay.scheduling.routes import TO_DEVICE, TO_STORAGE, Route
from forebay.scheduling.staging import StagingRing
from forebay.states import Masters
from forebay.timeline import Lane

__all__ = ["Cells", "DeviceWay", "Load", "StorageWay", "Way"]


@dataclass(frozen=True)
class Load:
    """One chunk of ``block``, which keeps its ``masters`` so, that is to be updated in a cell: of the parameters in
    ``names``, whose gradients are
    at ``offsets`` (bytes) of ``gradients`` (1-D uint8, host) once all of ``landed`` are done. ``residuals``: what was
    not sent of them yet, if not all is (else empty)."""

    block: str
    chunk: Chunk
    masters: Masters
    names: Collection[str]
    parameters: Checkout
    states: Checkout
    gradients: torch.Tensor
    offsets: Mapping[str, int]
    landed: tuple[Completion, ...]
    residuals: Mapping[str, torch.Tensor]


class Way(ABC):
    """How a chunk gets to its cell and home again, on the lanes of ``route``. All tensors are 1-D uint8. ``density`` is
    the share of the elements of gradients that go there (None: they go as they are)."""

    route: Route
    density: float | None

    @abstractmethod
    def move(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Sequence[Completion], what: str
    ) -> Completion:
        """Queues a copy on ``lane``, there or home."""

    @abstractmethod
    def compute(self, job: Callable[[], None], after: Sequence[Completion], nbytes: int, what: str) -> Completion:
        """Queues the update of what is in a cell."""

    @abstractmethod
    def bring_gradients(
        self, load: Load, cell: Cell, spans: Sequence[Span], buffer: torch.Tensor, free: Sequence[Completion]
    ) -> list[Completion]:
        """Queues the way of the gradients of ``load`` to its ``cell`` in ``buffer``, which nobody uses any more when
        ``free`` are done."""


@final
class DeviceWay(Way):
    """To memory of the device."""

    route = TO_DEVICE
    density = None

    def __init__(self, device: Device) -> None:
        self._device = device

    def move(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Sequence[Completion], what: str
    ) -> Completion:
        return self._device.copy(lane, target, source, after=after, what=what)

    def compute(self, job: Callable[[], None], after: Sequence[Completion], nbytes: int, what: str) -> Completion:
        return self._device.launch(job, after=after, nbytes=nbytes, what=what)

    def bring_gradients(
        self, load: Load, cell: Cell, spans: Sequence[Span], buffer: torch.Tensor, free: Sequence[Completion]
    ) -> list[Completion]:
        return _bring_whole(self, load, cell, spans, buffer, free)


@final
class StorageWay(Way):
    """To memory of the host, which somebody else updates."""

    route = TO_STORAGE

    def __init__(self, device: Device, density: float | None) -> None:
        self._device = device
        self.density = density

    def move(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Sequence[Completion], what: str
    ) -> Completion:
        # numpy and not copy_: torch would start a team of its own for this lane.
        job = partial(np.copyto, target.numpy(), source.numpy())
        return self._device.submit(lane, job, after=after, nbytes=source.numel(), what=what)

    def compute(self, job: Callable[[], None], after: Sequence[Completion], nbytes: int, what: str) -> Completion:
        return self._device.submit(self.route.update, job, after=after, nbytes=nbytes, what=what)

    def bring_gradients(
        self, load: Load, cell: Cell, spans: Sequence[Span], buffer: torch.Tensor, free: Sequence[Completion]
    ) -> list[Completion]:
        if self.density is None:
            return _bring_whole(self, load, cell, spans, buffer, free)
        pieces = {piece.parameter.name: piece.parameter for piece in load.chunk.pieces}
        landed = {n: elements(load.gradients, p, load.offsets[n]) for n, p in pieces.items() if n in load.names}
        nbytes = sum(s.nbytes for p, s in zip(load.chunk.pieces, cell.sent, strict=True) if p.parameter.name in landed)
        job = partial(send_largest, load.chunk, cell, buffer, landed, load.residuals)
        # Gradients that are still landing must be there. Residuals are this lane's alone while updates are queued.
        after, what = (*free, *load.landed), f"load gradients of {load.block}"
        return [self._device.submit(self.route.bring, job, after=after, nbytes=nbytes, what=what)]


def _bring_whole(
    way: Way, load: Load, cell: Cell, spans: Sequence[Span], buffer: torch.Tensor, free: Sequence[Completion]
) -> list[Completion]:
    """``Way.bring_gradients`` of gradients as they are."""
    arrived = []
    for span in spans:
        start = cell.gradients + span.cell
        landed = load.gradients[span.landed : span.landed + span.nbytes]
        # Gradients that are still landing must be there before they are read.
        after, what = (*free, *load.landed), f"load gradients of {load.block}"
        arrived.append(way.move(way.route.bring, buffer[start : start + span.nbytes], landed, after, what))
    return arrived


@final
class Cells:
    """The cells at the end of ``way``: as many of ``cell`` bytes as ``window`` (1-D uint8) holds, beside ``widening``
    bytes in which one update at a time makes 16-bit gradients fp32 (None: there is nothing to widen)."""

    def __init__(self, way: Way, window: torch.Tensor, cell: int, widening: int) -> None:
        self._way = way
        count = (window.numel() - widening) // cell if cell else 0
        self._ring = StagingRing([window[i * cell : (i + 1) * cell] for i in range(count)])
        self.widening = window[count * cell : count * cell + widening] if widening else None

    def update(
        self, load: Load, compute: Callable[[Cell, torch.Tensor], None], touched: int
    ) -> tuple[Completion, Completion]:
        """Queues the way of a chunk to its cell, ``compute`` on that, and the way home.

        ``touched`` are the bytes that ``compute`` reads and writes. Returns the completions at which the gradients have
        been read and at which parameters and states are where they were checked out.
        """
        chunk = load.chunk
        cell, spans = cell_of(chunk, self._way.density), spans_of(chunk, load.offsets, load.names, load.masters)
        # Who had the cell before is home again before this one comes in; and so there is never more there than the
        # window.
        staging, free = self._ring.take(cell.nbytes)
        buffer = staging.view(cell.nbytes)
        arrived = self._bring(load, cell, spans, buffer, free)
        # After all of them, although the lane keeps their order: of what did not arrive whole nothing is written home.
        updated = self._way.compute(partial(compute, cell, buffer), arrived, touched, f"update {load.block}")
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
        arrived, way = list[Completion](), self._way

        def bring(start: int, source: torch.Tensor, after: tuple[Completion, ...], what: str) -> None:
            if source.numel():
                target = buffer[start : start + source.numel()]
                arrived.append(way.move(way.route.bring, target, source, (*free, *after), f"load {what} {load.block}"))

        if way.route.states:
            bring(0, load.states.buffer[: load.chunk.nbytes], load.states.ready, "states of")
        for span in spans:
            if not span.written:
                home = load.parameters.buffer[span.home : span.home + span.nbytes]
                bring(cell.parameters + span.cell, home, load.parameters.ready, "parameters of")
        arrived += way.bring_gradients(load, cell, spans, buffer, free)
        return arrived

    def _take_home(
        self, load: Load, cell: Cell, spans: list[Span], buffer: torch.Tensor, updated: Completion
    ) -> Completion:
        home, way = updated, self._way
        # Beside the update, what the loans wait for: a read from disk into the buffer that is written here, a fetch
        # that still reads the parameters which were not loaded.
        after = (updated, *load.parameters.ready, *load.states.ready)
        moves = [(load.states.buffer[: load.chunk.nbytes], 0, "states of ")] if way.route.states else []
        moves += [
            (load.parameters.buffer[span.home : span.home + span.nbytes], cell.parameters + span.cell, "")
            for span in spans
        ]
        for target, start, what in moves:
            if target.numel():
                source = buffer[start : start + target.numel()]
                home = way.move(way.route.take, target, source, after, f"store {what}{load.block}")
        return home
