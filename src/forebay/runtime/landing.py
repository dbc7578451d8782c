"""The way of gradients from the device to the host: copies, or sums with what has landed before, a window of bytes at a
time."""

from __future__ import annotations

from functools import partial
from typing import final

import torch

from forebay.device.base import Completion, Device
from forebay.runtime.tensors import add_serially
from forebay.scheduling.window import TransferWindow
from forebay.timeline import Lane

__all__ = ["Landing"]


@final
class Landing:
    """The way of gradients to the host, one for a session: at most ``window`` bytes are under way at any time.

    ``staging`` (1-D uint8, host) is where a micro-batch's gradient waits to be added to what has landed before. With
    ``norms_ahead`` the norms that steps ask for are made while backward still runs.
    """

    def __init__(self, device: Device, window: int, staging: torch.Tensor, *, norms_ahead: bool = False) -> None:
        self.device = device
        self.norms_ahead = norms_ahead
        self.window = TransferWindow(device, window)
        self._staging = staging

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, what: str, free: tuple[Completion, ...] = ()
    ) -> Completion:
        """Queues ``target = source`` (the same dtype and shape), once ``free`` are done."""
        self.window.admit(source.nbytes)
        # The mark: the copy must not start before the kernel that makes the gradient is done.
        after = (self.device.mark(), *free)
        done = self.device.copy(Lane.D2H, target, source, after=after, what=f"gradient {what}", inline=True)
        self.window.sent(done, source.nbytes)
        return done

    def accumulate(self, target: torch.Tensor, source: torch.Tensor, what: str) -> Completion:
        """Queues ``target += source`` (1-D, the same dtype), the sum made on the host."""
        self.window.admit(source.nbytes)
        after: tuple[Completion, ...] = (self.device.mark(),)
        room = self._staging.numel() // source.element_size()
        done: Completion | None = None
        for start in range(0, source.numel(), room):
            piece = source[start : start + room]
            staging = self._staging[: piece.nbytes].view(source.dtype)
            part = target[start : start + room]
            # One staging buffer is enough: copy and sum are jobs of one lane, which keeps their order.
            copied = self.device.copy(Lane.D2H, staging, piece, after=after, what=f"gradient {what}")
            done = self.device.submit(
                Lane.D2H, partial(add_serially, part, staging), after=(copied,), nbytes=0, what=f"accumulate {what}"
            )
        done = done or self.device.mark()
        self.window.sent(done, source.nbytes)
        return done

    def empty(self) -> None:
        """Holds compute until no gradient is under way."""
        self.window.empty()

    def drain(self) -> None:
        """Waits for every gradient that is under way."""
        self.window.drain()
