"""Optimizer steps, chunk by chunk, where the states are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from forebay.device.base import Completion, Device
from forebay.kernels.team import Team
from forebay.layout import MASTER, STATE_ITEMSIZE, Chunk, Piece, needs_master
from forebay.optim.arithmetic import Arithmetic, Part, TorchArithmetic, host_arithmetic
from forebay.optim.rules import UpdateRule
from forebay.runtime.homes import Checkout
from forebay.runtime.store import BlockCopy, BlockState
from forebay.runtime.tensors import elements, flat
from forebay.timeline import Lane

__all__ = ["Task", "Updater"]


@dataclass(frozen=True)
class Task:
    """One parameter's part in a step: which step it is for this parameter (from 1), and its group's hyperparameters.

    ``group`` is a copy made by ``optimizer.step()``: a scheduler may change the group while the update is queued.
    """

    step: int
    group: Mapping[str, Any]


@final
class Updater:
    """Runs the update rule over blocks, on the host with the threads of ``team``. ``workspace`` (1-D uint8) is where
    16-bit gradients become fp32 for an arithmetic that does not read them itself."""

    def __init__(self, device: Device, rule: UpdateRule, workspace: torch.Tensor, team: Team) -> None:
        self._device = device
        self._rule = rule
        self._team = team
        self._on_host = host_arithmetic(rule, team, workspace)
        # Where the device's memory is the host's, one arithmetic does both: the place of an update changes no bit.
        same = torch.device(device.name).type == "cpu"
        self._on_device = host_arithmetic(rule, team, None) if same else TorchArithmetic(rule)

    def submit(self, state: BlockState, tasks: Mapping[str, Task], into: BlockCopy | None = None) -> Completion | None:
        """Queues the update of the parameters in ``tasks`` of a block whose gradients have landed.

        With ``into``, the block's spare copy, the outcome goes there, whole, and the current copy stands. Reads and
        writes of what is on disk are queued beside it; ``parameters.written`` of the copy and the gradients'
        ``read_by`` name the end. Returns the last job's completion; None if there is nothing to update.
        """
        block, source = state.block, state.current
        target = into or source
        # Gradients that are still landing must be there before the update reads them.
        landed = tuple(g.arrived for n, g in state.gradients.items() if n in tasks and g.arrived is not None)
        loan = source.parameters.check_out(0, source.parameters.nbytes, f"read {block.name}", target.parameters)
        done: Completion | None = None
        for chunk in state.layout.chunks:
            if target is source and not any(piece.parameter.name in tasks for piece in chunk.pieces):
                continue
            what = f"states of {block.name} at {chunk.offset}"
            states = source.states.check_out(chunk.offset, chunk.nbytes, f"read {what}", target.states)
            # The first job brings the parameters for all of them: the lane runs in order.
            loans = (states,) if done is not None else (states, loan)
            job = partial(self.run_chunk, state, chunk, loan.buffer, loans, tasks)
            done = self._device.submit(
                Lane.UPDATE,
                job,
                after=(*landed, *loan.ready, *states.ready),
                nbytes=_touched(state, chunk),
                what=f"update {block.name}",
            )
            target.states.check_in(states, chunk.offset, done, f"write {what}")
        if done is not None:
            # The lane runs in order, so the last chunk's job stands for all of them.
            target.parameters.check_in(loan, 0, done, f"write {block.name}")
            for name in tasks:
                state.gradients[name].read_by = done
        return done

    def run_resident(self, state: BlockState, tasks: Mapping[str, Task], gradients: Mapping[str, torch.Tensor]) -> None:
        """Updates a block whose parameters, gradients and states are on the device, in the compute order."""
        parameters, states = state.parameters.read(), state.states.read()
        flattened = {p.name: flat(gradients[p.name], p) for p in state.block.parameters if p.name in tasks}
        for chunk in state.layout.chunks:
            content = states[chunk.offset : chunk.offset + chunk.nbytes]
            self._apply(state, chunk, parameters, content, tasks, flattened, self._on_device)

    def run_chunk(
        self,
        state: BlockState,
        chunk: Chunk,
        parameters: torch.Tensor,
        loans: Sequence[Checkout],
        tasks: Mapping[str, Task],
    ) -> None:
        """The job of ``submit``: updates one chunk on the host, whose states are the first of ``loans``. Runs in the
        update lane's thread."""
        for loan in loans:
            loan.bring(self._team)
        gradients = {name: buffer.host for name, buffer in state.gradients.items() if name in tasks}
        self._apply(state, chunk, parameters, loans[0].buffer, tasks, gradients, self._on_host)

    def _apply(
        self,
        state: BlockState,
        chunk: Chunk,
        parameters: torch.Tensor,
        content: torch.Tensor,
        tasks: Mapping[str, Task],
        gradients: Mapping[str, torch.Tensor],
        arithmetic: Arithmetic,
    ) -> None:
        # Pieces of the same group at the same step go through one call of the kernel.
        batches: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in chunk.pieces:
            task = tasks.get(piece.parameter.name)
            if task is not None:
                batches[(id(task.group), task.step)].append(piece)
        typed = content.view(torch.float32)
        streams = {
            name: typed[i * chunk.elements : (i + 1) * chunk.elements] for i, name in enumerate(state.layout.streams)
        }
        for pieces in batches.values():
            task = tasks[pieces[0].parameter.name]
            parts = [self._part(piece, parameters, gradients, streams) for piece in pieces]
            arithmetic.update(parts, task.step, task.group)

    def _part(
        self,
        piece: Piece,
        parameters: torch.Tensor,
        gradients: Mapping[str, torch.Tensor],
        streams: Mapping[str, torch.Tensor],
    ) -> Part:
        span = slice(piece.offset, piece.offset + piece.stop - piece.start)
        return Part(
            elements(parameters, piece.parameter, piece.parameter.offset)[piece.start : piece.stop],
            gradients[piece.parameter.name][piece.start : piece.stop],
            streams[MASTER][span] if needs_master(piece.parameter) else None,
            tuple(streams[name][span] for name in self._rule.state_names),
        )


def _touched(state: BlockState, chunk: Chunk) -> int:
    """Bytes that updating a chunk has to move at least: states and parameters in and out, gradients in."""
    parameters = sum((p.stop - p.start) * p.parameter.nbytes // max(1, p.parameter.numel) for p in chunk.pieces)
    return 2 * chunk.elements * STATE_ITEMSIZE * len(state.layout.streams) + 3 * parameters
