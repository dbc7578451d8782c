"""What a capture takes for granted where nobody has the values that decide: the experts that a router picks, single
numbers that are drawn at random or that follow from floats, and whether a tensor passes a check."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from forebay.profiler.routing import Routing

__all__ = ["PASSED", "Draw", "Guess", "Place", "asking_place", "draw_single"]


class Draw(StrEnum):
    """Which of all numbers that can come is drawn, or follows from floats that nobody has.

    A model that draws a single number mostly asks whether it is below some share: below it a layer is left out
    (LayerDrop, Fan et al., "Reducing Transformer Depth on Demand with Structured Dropout", ICLR 2020), or something is
    done that is not done every time. Drawn highest all layers run; which of both takes more memory is the model's own.
    Of whole numbers, times that something is done, the highest takes the most. A value that is asked for is compared
    with another one: one guess takes the one way, one the other.
    """

    HIGHEST = "highest"
    LOWEST = "lowest"

    @property
    def other(self) -> Draw:
        """The other one."""
        return Draw.LOWEST if self is Draw.HIGHEST else Draw.HIGHEST


Place = tuple[str, int]
"""Where something is asked: the file and the line."""


@final
@dataclass(frozen=True)
class Guess:
    """What one run of a capture takes for granted. ``answers`` are those to questions about floats in the places where
    that of ``draw`` is an error to the model. ``later``: another step has run before, and the modules have what its
    forward has left in them (a mask that is made once, say)."""

    routing: Routing = Routing.BALANCED
    draw: Draw = Draw.HIGHEST
    later: bool = False
    answers: Mapping[Place, Draw] = field(default_factory=dict)

    def decides(self, place: Place, is_bool: bool) -> bool | float:
        """What a value is taken for that is asked for and that nobody has. No size can be made of it."""
        is_highest = self.answers.get(place, self.draw) is Draw.HIGHEST
        if is_bool:
            return is_highest
        return inf if is_highest else -inf


_NOT_ASKING: Final = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def asking_place() -> Place:
    """Where the model, or what it calls, asks: not in torch, and not here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_ASKING):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_BELOW: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"rand": (0.0, 1.0), "rand_like": (0.0, 1.0), "uniform_": (0.0, 1.0), "randint": (0, 1), "randint_like": (0, 1)}
)
"""Ops that draw evenly, with the bounds that they have by themselves: from the first, and below the second."""

PASSED: Final[Mapping[Any, bool]] = MappingProxyType(
    {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}
)
"""What comes of ops that say of all elements whether something holds: values are in their range, boxes in order, and
nothing has overflown."""

_FIRST: Final = ("from", "low")
_BOUND: Final = ("to", "high")


def draw_single(draw: Draw, func: Any, given: Mapping[str, Any], made: torch.Tensor) -> bool:
    """Whether ``func`` has drawn a single number; if so, ``made`` has it, which becomes that of ``draw``. ``given`` are
    the arguments of ``func`` by their names."""
    bounds = _BELOW.get(func.overloadpacket.__name__)
    if bounds is None or made.numel() != 1:
        return False
    low = next((given[name] for name in _FIRST if name in given), bounds[0])
    high = next((given[name] for name in _BOUND if name in given), bounds[1])
    with _disable_current_modes():
        if draw is Draw.LOWEST:
            made.fill_(low)
        elif made.is_floating_point():
            made.fill_(high - (high - low) * torch.finfo(made.dtype).eps)
        else:
            made.fill_(high - 1)
    return True
