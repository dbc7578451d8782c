"""Gradients that wait for the turn of their block, where blocks are updated in turns (``scheduling.rounds``).

A step takes what has landed of every block. That of a block which has its turn goes into the update; that of another
stays where it landed, ``param.grad`` is given up, and the next gradient is added to it on the host. So ``zero_grad()``
behind the step drops nothing that waits, and what clipping and the update see of a block is the sum since its last
turn. A step that is left out drops that sum with its own gradients: by then they are one number.

What is saved has no place for gradients: a ``state_dict``, of model or optimizer, and a checkpoint give every block its
turn first, and the next round begins behind them. In the middle of a step they are refused, since what has landed by
then is not a step's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch

from forebay.errors import UsageError
from forebay.runtime.blockstate import BlockState
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.scheduling.rounds import Rounds

__all__ = ["Waiting"]


@final
class Waiting:
    """The turns of one session, and which of ``blocks`` wait for theirs."""

    def __init__(self, blocks: Mapping[str, BlockState], rounds: Rounds) -> None:
        self._blocks = blocks
        self._rounds = rounds
        self._step = 0
        self._begun = False

    def begin(self) -> None:
        """A training step begins."""
        self._begun = True

    def end(self) -> None:
        """The step is asked for, or given up."""
        self._begun = False

    def has_turn(self, block: str) -> bool:
        """Whether the step that is asked for updates ``block``."""
        return self._rounds.has_turn(block, self._step)

    def turn(self) -> None:
        """Those that had their turn are updated: the turn is another's."""
        self._step += 1

    def begin_round(self) -> None:
        """Nobody waits any more."""
        self._step = 0

    def forget(self) -> None:
        """What waits is dropped, and a round begins."""
        for state in self._blocks.values():
            for buffer in state.gradients.values():
                buffer.waiting = False
        self.begin_round()

    def put(self, buffer: GradientBuffer) -> None:
        """A step has taken what has landed, and no update reads it yet: the next gradient is added to it."""
        buffer.waiting = True
        buffer.generation += 1  # who holds the gradient must not take the sum for it

    def receive(self, buffer: GradientBuffer, gradient: torch.Tensor) -> None:
        """Lands ``gradient``, the first of a step: added to what waits, or in the place of what is used up."""
        buffer.adds_up = buffer.waiting
        if buffer.waiting:
            buffer.waiting = False
            buffer.accumulate(gradient)
        else:
            buffer.land(gradient)

    def owed(self) -> Iterable[BlockState]:
        """The blocks of which something waits. Raises ``UsageError`` in the middle of a step, but for the first of a
        round: what waited is among what has landed since."""
        if self._rounds.length == 1 or not self._step:
            return ()  # asked for each parameter of a state_dict
        if self._begun:
            raise UsageError(
                "this plan updates blocks in turns, and a state_dict or a checkpoint first gives all of them theirs: "
                "it cannot be between the forward of a training step and its optimizer.step(); move it before the "
                "forward or behind the step"
            )
        return [s for s in self._blocks.values() if any(g.waiting for g in s.gradients.values())]
