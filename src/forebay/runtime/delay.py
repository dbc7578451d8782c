"""Updates that come a step late: which slots do not show the update of the last step yet.

The delayed parameter update of ZeRO-Offload (Ren et al., USENIX ATC 2021, section 5.2). Step i queues its update as
always, out of the gradients and with the hyperparameters of step i; it writes the home of each block. What changes is
when the device sees it: the slots keep what forward and backward of step i have read, and step i + 1 reads the same.
Only when step i + 1 is asked for do they get what step i has made, right before the update of step i + 1 is queued.

    compute    forward, backward of i | forward, backward of i + 1        | ... of i + 2
    update                              step i                              step i + 1
    slots      what step i - 2 made     the same: what step i - 1 made ...  what step i made

A pass without gradients and a ``state_dict`` see every update (``show``), and so does the step behind them, since there
is one copy of the parameters on the device. So they have no place in the middle of a step, whose backward asks for what
its forward has read: between a forward and the ``optimizer.step()`` behind it they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import final

from forebay.errors import UsageError
from forebay.scheduling.slots import SlotPool

__all__ = ["Delay"]


@final
class Delay:
    """The delay of one plan: none before ``after`` steps have been taken, none at all if that is None."""

    def __init__(self, pool: SlotPool, after: int | None) -> None:
        self._pool = pool
        self._after = after
        self._pending: list[str] = []
        self._begun = False

    def begin(self) -> None:
        """A training step begins: what its forward reads its backward is to read too."""
        self._begun = True

    def holds(self, steps: Callable[[], int]) -> bool:
        """Whether the next step is delayed; ``steps`` says how many have been taken."""
        return self._after is not None and steps() >= self._after

    def end(self) -> None:
        """A step is about to be queued: no backward comes any more that asks for the present parameters. Raises what
        stopped the update that they are without; the same call tries again what is left."""
        self._begun = False
        self._forget()

    def turn(self, blocks: Sequence[str]) -> None:
        """``blocks`` are updated by a delayed step that is about to be queued, in the order in which forward wants
        them. The slots get what the step before has made of them."""
        self.end()
        for block in blocks:
            # Queued here, and not when forward asks: the copy has to leave the home before the update of this step
            # writes there, and that update waits for the fetches that were queued before it.
            self._pool.bring(block)
        self._pending.extend(blocks)

    def show(self) -> None:
        """Has whatever reads the parameters next see every update. Raises ``UsageError`` in the middle of a step."""
        if self._pending and self._begun:
            raise UsageError(
                "this plan delays updates, which a forward without gradients and a state_dict see at once: neither can "
                "be between the forward of a training step and its optimizer.step(); move it before the forward or "
                "behind the step, and evaluate under torch.no_grad()"
            )
        self._forget()

    def _forget(self) -> None:
        """The slots of pending blocks are stale: the next fetch waits for their update."""
        pending = self._pending
        try:
            # All of them, whatever one raises whose update has failed: a slot that stayed would never be fetched again.
            with ExitStack() as forgetting:
                for block in pending:
                    forgetting.callback(self._pool.invalidate, block)
        finally:
            # What could not be given up, since somebody reads it, is stale still.
            self._pending = [block for block in pending if self._pool.slot_of(block) is not None]
