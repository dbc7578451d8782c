"""What a trace takes for granted, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forebay.profiler.values import Values

__all__ = ["CHECKED", "DECIDED", "DRAWN", "MADE_UP", "MASKED", "granted"]

DRAWN: Final = (
    "single numbers that the model draws at random (LayerDrop) are taken for the highest that they can be, by which "
    "all layers run; memory holds for the lowest, too"
)

DECIDED: Final = (
    "what the model asks about floats (x.mean() > 0, loss.item()) is taken to be true, or the highest number, every "
    "time; memory holds for false, or the lowest, every time, too"
)

MASKED: Final = "of what is chosen by a mask that follows from floats all elements are taken; memory holds for fewer"

MADE_UP: Final = (
    "floats that the model asks for as NumPy arrays are made up; memory holds where no size follows from them"
)

CHECKED: Final = (
    "what the model checks of all elements of a tensor (isfinite().all(), isnan().any()) is taken to be in order"
)


def granted(values: Values, arrays_made: bool, by_routes: bool, by_draws: bool) -> Iterator[str]:
    """The sentences. ``by_routes`` and ``by_draws`` say whether other routes, or numbers drawn, take other bytes."""
    yield from _of_routes(values, by_routes)
    if by_draws and values.drawn:
        yield DRAWN
    if values.decided:
        yield DECIDED
    if values.checked:
        yield CHECKED
    if values.masked:
        yield MASKED
    if arrays_made:
        yield MADE_UP


def _of_routes(values: Values, by_routes: bool) -> Iterator[str]:
    """What a trace takes for granted of what is picked among floats."""
    if not values.picked:
        return
    note = "what is picked among floats (experts of a router) is taken as balanced"
    if not by_routes:
        yield note
        return
    which = "any routing" if values.routed else "any routing by top-k, and other picks as balanced"
    yield f"{note} for seconds; memory holds for {which}"
