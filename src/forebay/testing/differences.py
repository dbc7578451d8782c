"""How far numbers that were computed twice are apart, noted check by check."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import torch

from forebay.reporting.verdict import Check

__all__ = ["Differences", "distance", "same_bits"]

PIECE = 1 << 22
"""Elements that are looked at in double precision at a time."""


@final
class Differences:
    """The checks so far, in the order in which they were first noted."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    @property
    def checks(self) -> tuple[Check, ...]:
        """All of them."""
        return tuple(self._checks.values())

    def note(
        self,
        name: str,
        found: torch.Tensor | None,
        expected: torch.Tensor | None,
        where: str,
        allowed: float | None = 0.0,
    ) -> None:
        """Holds ``found`` against plain PyTorch's ``expected`` (None: there is none) for the check ``name``.

        ``where`` says in words which tensor it is. ``allowed``: see ``Check``.
        """
        before = self._checks.get(name, Check(name, allowed=allowed))
        equal = same_bits(found, expected)
        error = 0.0 if equal else distance(found, expected)
        kept = equal or allowed is None or 0 < allowed >= error
        worse = not equal and (before.equal or error > before.worst_error)
        self._checks[name] = replace(
            before,
            equal=before.equal and equal,
            kept=before.kept and kept,
            worst_error=max(before.worst_error, error),
            where=where if worse else before.where,
            compared=before.compared + 1,
        )


def same_bits(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; a NaN is equal to itself, and 0 is not -0."""
    if found is None or expected is None:
        return found is expected
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(_bytes(found), _bytes(expected))


def distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """The largest difference of an element, as a share of the largest magnitude in ``expected``; infinite where one is
    missing, has another shape or is not finite."""
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    apart = largest = 0.0
    left, right = found.detach().cpu().reshape(-1), expected.detach().cpu().reshape(-1)
    for start in range(0, left.numel(), PIECE):
        mine, theirs = (side[start : start + PIECE].double() for side in (left, right))
        difference = (mine - theirs).abs()
        # Equal infinities are no difference; their difference is NaN.
        difference[mine == theirs] = 0.0
        apart = max(apart, _finite(float(difference.max())))
        largest = max(largest, float(theirs.abs().max()))
    if not apart:
        return 0.0
    return apart / largest if largest and math.isfinite(largest) else math.inf


def _finite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
