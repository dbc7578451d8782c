"""Lanes that are late or refuse a job, and a disk that is full."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import final

import pytest
import torch
from torch import nn

import forebay
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.errors import ForebayError
from forebay.timeline import Lane
from tests.faults.trained import step

__all__ = ["Late", "Refuses", "fill_disk", "train_until_refused"]


@final
class Late(Delays):
    """Holds every job of one lane back."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def seconds(self, lane: Lane, what: str) -> float:
        return 0.005 if lane is self._lane else 0.0


@final
class Refuses(Delays):
    """Raises where a job is handed to a lane, from the ``nth`` on for ``times`` jobs."""

    def __init__(self, nth: int, times: int = 1) -> None:
        self._bad = range(nth, nth + times)
        self._count = 0

    def seconds(self, lane: Lane, what: str) -> float:
        self._count += 1
        if self._count - 1 in self._bad:
            raise ForebayError(f"refused: {what}")
        return 0.0


def train_until_refused(model: nn.Module, optimizer: torch.optim.Optimizer, device: CpuDevice) -> None:
    """Asserts that a lane of ``device`` refuses a job, that the caller hears of it, and that close gives all back."""

    def train() -> None:
        for _ in range(4):
            step(model, optimizer)

    with pytest.raises(ForebayError, match=r"^refused: "):
        train()
    with contextlib.suppress(ForebayError):
        forebay.close(model)
    # torch's engine keeps what is left of a graph whose backward failed until the next backward.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    live = device.usage().live
    device.close()
    assert live == 0


def fill_disk(name: str) -> None:
    """The open file ``name``, of a run or of the disk tier (which has removed its own), becomes one without room: its
    next write fails."""
    number = next(
        int(entry)
        for entry in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{entry}")
        and os.readlink(f"/proc/self/fd/{entry}").removesuffix(" (deleted)").endswith(f"/{name}")
    )
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, number)
    os.close(full)
