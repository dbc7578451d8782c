"""Which blocks an optimizer step updates, where they are updated in turns. No torch.

The lock-free update of Angel-PTM (Nie et al., VLDB 2023) goes round the layers while the device computes: it takes what
of a layer's gradients has been added up since it was there last, and the next forward that wants the layer has the new
parameters. How many steps a round takes is a matter of time there; here it is a number of the plan, so that a run can
be repeated.

    step       0     1     2     3     4     ...       (rounds of three steps)
    updated    A D   B E   C F   A D   B E   ...       out of the gradients of up to three steps
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from forebay.errors import ConfigError
from forebay.plans import Plan

__all__ = ["Rounds"]


@final
class Rounds:
    """The turns of ``blocks``, in the order of the model: every ``length``-th has its turn in the same step, so that
    the updates of a step are for blocks that forward wants far apart, and each has time before it is wanted. Raises
    ``ConfigError`` for a length below 1."""

    def __init__(self, blocks: Iterable[str], length: int) -> None:
        if length < 1:
            raise ConfigError(f"a round takes 1 step or more, got {length}")
        self._turns = {name: place % length for place, name in enumerate(blocks)}
        self.length = length

    @classmethod
    def of(cls, plan: Plan) -> Rounds:
        """Those of ``plan``: of all blocks that are not at home on the device as a whole."""
        return cls((p.block for p in plan.placements if not p.resident), plan.streaming.update_every)

    def has_turn(self, block: str, step: int) -> bool:
        """Whether ``block`` is updated in the step of that number, from 0 on. One that has no turns always is."""
        turn = self._turns.get(block)
        return turn is None or turn == step % self.length
