"""Optimizer steps, chunk by chunk, where the states are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from forebay.device.base import Completion, Device
from forebay.layout import MASTER, STATE_ITEMSIZE, Chunk, Piece, needs_master
from forebay.optim.rules import UpdateRule
from forebay.runtime.store import BlockState
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
    """Runs the update rule over blocks. ``workspace`` (1-D uint8) is where 16-bit gradients become fp32."""

    def __init__(self, device: Device, rule: UpdateRule, workspace: torch.Tensor) -> None:
        self._device = device
        self._rule = rule
        self._workspace = workspace

    def submit(self, state: BlockState, tasks: Mapping[str, Task]) -> None:
        """Queues the update of the parameters in ``tasks`` of a block whose gradients have landed.

        Reads and writes of what is on disk are queued beside it; ``state.parameters.written`` and the gradients'
        ``read_by`` name the end.
        """
        block = state.block
        # Gradients that are still landing must be there before the update reads them.
        landed = tuple(g.arrived for n, g in state.gradients.items() if n in tasks and g.arrived is not None)
        loan = state.parameters.check_out(0, state.parameters.nbytes, f"read {block.name}")
        done: Completion | None = None
        for chunk in state.layout.chunks:
            if not any(piece.parameter.name in tasks for piece in chunk.pieces):
                continue
            what = f"states of {block.name} at {chunk.offset}"
            states = state.states.check_out(chunk.offset, chunk.nbytes, f"read {what}")
            job = partial(self.run_chunk, state, chunk, loan.buffer, states.buffer, tasks)
            done = self._device.submit(
                Lane.UPDATE,
                job,
                after=(*landed, *loan.ready, *states.ready),
                nbytes=_touched(state, chunk),
                what=f"update {block.name}",
            )
            state.states.check_in(states, chunk.offset, done, f"write {what}")
        if done is None:
            return
        # The lane runs in order, so the last chunk's job stands for all of them.
        state.parameters.check_in(loan, 0, done, f"write {block.name}")
        for name in tasks:
            state.gradients[name].read_by = done

    def run_resident(self, state: BlockState, tasks: Mapping[str, Task], gradients: Mapping[str, torch.Tensor]) -> None:
        """Updates a block whose parameters, gradients and states are on the device, in the compute order."""
        parameters, states = state.parameters.read(), state.states.read()
        flattened = {p.name: flat(gradients[p.name], p) for p in state.block.parameters if p.name in tasks}
        for chunk in state.layout.chunks:
            content = states[chunk.offset : chunk.offset + chunk.nbytes]
            self._apply(state, chunk, parameters, content, tasks, flattened, None)

    def run_chunk(
        self,
        state: BlockState,
        chunk: Chunk,
        parameters: torch.Tensor,
        content: torch.Tensor,
        tasks: Mapping[str, Task],
    ) -> None:
        """The job of ``submit``: updates one chunk on the host. Runs in the update lane's thread."""
        gradients = {name: buffer.host for name, buffer in state.gradients.items() if name in tasks}
        self._apply(state, chunk, parameters, content, tasks, gradients, self._workspace)

    def _apply(
        self,
        state: BlockState,
        chunk: Chunk,
        parameters: torch.Tensor,
        content: torch.Tensor,
        tasks: Mapping[str, Task],
        gradients: Mapping[str, torch.Tensor],
        workspace: torch.Tensor | None,
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
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            narrow: list[tuple[torch.Tensor, torch.Tensor]] = []
            for piece in pieces:
                own = elements(parameters, piece.parameter, piece.parameter.offset)[piece.start : piece.stop]
                gradient = gradients[piece.parameter.name][piece.start : piece.stop]
                if needs_master(piece.parameter):
                    master = streams[MASTER][piece.offset : piece.offset + own.numel()]
                    narrow.append((own, master))
                    own, gradient = master, _widen(gradient, piece, workspace)
                targets.append(own)
                sources.append(gradient)
            states = {
                name: [streams[name][p.offset : p.offset + p.stop - p.start] for p in pieces]
                for name in self._rule.state_names
            }
            self._rule.update(targets, sources, states, task.step, task.group)
            for own, master in narrow:
                own.copy_(master)


def _widen(gradient: torch.Tensor, piece: Piece, workspace: torch.Tensor | None) -> torch.Tensor:
    """The gradient in fp32: in the workspace at the piece's own place, or in new memory on the device."""
    if workspace is None:
        return gradient.float()
    start = piece.offset * STATE_ITEMSIZE
    return workspace[start : start + gradient.numel() * STATE_ITEMSIZE].view(torch.float32).copy_(gradient)


def _touched(state: BlockState, chunk: Chunk) -> int:
    """Bytes that updating a chunk has to move at least: states and parameters in and out, gradients in."""
    parameters = sum((p.stop - p.start) * p.parameter.nbytes // max(1, p.parameter.numel) for p in chunk.pieces)
    return 2 * chunk.elements * STATE_ITEMSIZE * len(state.layout.streams) + 3 * parameters
