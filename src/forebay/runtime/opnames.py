"""What an op is called in a plan: its overload, and how many of that overload ran before it in its block's forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch

from forebay.compression import MASK_BITS
from forebay.device.ledger import plain_tensors
from forebay.treatments import Treatment

__all__ = ["OpCounter", "OpNames", "roots_made", "roots_treated"]


@final
class OpNames:
    """The overloads called ``ops`` (``treatments.Treatment.op``), among all that run."""

    def __init__(self, ops: Iterable[str]) -> None:
        self._ops = frozenset(ops)
        self._known: dict[Any, str | None] = {}

    def of(self, func: Any) -> str | None:
        """What ``func`` is called; None if it is none of them. Thousands ask in a step: an overload is looked up once,
        as long as it takes to hash it."""
        try:
            return self._known[func]
        except KeyError:
            name = str(func)
            self._known[func] = known = name if name in self._ops else None
            return known


@final
class OpCounter:
    """Names ops by overload and occurrence, from 0, since the last ``restart``: those of ``names``.

    Views are counted like any other op: they have overloads of their own, so that they move no other op's number.
    """

    def __init__(self, names: OpNames) -> None:
        self._names = names
        self._runs: dict[str, int] = {}

    def restart(self) -> None:
        """A forward of the block's module begins."""
        self._runs.clear()

    def name(self, func: Any) -> tuple[str, int] | None:
        """The name of the run of ``func`` that happens now; None for an op that is none of the named."""
        name = self._names.of(func)
        if name is None:
            return None
        occurrence = self._runs.get(name, 0)
        self._runs[name] = occurrence + 1
        return name, occurrence


def roots_made(result: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Of the tensors that an op has returned, one for each storage that none of its arguments has, in their order."""
    known = {tensor.untyped_storage()._cdata for tensor in plain_tensors((*args, *(kwargs or {}).values()))}
    made: dict[int, torch.Tensor] = {}
    for tensor in plain_tensors(result):
        made.setdefault(tensor.untyped_storage()._cdata, tensor)
    return [tensor for key, tensor in made.items() if key not in known]


def roots_treated(roots: Iterable[torch.Tensor], treatment: Treatment) -> list[tuple[int, torch.Tensor]]:
    """Of what an op has made (``roots_made``), what ``treatment`` is about, each with its place. Of an op that makes
    what is true or false beside numbers, as dropout does on cuda, a mask of 1 bit is of that alone."""
    every = list(enumerate(roots))
    if treatment.bits != MASK_BITS:
        return every
    return [one for one in every if one[1].dtype is torch.bool] or every
