"""Routings that are made up: which k of n experts each token picks, where nobody has the floats that decide it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import torch

__all__ = ["EXTREMES", "Routing", "route"]


class Routing(StrEnum):
    """How a capture routes tokens.

    With r_e rows for expert e, what is live while an op runs is c + sum_e w_e r_e, where no expert has more rows than
    there are tokens (T) and all have k T together. Experts run one after the other, backward in reverse. Those that
    wait for their backward hold what they saved; those that have not run yet, or whose backward is over, hold nothing;
    one that runs holds more than what it saves, but towards the end of its backward less. So the most is live when the
    experts that hold anything have all the rows, and the one that runs has T of them, or one:

    ``LATE``       in forward: the last k experts have T rows each.
    ``EARLY``      in backward, where the first k experts come last: they have T rows each but for one, which goes to
                   the last expert, so that there is a gradient to which those of the k are added.
    ``EARLY_SUM``  the same with two rows, for the last two experts: their gradients are added, which is the most that
                   gradients of experts take (both and the sum), while the first k hold all that they save.

    ``BALANCED`` gives all experts as many rows as the others: no extreme, but what training aims at.

    An expert without rows is mostly not run at all, which makes the extremes quick to capture. What takes bytes by the
    number of experts that are met, and not by rows (a list of their numbers, 8 bytes each), is not at its most in them.
    """

    BALANCED = "balanced"
    LATE = "late"
    EARLY = "early"
    EARLY_SUM = "early-sum"


EXTREMES = (Routing.LATE, Routing.EARLY, Routing.EARLY_SUM)
"""The routings of which one takes the most memory of all."""

_SPARE: Mapping[Routing, int] = MappingProxyType({Routing.EARLY: 1, Routing.EARLY_SUM: 2})


def route(routing: Routing, tokens: int, k: int, n: int) -> torch.Tensor:
    """Which ``k`` of ``n`` experts each token picks, all of a row distinct: (tokens, k), for n > k >= 1."""
    if routing is Routing.BALANCED:
        return (torch.arange(tokens * k, device="cpu") % n).reshape(tokens, k)
    first = n - k if routing is Routing.LATE else 0
    picks = torch.arange(first, first + k, device="cpu").repeat(tokens, 1)
    if routing in _SPARE:
        spare = min(_SPARE[routing], n - k, tokens - 1)
        picks[tokens - spare :, 0] = torch.arange(n - spare, n, device="cpu")
    return picks
