"""Optimizer steps, chunk by chunk: where the states are, or on the device, to which they are brought for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final

import torch

from forebay.cells import Cell
from forebay.device.base import Completion, Device
from forebay.errors import ForebayError
from forebay.kernels.team import Team
from forebay.layout import Chunk, Piece, untrained_nbytes
from forebay.optim.choosing import host_arithmetic, torch_arithmetic
from forebay.optim.parts import Arithmetic, Prepared, copied
from forebay.optim.rules import UpdateRule
from forebay.optim.scaling import Span, multiply
from forebay.priority import step_back
from forebay.runtime.applying import (
    Copy,
    Task,
    batches,
    copy_of,
    landed,
    part_of,
    update_cell,
)
from forebay.runtime.blockstate import BlockCopy, BlockState
from forebay.runtime.cells import Cells, Load
from forebay.runtime.homes import Checkout
from forebay.runtime.resident import ResidentUpdates
from forebay.runtime.storage_side import StorageSide
from forebay.runtime.tensors import at_place, state_view
from forebay.timeline import Lane

__all__ = ["KEPT", "Updater"]

KEPT: Final = 16
"""Updates of a chunk that are kept ready: from either copy into the other and in place in both, in several groups."""


@final
class Updater:
    """Runs the update rule over blocks, on the host with the threads of ``team``. ``workspace`` (1-D uint8) is where
    16-bit gradients become fp32 for an arithmetic that does not read them itself. ``cells`` are where blocks are
    updated that are brought to the device for it; ``beside`` is who updates those whose states stay on disk.
    ``overlap``: updates on the host run beside compute, and leave the cores to what the device waits for. ``resident``
    updates what stays on the device, within the ``promised`` bytes of it that a step takes."""

    def __init__(
        self,
        device: Device,
        rule: UpdateRule,
        workspace: torch.Tensor,
        team: Team,
        cells: Cells | None = None,
        beside: StorageSide | None = None,
        *,
        overlap: bool = False,
        promised: int = 0,
    ) -> None:
        self._device = device
        self._begin: Callable[[], None] = step_back if overlap else _nothing
        self._rule = rule
        self._team = team
        self._on_host = host_arithmetic(rule, team, workspace)
        # Where the device's memory is the host's, one arithmetic does both: the place of an update changes no bit.
        self._same = torch.device(device.name).type == "cpu"
        self.resident = ResidentUpdates(device, rule, self._arithmetic_there(None), promised)
        self._cells = cells
        self._beside = beside

    def submit(self, state: BlockState, tasks: Mapping[str, Task], into: BlockCopy | None = None) -> Completion | None:
        """Queues the update of the parameters in ``tasks`` of a block whose gradients have landed.

        With ``into``, the block's spare copy, the outcome goes there, whole, and the current copy stands: what has no
        gradient is copied. Where a checkpoint has the current copy the outcome goes to the other place on disk, which
        is the current copy then. Reads and writes of what is on disk are queued beside it; ``parameters.written`` of
        the copy and the gradients' ``read_by`` name the end. Returns the last job's completion; None if there is
        nothing to update.
        """
        block, source = state.block, state.current
        target = into or state.target
        # Gradients that are still landing must be there before the update reads them.
        arrived = tuple(g.arrived for n, g in state.gradients.items() if n in tasks and g.arrived is not None)
        loan = source.parameters.check_out(0, source.parameters.nbytes, f"read {block.name}", target.parameters)
        # Where they are now: by the time that a job runs, the gradients of the next step may have another place.
        gradients = {name: state.gradients[name].host for name in tasks}
        factors = self._factors(state, tasks)
        read: Completion | None = None
        done: Completion | None = None
        for number, chunk in enumerate(state.layout.chunks):
            if target is source and not any(piece.parameter.name in tasks for piece in chunk.pieces):
                continue
            what = f"states of {block.name} at {chunk.offset}"
            states = source.states.check_out(chunk.offset, chunk.nbytes, f"read {what}", target.states)
            if state.streamed is not None:
                read, done = self._in_cell(state, number, loan, states, arrived, tasks)
            else:
                # What of the block is in no chunk goes along with the first.
                along = 2 * untrained_nbytes(block) if loan.apart and done is None else 0
                read = done = self._device.submit(
                    Lane.UPDATE,
                    partial(self.run_chunk, state, chunk, loan, states, tasks, gradients, factors),
                    after=(*arrived, *loan.ready, *states.ready),
                    nbytes=state.layout.touched(chunk) + along,
                    what=f"update {block.name}",
                )
            target.states.check_in(states, chunk.offset, done, f"write {what}")
        if done is not None:
            # The lane runs in order, so the last chunk's job stands for all of them.
            target.parameters.check_in(loan, 0, done, f"write {block.name}")
            for name in tasks:
                state.gradients[name].read_by = read
                if name in factors:
                    state.gradients[name].multiplied_by(done)
            if target is not source and into is None:
                state.turn()
        return done

    def _factors(self, state: BlockState, tasks: Mapping[str, Task]) -> Mapping[str, float]:
        """What the jobs of a block's update at home multiply gradients by, in place, before they read them. An update
        elsewhere finds them multiplied."""
        due = {name: state.gradients[name] for name in tasks}
        if state.streamed is not None:
            for gradient in due.values():
                gradient.multiply()
            return {}
        return {name: gradient.factor for name, gradient in due.items() if gradient.factor is not None}

    def _in_cell(
        self,
        state: BlockState,
        number: int,
        loan: Checkout,
        states: Checkout,
        arrived: tuple[Completion, ...],
        tasks: Mapping[str, Task],
    ) -> tuple[Completion, Completion]:
        """Queues the update of chunk ``number`` elsewhere: when its gradients have been read, and when it is done."""
        name, chunk, streamed = state.block.name, state.layout.chunks[number], state.streamed
        if streamed is None:
            raise ForebayError(f"the plan updates block {name} at home")
        touched = state.layout.touched(chunk)
        landed = streamed.gradients, streamed.offsets, arrived, streamed.residuals
        load = Load(name, chunk, state.layout.masters, tasks.keys(), loan, states, *landed)
        if streamed.at_storage:
            if self._beside is None:
                raise ForebayError(f"nobody is beside the storage to update block {name}")
            return self._beside.update(load, number, tasks, touched)
        if self._cells is None:
            raise ForebayError(f"the plan does not update block {name} on the device")
        return self._cells.update(load, partial(self.run_cell, state, chunk, tasks), touched)

    def run_chunk(
        self,
        state: BlockState,
        chunk: Chunk,
        loan: Checkout,
        states: Checkout,
        tasks: Mapping[str, Task],
        gradients: Mapping[str, torch.Tensor],
        factors: Mapping[str, float],
    ) -> None:
        """The job of ``submit``: updates one chunk on the host, whose ``states`` these are; ``loan`` are the parameters
        of the block, ``gradients`` the landed ones of those in ``tasks``, which are multiplied by ``factors`` first.
        Runs in the update lane's thread."""
        # Once: the lane has one thread. Updates take all cores there are, and the model's own Python goes first, which
        # tells the device what to do; so do copies where the device's memory is the host's.
        begin, self._begin = self._begin, _nothing
        begin()
        if loan.apart or states.apart:
            self._take_along(state, chunk, loan, states, tasks)
        if factors:
            due = [(piece, piece.parameter.name) for piece in chunk.pieces if piece.parameter.name in factors]
            multiply(self._team, [Span(gradients[name], p.start, p.stop, factors[name]) for p, name in due])
        for task, pieces in batches(chunk, tasks):
            self._prepared(state, chunk, loan, states, pieces, gradients)(task.step, task.group)

    def _prepared(
        self,
        state: BlockState,
        chunk: Chunk,
        loan: Checkout,
        states: Checkout,
        pieces: Sequence[Piece],
        gradients: Mapping[str, torch.Tensor],
    ) -> Prepared:
        """The update of ``pieces`` of a chunk. What is in memory has its place for good, or one of a few places, as
        gradients that pass have: it is made ready once for each.

        Every view of a tensor gives the interpreter's lock away, and while the model's own Python runs, an update would
        wait for it each time.
        """
        names = [piece.parameter.name for piece in pieces]
        homes = (states.source, states.buffer, loan.source, loan.buffer)
        places = (tensor.data_ptr() for tensor in (*homes, *(gradients[name] for name in names)))
        key = (*((piece.parameter.name, piece.start) for piece in pieces), *places)
        known = state.prepared.get(key)
        if known is not None:
            return known
        held = self._copy(state, chunk, states.source, loan.source)
        into: Copy | None = None
        if loan.apart or states.apart:
            into = self._copy(state, chunk, states.buffer, loan.buffer)
        made = self._on_host.prepared([part_of(p, held(p), landed(gradients, p), into) for p in pieces])
        if loan.staging is None and states.staging is None:
            if len(state.prepared) >= KEPT * len(state.layout.chunks):
                state.prepared.clear()  # at each step others have a gradient, as experts do: nothing is found again
            state.prepared[key] = made
        return made

    def run_cell(
        self, state: BlockState, chunk: Chunk, tasks: Mapping[str, Task], cell: Cell, buffer: torch.Tensor
    ) -> None:
        """Updates one chunk in the ``buffer`` of its cell, on the device. Runs in the thread of that lane."""
        # Made for each chunk: it holds memory of the device, and would hold it longer than the cells do.
        arithmetic = self._arithmetic_there(None if self._cells is None else self._cells.widening)
        update_cell(state.layout, self._rule.state_names, chunk, tasks, buffer[: chunk.nbytes], buffer, arithmetic)

    def _take_along(
        self, state: BlockState, chunk: Chunk, loan: Checkout, states: Checkout, tasks: Mapping[str, Task]
    ) -> None:
        """Copies what an update into another copy of the block does not make: what has no gradient in this step, and
        with the first chunk what never has one."""
        team = self._team
        for piece in chunk.pieces:
            if piece.parameter.name in tasks:
                continue
            copied(team, at_place(loan.buffer, piece), at_place(loan.source, piece))
            for name, (at, nbytes) in state.layout.spans(chunk).items():
                there, here = (content[at : at + nbytes] for content in (states.buffer, states.source))
                copied(team, state_view(there, name, chunk, piece), state_view(here, name, chunk, piece))
        if chunk is state.layout.chunks[0]:
            for parameter in state.block.parameters:
                if not parameter.trainable:
                    span = slice(parameter.offset, parameter.offset + parameter.nbytes)
                    copied(team, loan.buffer[span], loan.source[span])

    def _arithmetic_there(self, workspace: torch.Tensor | None) -> Arithmetic:
        """Who updates what is on the device."""
        if self._same:
            return host_arithmetic(self._rule, self._team, workspace)
        return torch_arithmetic(self._rule, workspace)

    def _copy(self, state: BlockState, chunk: Chunk, content: torch.Tensor, parameters: torch.Tensor) -> Copy:
        """What one copy of ``chunk`` has of each piece; ``content`` are its states, ``parameters`` the block's."""
        return copy_of(state.layout, self._rule.state_names, chunk, content, partial(at_place, parameters))


def _nothing() -> None:
    return
