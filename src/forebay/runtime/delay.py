"""Updates that come a step late: which slots do not show the update of the last step yet.

The delayed parameter update of ZeRO-Offload (Ren et al., USENIX ATC 2021, section 5.2). Step i queues its update as
always, out of the gradients and with the hyperparameters of step i; it writes the home of each block. What changes is
when the device sees it: the slots keep what forward and backward of step i have read, and step i + 1 reads the same.
Only when step i + 1 is asked for do they get what step i has made, right before the update of step i + 1 is queued.

    compute    forward, backward of i | forward, backward of i + 1        | ... of i + 2
    update                              step i                              step i + 1
    slots      what step i - 2 made     the same: what step i - 1 made ...  what step i made

Who looks at the parameters between two steps sees every update (``show``): a pass without gradients, a ``state_dict``.
So does the next step then, since there is one copy of them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

from forebay.scheduling.slots import SlotPool

__all__ = ["Delay"]


@final
class Delay:
    """The delay of one plan: none before ``after`` steps have been taken, none at all if that is None."""

    def __init__(self, pool: SlotPool, after: int | None) -> None:
        self._pool = pool
        self._after = after
        self._pending: list[str] = []
        self._open = 0

    def opened(self) -> None:
        """A forward begins that a backward may follow, which is to read the same parameters."""
        self._open += 1

    def closed(self) -> None:
        """A backward is over."""
        self._open = max(0, self._open - 1)

    def holds(self, steps: int) -> bool:
        """Whether the next step is delayed when ``steps`` have been taken."""
        return self._after is not None and steps >= self._after

    def turn(self, blocks: Sequence[str]) -> None:
        """``blocks`` are updated by a delayed step that is about to be queued, in the order in which forward wants
        them. The slots get what the step before has made of them."""
        self._open = 0  # whatever was not followed by a backward never will be
        self._forget()
        for block in blocks:
            # Queued here, and not when forward asks: the copy has to leave the home before the update of this step
            # writes there, and that update waits for the fetches that were queued before it.
            self._pool.bring(block)
        self._pending.extend(blocks)

    def show(self) -> bool:
        """Has whatever reads the parameters next see every update; False where that cannot be, because a backward is
        still to come (or so it seems: not every forward is followed by one) that asks for the present ones."""
        if self._pending and self._open:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        """The slots of pending blocks are stale: the next fetch waits for their update."""
        pending, self._pending = self._pending, []
        # All of them, whatever one raises whose update has failed: a slot that stayed would never be fetched again.
        with ExitStack() as forgetting:
            for block in pending:
                forgetting.callback(self._pool.invalidate, block)
