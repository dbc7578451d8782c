"""When the byte ledger of the ``cpu`` device looks at what a step makes, and when it rests.

The ledger sees every op, forward, backward and run again: some 7 to 10 microseconds each, and sums of gradients out
of place, which autograd makes in place where no mode looks on. Steps on batches of one shape make the same storages, so
most of them need not be seen again. That a plan keeps to its budget was proven before it runs, for every timing; the
ledger is what catches a model that does something else than its trace said, and that shows in the steps that it sees.

The same mode refuses a stray use of a parameter that is away, by name. It does so in what it sees, and between steps
(``lookout``). A use inside the model that begins in a step that is not seen reads NaN instead, as on a device whose
allocator keeps the account.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from forebay.errors import ConfigError

__all__ = ["Vigil", "VigilPolicy", "batch_shape"]

MOST: Final = 256
"""Shapes that are remembered: where a batch brings a number of its own (of the step, say), each is another one."""

DEEPEST: Final = 3
"""Objects in objects that are looked into."""

_PLAIN: Final = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class VigilPolicy:
    """Which steps on batches of one shape are seen: the ``first`` ones, then one in ``every``."""

    first: int = 2
    every: int = 16

    def __post_init__(self) -> None:
        if self.first < 1 or self.every < 1:
            raise ConfigError(f"a vigil needs first and every to be 1 or more, got {self.first} and {self.every}")


@final
class Vigil:
    """Counts passes by the shape of their batch and says which are seen.

    All training passes of one step are treated alike: a gradient that an unseen pass has left is in no account. Only
    a shape that was never seen wakes the ledger in the middle of a step. An evaluation pass stands for itself.
    """

    def __init__(self, policy: VigilPolicy) -> None:
        self._policy = policy
        self._seen: dict[Hashable, int] = {}
        self._awake = True
        self._in_step = False

    def begins(self, shape: Hashable, *, training: bool) -> bool:
        """A pass on a batch of ``shape`` begins; returns whether it is seen."""
        if not training:
            return self._counts((shape, training))
        if not self._in_step:
            self._in_step = True
            self._awake = self._counts((shape, training))
        elif (shape, training) not in self._seen:
            self._awake = self._counts((shape, training))
        return self._awake

    def _counts(self, key: Hashable) -> bool:
        before = self._seen.get(key, 0)
        if before == 0 and len(self._seen) == MOST:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = before + 1
        return before < self._policy.first or before % self._policy.every == 0

    def step_ended(self) -> None:
        """The next pass is the first of another step."""
        self._in_step = False


def batch_shape(args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    """What two passes must have in common to make the same storages: shapes, dtypes, plain values, structure. Of an
    object it is that of its fields."""
    return _described((args, dict(kwargs)), DEEPEST)


def _described(value: Any, depth: int) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str
    if isinstance(value, _PLAIN):
        return repr(value)
    leaves, structure = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return str(structure), tuple(_described(leaf, depth) for leaf in leaves)
    fields = getattr(value, "__dict__", None)
    if depth == 0 or not isinstance(fields, dict):
        return type(value).__qualname__
    return type(value).__qualname__, _described(fields, depth - 1)
