"""Norms of landed gradients ahead of who asks for them, while backward still runs.

Clipping asks every gradient for its norm when backward is over, one after the other, each on one core of the host, and
nothing else runs meanwhile. What a step asks for, the next one does too. So as soon as as many gradients have landed as
then, the same op runs with the same arguments on a lane of its own: behind the updates that run under backward it would
be known too late, and these would wait for one core meanwhile. Who asks gets what it made if the bytes are still the
same (``GradientBuffer.version``); else the op runs as ever. Either way the bits are those of the op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch

from forebay.device.base import Completion, Device
from forebay.device.completions import dependency_failure
from forebay.timeline import Lane

__all__ = ["LEAST", "Norms"]

LEAST: Final = 1 << 19
"""Elements: the norm of fewer takes less than 30 microseconds, about what a job costs."""

_ALONE: Final = (torch.float32, torch.bfloat16)
"""Dtypes of which torch's euclidean norm of a whole tensor runs in one thread, so that the bits are the same whichever
thread calls it and however many it has (``norm_kernel_tensor_iterator_impl``, ``ReduceOpsKernel.cpp``)."""

Op = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class _Asked:
    """A call of a norm, and how many gradients had landed by then."""

    op: Op
    args: tuple[Any, ...]
    landings: int


@final
class _Made:
    """The outcome of ``asked`` for the bytes at ``version``, once ``done``."""

    def __init__(self, asked: _Asked, version: int) -> None:
        self.asked = asked
        self.version = version
        self.done: Completion | None = None
        self.norm: torch.Tensor | None = None

    def make(self, gradient: torch.Tensor) -> None:
        """The job."""
        self.norm = self.asked.op(gradient, *self.asked.args)

    def known(self) -> torch.Tensor | None:
        """The outcome, a tensor of its own, as soon as it is there; None if it failed."""
        if self.done is None or dependency_failure(self.done) is not None:
            return None
        return None if self.norm is None else self.norm.clone()


@final
class Norms:
    """The norm of one gradient, at most one at a time. Without a ``device`` none is made ahead; gradients of fewer than
    ``least`` elements have theirs when they are asked."""

    def __init__(self, device: Device | None, least: int = LEAST) -> None:
        self._device = device
        self._least = least
        self._asked: _Asked | None = None
        self._made: _Made | None = None

    def landed(self, gradient: torch.Tensor, landings: int, version: int, arrived: Completion, what: str) -> None:
        """``gradient`` is what it is at ``version`` when ``arrived`` is done; ``landings`` have made it."""
        asked = self._asked
        if self._device is None or asked is None or asked.landings != landings:
            return
        self._made = made = _Made(asked, version)
        made.done = self._device.submit(
            Lane.NORM, partial(made.make, gradient), after=(arrived,), what=f"norm of gradient {what}"
        )

    def of(self, gradient: torch.Tensor, landings: int, version: int, op: Op, args: tuple[Any, ...]) -> torch.Tensor:
        """``op(gradient, *args)`` of all that has landed, which is there."""
        known = op is torch.ops.aten.linalg_vector_norm.default and args in ((), (2,)) and gradient.dtype in _ALONE
        if not known or gradient.numel() < self._least:
            return op(gradient, *args)
        made, self._asked = self._made, _Asked(op, args, landings)
        # What is not done yet is under way: nothing but the norms of other gradients is before it.
        if made is not None and made.version == version and made.asked.args == args:
            norm = made.known()
            if norm is not None:
                return norm
        return op(gradient, *args)

    def settle(self) -> None:
        """Waits until nothing reads the gradient any more."""
        if self._made is not None and self._made.done is not None:
            dependency_failure(self._made.done)
