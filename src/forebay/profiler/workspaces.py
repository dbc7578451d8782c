"""What is on a card beside what the ops of a step make: workspaces of libraries, and rests of the allocator's pages."""

from __future__ import annotations

from typing import Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from forebay.errors import DoesNotFit
from forebay.memory import PAGES, Tier
from forebay.units import MiB, format_bytes

__all__ = ["ELSEWHERE", "workspace_nbytes"]

LARGEST: Final = 32 * MiB
"""Bytes of cuBLAS's workspace for a thread on Hopper and later, where it is largest."""

ELSEWHERE: Final = 2 * LARGEST + PAGES
"""Bytes that are counted for a card which is not here to be measured: what fits on paper is to fit there."""


def workspace_nbytes(device: torch.device) -> int:
    """Bytes of the card ``device`` that are taken before an op makes anything: what cuBLAS keeps for each thread that
    has had it multiply (on Hopper 32 MiB, on others 8), forward's and backward's, and ``PAGES``.

    Measured: a small layer has both made, and gives them back. Raises ``DoesNotFit`` where the limit of this process
    has no room for them.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        with _disable_current_modes(), torch.enable_grad(), torch.autocast("cuda", enabled=False):
            weight = torch.ones(64, 64, device=device, requires_grad=True)
            (weight @ weight).sum().backward()
            del weight
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"device memory: matrix products alone take workspaces of up to {format_bytes(2 * LARGEST)} on a card, and "
            f"the allocator's pages {format_bytes(PAGES)}; raise device_memory to more than {format_bytes(ELSEWHERE)}",
            tier=Tier.DEVICE.value,
            needed=ELSEWHERE,
            allowed=int(torch.cuda.get_per_process_memory_fraction(index) * torch.cuda.mem_get_info(index)[1]),
        ) from error
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device) + PAGES
