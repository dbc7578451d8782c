"""Bytes between tensors, wherever they are, and files: nothing is copied but what is on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from forebay.phases import PASSING

__all__ = ["Onward", "Passing"]


@final
class Onward:
    """What ``move`` does with bytes of a tensor called ``name``, for a part of it that begins at byte ``begin``."""

    def __init__(self, move: Callable[[str, int, memoryview], None], name: str, begin: int) -> None:
        self._move = move
        self._name = name
        self._begin = begin

    def __call__(self, offset: int, buffer: memoryview) -> None:
        self._move(self._name, self._begin + offset, buffer)


@final
class Passing:
    """Moves bytes of 1-D tensors. Those on the host are read and written in place; those on an accelerator go through
    one buffer of ``PASSING`` bytes, made when it is first needed."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def out(self, values: torch.Tensor, take: Callable[[int, memoryview], None]) -> None:
        """Hands the bytes of ``values`` to ``take``, part by part, each with the bytes before it."""
        content = values.view(torch.uint8)
        if values.device.type == "cpu":
            if content.numel():
                take(0, content.numpy().data)
            return
        for start in range(0, content.numel(), PASSING):
            part = content[start : start + PASSING]
            host = self._host()[: part.numel()].copy_(part)
            take(start, host.numpy().data)

    def into(self, values: torch.Tensor, give: Callable[[int, memoryview], None]) -> None:
        """Has ``give`` fill the bytes of ``values``, part by part, each with the bytes before it."""
        content = values.view(torch.uint8)
        if values.device.type == "cpu":
            if content.numel():
                give(0, content.numpy().data)
            return
        for start in range(0, content.numel(), PASSING):
            part = content[start : start + PASSING]
            host = self._host()[: part.numel()]
            give(start, host.numpy().data)
            part.copy_(host)

    def _host(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(PASSING, dtype=torch.uint8, device="cpu")
        return self._buffer
