"""Updates of blocks whose parameters, gradients and states are all on the device, in the compute order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch

from forebay.device.base import Device
from forebay.layout import Chunk, Piece
from forebay.optim.parts import Arithmetic, Held, Part
from forebay.optim.rules import UpdateRule
from forebay.runtime.applying import Copy, Task, batches, copy_of, landed, part_of
from forebay.runtime.blockstate import BlockState
from forebay.runtime.tensors import at_place, flat
from forebay.units import MiB
from forebay.workspaces import widened_copies, workspace_nbytes

__all__ = ["ResidentUpdates"]

WIDENED: Final = 256 * MiB
"""Bytes of widened gradients that a call has at the most: 16 chunks of the usual size."""


@dataclass
class _Call:
    """What goes through one call of the kernel: parts of one group at the same step, for which gradients, and masters
    of which half is kept, become fp32 in ``widened`` bytes of new memory."""

    task: Task
    parts: list[Part] = field(default_factory=list)
    widened: int = 0


@final
class ResidentUpdates:
    """Runs ``arithmetic``, the one of the device, over what is there for good. ``promised`` are the bytes of the device
    that the plan says a step takes.

    The plan has room for one chunk whose gradients are widened at a time. Each call costs the thread that launches: 46
    ms for the 275 chunks of a Llama of 1.1B (docs/log.md). What the plan's step has beyond that when no activation is
    there any more is used for as many chunks as fit.
    """

    def __init__(self, device: Device, rule: UpdateRule, arithmetic: Arithmetic, promised: int) -> None:
        self._device = device
        self._rule = rule
        self._arithmetic = arithmetic
        self._promised = promised
        # Where updates on the device are the host's kernels, nothing is widened.
        self._widens = torch.device(device.name).type != "cpu"
        self._room = 0

    def begin(self) -> None:
        """A step begins, whose backward is over."""
        if self._widens:
            self._room = max(0, min(WIDENED, self._promised - self._device.usage().live))

    def run(self, state: BlockState, tasks: Mapping[str, Task], gradients: Mapping[str, torch.Tensor]) -> None:
        """Updates the parameters in ``tasks`` of a block."""
        flattened = {p.name: flat(gradients[p.name], p) for p in state.block.parameters if p.name in tasks}
        calls: dict[tuple[int, int], _Call] = {}
        for chunk in state.layout.chunks:
            held = self._held(state, chunk)
            for task, pieces in batches(chunk, tasks):
                call = calls.setdefault((id(task.group), task.step), _Call(task))
                largest = max(p.stop - p.start for p in pieces)
                wide = sum((p.stop - p.start) * widened_copies(p.parameter, state.layout.masters) for p in pieces)
                widened = workspace_nbytes(state.layout.streams, largest, wide, (p.parameter for p in pieces))
                if call.parts and call.widened + widened > self._room:
                    self._make(call)
                call.parts += [part_of(piece, held(piece), landed(flattened, piece), None) for piece in pieces]
                call.widened += widened
        for call in calls.values():
            self._make(call)

    def _make(self, call: _Call) -> None:
        self._arithmetic.update(call.parts, call.task.step, call.task.group)
        call.parts, call.widened = [], 0

    def _held(self, state: BlockState, chunk: Chunk) -> Copy:
        """What the block has of each piece of ``chunk``. All of it stays where it is: each view is made once."""

        def held(piece: Piece) -> Held:
            key = piece.parameter.name, piece.start
            known = state.standing.get(key)
            if known is None:
                parameters, states = state.parameters.read(), state.states.read()
                content = states[chunk.offset : chunk.offset + chunk.nbytes]
                made = copy_of(state.layout, self._rule.state_names, chunk, content, partial(at_place, parameters))
                known = state.standing[key] = made(piece)
            return known

        return held
