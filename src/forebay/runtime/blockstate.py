"""One block at run time: its copies at home, its landed gradients, its steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch

from forebay.errors import ForebayError, GradientUsedUp
from forebay.layout import LOWER, MASTER, Chunk, Piece, StateLayout, has_stream, needs_master
from forebay.model import Block, Parameter
from forebay.optim.halves import halve, joined
from forebay.optim.parts import Held, Prepared
from forebay.plans import Placement
from forebay.runtime.deferred import Deferred
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.holds import Alternate, Hold, Outcome
from forebay.runtime.homes import Home
from forebay.runtime.tensors import at_place, state_view
from forebay.scheduling.gradients import GradientSlots
from forebay.states import TIES, Masters, form_of

__all__ = ["BlockCopy", "BlockState", "InBackward", "Passing", "Streamed"]


@dataclass(frozen=True)
class BlockCopy:
    """A block's parameters and optimizer states at home: what an update reads, or what it makes."""

    parameters: Home
    states: Home


@dataclass(frozen=True)
class Streamed:
    """What the update of a block elsewhere asks for beside its homes: its landed ``gradients`` (1-D uint8, host), each
    at one of ``offsets`` (bytes), and the place where the update is until it is queued. ``at_storage``: where its
    states are on disk; else on the device. ``residuals``: by parameter, what of its gradients was not sent yet (fp32,
    1-D), if not all is (else empty)."""

    gradients: torch.Tensor
    offsets: Mapping[str, int]
    deferred: Deferred
    at_storage: bool = False
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Passing:
    """Where gradients pass on the host: the ``slots`` that their block shares with others, each gradient at one of
    ``offsets`` (bytes) of the ``nbytes`` that it takes there."""

    slots: GradientSlots
    offsets: Mapping[str, int]
    nbytes: int


@final
class InBackward:
    """How far a block is that is updated in backward. ``names`` are the parameters that it trains; their gradients are
    ``passing`` through slots on the host, or (None) stay on the device until they are used up, as the block does."""

    def __init__(self, names: Iterable[str], passing: Passing | None) -> None:
        self.names = frozenset(names)
        self.passing = passing
        # The parameters whose gradients this pass has completed, and that wait for the others of the block; and those
        # whose gradients were used up for a step that is not taken yet.
        self.complete: set[str] = set()
        self.used_up: set[str] = set()


@final
class BlockState:
    """One block at run time: its homes, its landed gradients, and how many steps each parameter has taken.

    ``current`` is the copy that everybody reads. A block that speculates has a ``spare`` one, in which the outcome of
    the next step may be made before the step is asked for. A block that is updated on the device, or beside the
    storage, is ``streamed``, one that is updated in backward is ``early``. A block that a checkpoint names in place has
    an ``alternate``. ``prepared`` are the updates that were made ready for it, by where
    they read and write; ``standing`` is what one that stays on the device has of each piece, by its parameter and its
    first element.
    """

    def __init__(
        self,
        block: Block,
        placement: Placement,
        layout: StateLayout,
        parameters: Home,
        states: Home,
        gradients: Mapping[str, GradientBuffer],
        spare: BlockCopy | None = None,
        streamed: Streamed | None = None,
        early: InBackward | None = None,
        alternate: Alternate | None = None,
    ) -> None:
        self.block = block
        self.placement = placement
        self.layout = layout
        self.current = self._first = BlockCopy(parameters, states)
        self.spare = spare
        self.streamed = streamed
        self.early = early
        self.alternate = alternate
        self.gradients = gradients
        self.steps = {p.name: 0 for p in block.parameters if p.trainable}
        self.prepared: dict[object, Prepared] = {}
        self.standing: dict[tuple[str, int], Held] = {}

    @property
    def parameters(self) -> Home:
        """The current copy of the parameters. Who asks for it waits for ``written``, so no update may be missing."""
        self.queue_deferred()
        return self.current.parameters

    @property
    def states(self) -> Home:
        """The current copy of the optimizer states, like ``parameters``."""
        self.queue_deferred()
        return self.current.states

    @property
    def residuals(self) -> Mapping[str, torch.Tensor]:
        """By parameter, what of its gradient no update has had yet (fp32, 1-D, in the order of memory); empty where
        they have all of it. The caller has waited for all updates."""
        return {} if self.streamed is None else self.streamed.residuals

    def upper_halves(self) -> torch.Tensor:
        """The parameters as they are at home (1-D uint8), to be read before the next call (``Home.look``), where
        masters are kept as halves, one of which they are; else nothing."""
        if self.layout.masters is Masters.LOWER:
            return self.parameters.look(0, self.parameters.nbytes)
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    @contextmanager
    def upper_halves_edited(self) -> Iterator[torch.Tensor]:
        """``upper_halves``, to be changed; they are at home at its end."""
        if self.layout.masters is Masters.LOWER:
            with self.parameters.edit(0, self.parameters.nbytes) as content:
                yield content
        else:
            yield torch.empty(0, dtype=torch.uint8, device="cpu")

    def expect_not_updated(self) -> None:
        """Raises ``GradientUsedUp`` while the block is at home as a step leaves it that is not taken yet: whatever
        reads it for the pass that goes on would read the parameters of the next one."""
        if self.early is not None and self.early.used_up:
            raise GradientUsedUp(
                f"block {self.block.name} was updated in backward and is read again before optimizer.step(): take the "
                f"step first; if backward itself comes back to the block, prepare the model with update='step'"
            )

    def queue_deferred(self) -> None:
        """Queues the update that a step has asked for, if it is not queued yet."""
        if self.streamed is not None:
            self.streamed.deferred.now()

    def exchange(self) -> None:
        """The spare copy becomes the current one, and the current one the spare. What of that a checkpoint has stays as
        it is: the other place is the spare one instead."""
        if self.spare is None:
            raise ForebayError(f"block {self.block.name} has one copy at home, the plan does not speculate on it")
        before, kept = self.current, self._kept
        self.current, self.spare = self.spare, before if kept is None else kept.instead_of(before)
        if kept is not None:
            kept.turned(before)

    @property
    def target(self) -> BlockCopy:
        """Where an update writes: the current copy, unless a checkpoint has it."""
        kept = self._kept
        return self.current if kept is None else kept.instead_of(self.current)

    def turn(self) -> None:
        """What was written where the checkpoint does not have it is the current copy from now on."""
        kept = self._kept
        if kept is None:
            raise ForebayError(f"no checkpoint has the current copy of block {self.block.name}: it is written in place")
        before, self.current = self.current, kept.instead_of(self.current)
        kept.turned(before)

    @property
    def _kept(self) -> Alternate | None:
        """The ``alternate`` of a block whose current copy a checkpoint has."""
        return None if self.alternate is None or self.alternate.hold is Hold.FREE else self.alternate

    def keep(self, coming: Outcome) -> None:
        """The current copy is what the checkpoint ``coming`` has."""
        if self.alternate is not None:
            self.alternate.keep(coming)

    def come_home(self) -> None:
        """Has the parameters in the copy that was the current one at first. Only for a session that ends: the states do
        not come with them. The caller has waited for all jobs."""
        if self.current is not self._first:
            self._first.parameters.copy_from(self.parameters, [(0, self.parameters.nbytes)])
            self.current = self._first

    def settle(self) -> None:
        """Waits until every update of this block has been written to its homes."""
        self.parameters.settle()
        self.states.settle()

    def settle_save(self) -> None:
        """Waits until no checkpoint reads what is at home in memory."""
        self.current.parameters.settle_save()
        self.current.states.settle_save()

    @property
    def said(self) -> tuple[str, ...]:
        """Names of what its states say, masters first, however these are kept."""
        own = (MASTER,) if self.layout.has_masters else ()
        return (*own, *(s for s in self.layout.streams if s not in (MASTER, LOWER)))

    def streams_of(self, parameter: Parameter) -> tuple[str, ...]:
        """Names of the state streams that mean something for ``parameter``, its master among them if it has one."""
        return tuple(name for name in self.said if has_stream(name, parameter))

    def gathered(self, names: Iterable[str], parameter: Parameter) -> dict[str, torch.Tensor]:
        """Copies on the host of state streams of ``parameter`` (1-D), by their names. One chunk of the block is looked
        at after the other: of what is on disk no more is in memory."""
        forms = {name: form_of(name) for name in names}
        made = {
            n: torch.empty(f.count_for(parameter), dtype=getattr(torch, f.dtype), device="cpu")
            for n, f in forms.items()
        }
        upper = self.upper_halves()
        for chunk in self._chunks_of({parameter.name}):
            content = self.states.look(chunk.offset, chunk.nbytes)
            for name, form in forms.items():
                for piece, values in self.values(name, chunk, content, upper, of=parameter):
                    start, _ = piece.values(form)
                    made[name][start : start + values.numel()] = values
        return made

    def parts(self, name: str, parameter: Parameter) -> Iterator[torch.Tensor]:
        """One state stream of ``parameter`` in the order of its elements, part by part (1-D), each to be read before
        the next one is asked for."""
        upper = self.upper_halves()
        for chunk in self._chunks_of({parameter.name}):
            content = self.states.look(chunk.offset, chunk.nbytes)
            for _, values in self.values(name, chunk, content, upper, of=parameter):
                yield values

    def write_streams(self, given: Mapping[str, Mapping[str, torch.Tensor]], parameters: torch.Tensor) -> None:
        """Writes the state streams that are ``given`` (1-D, of any dtype and device), by their parameters and names,
        chunk by chunk like ``gathered``. Of a master that is kept as halves the upper one goes into ``parameters``, all
        of the block."""
        for chunk in self._chunks_of(given):
            with self.states.edit(chunk.offset, chunk.nbytes) as content:
                for piece in chunk.pieces:
                    for name, values in given.get(piece.parameter.name, {}).items():
                        start, count = piece.values(form_of(name))
                        self.write_piece(name, chunk, piece, content, parameters, values[start : start + count])

    def _chunks_of(self, names: Collection[str]) -> Iterator[Chunk]:
        """The chunks with states of the parameters in ``names``."""
        for chunk in self.layout.chunks:
            if chunk.nbytes and any(piece.parameter.name in names for piece in chunk.pieces):
                yield chunk

    def values(
        self,
        name: str,
        chunk: Chunk,
        content: torch.Tensor,
        parameters: torch.Tensor,
        of: Parameter | None = None,
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """What one stream of ``chunk`` says of each piece that has it (1-D), or of those ``of`` one parameter;
        ``content`` are the bytes of the chunk, ``parameters`` those of the block. Where masters are kept as halves
        these are made of them, and their ties are no part of the state that keeps them: copies, and else what is in
        ``content``."""
        for piece in chunk.pieces:
            if of is not None and piece.parameter.name != of.name:
                continue
            halves = self.layout.masters is Masters.LOWER and needs_master(piece.parameter)
            if name == MASTER and halves:
                lower, ties = (self._view(stream, chunk, content, piece) for stream in (LOWER, TIES))
                yield piece, joined(at_place(parameters, piece), lower, ties)
            elif has_stream(name, piece.parameter):
                view = self._view(name, chunk, content, piece)
                yield piece, view.abs() if name == TIES and halves else view

    def write_piece(
        self,
        name: str,
        chunk: Chunk,
        piece: Piece,
        content: torch.Tensor,
        parameters: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes what one stream says of ``piece`` (``values``)."""
        halves = self.layout.masters is Masters.LOWER and needs_master(piece.parameter)
        if not halves or name not in (MASTER, TIES):
            self._view(name, chunk, content, piece).copy_(value)
            return
        ties, lower = (self._view(stream, chunk, content, piece) for stream in (TIES, LOWER))
        upper = at_place(parameters, piece)
        # Each of the two is written with the other one as it is.
        master = value.to(torch.float32, copy=True) if name == MASTER else joined(upper, lower, ties)
        ties.copy_(value) if name == TIES else ties.abs_()
        halve([master.to(ties.device)], [upper], [lower], [ties], [torch.empty_like(ties)])

    def views(self, name: str, chunk: Chunk, content: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The values of one state stream in ``content``, the bytes of ``chunk`` (1-D uint8): piece by piece, 1-D."""
        for piece in chunk.pieces:
            yield piece, self._view(name, chunk, content, piece)

    def _view(self, name: str, chunk: Chunk, content: torch.Tensor, piece: Piece) -> torch.Tensor:
        start, nbytes = self.layout.spans(chunk)[name]
        return state_view(content[start : start + nbytes], name, chunk, piece)
