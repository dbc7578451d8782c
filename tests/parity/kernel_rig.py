"""Memory for kernels to work on, and torch's way of doing the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forebay.kernels.native import Form

DTYPES = {Form.FP32: torch.float32, Form.BF16: torch.bfloat16, Form.FP16: torch.float16}

COUNTS = (0, 1, 7, 8, 9, 255, 256, 1369, 40_013)
"""Elements: none, less than a vector, odd, around a block, and enough to be cut for three threads."""

SHARES = 3


def unaligned(values: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element after where an allocation would: at no multiple of a vector."""
    moved = torch.empty(values.numel() + 1, dtype=values.dtype)[1:]
    return moved.copy_(values)


@dataclass
class Memory:
    """One parameter and its states. ``master`` is the parameter itself where that is fp32."""

    gradient: torch.Tensor
    parameter: torch.Tensor
    master: torch.Tensor
    states: list[torch.Tensor] = field(default_factory=list)

    def copy(self) -> Memory:
        master = self.master.clone()
        own = master if self.parameter is self.master else self.parameter.clone()
        return Memory(self.gradient.clone(), own, master, [s.clone() for s in self.states])

    def row(self, width: int) -> list[int]:
        tensors = (self.gradient, self.parameter, self.master, *self.states)
        row = [self.gradient.numel(), *(t.data_ptr() for t in tensors)]
        return row + [0] * (width - len(row))

    def everything(self) -> list[torch.Tensor]:
        return [self.parameter, self.master, *self.states]


def memory(count: int, parameter: Form, gradient: Form, states: int, seed: int = 0) -> Memory:
    """Random values; the first state has a sign, the others have none."""
    generator = torch.Generator().manual_seed(1000 * seed + count)

    def draw() -> torch.Tensor:
        return torch.randn(count, generator=generator)

    master = unaligned(draw())
    own = master if parameter is Form.FP32 else unaligned(master.to(DTYPES[parameter]))
    held = [unaligned(0.1 * draw() if n == 0 else 0.01 * draw().square()) for n in range(states)]
    return Memory(unaligned((0.1 * draw()).to(DTYPES[gradient])), own, master, held)


def run(kernel: Callable[..., float], rows: Sequence[Sequence[int]], *arguments: Any, shares: int = SHARES) -> float:
    """All shares of a call, one after the other; the sum of what they return."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
    return sum(kernel(table, share, shares, 0, *arguments) for share in range(shares))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit; NaN equals NaN, whatever its payload."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    integer = torch.int32 if left.element_size() == 4 else torch.int16
    return bool(((left.view(integer) == right.view(integer)) | (left.isnan() & right.isnan())).all())
