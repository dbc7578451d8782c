"""A step once more, as the one behind it: what is the same needs no second walk. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from forebay.program import Outline

__all__ = ["counterparts", "repeated"]


def counterparts(outlines: Sequence[Outline], second: int) -> Mapping[int, int] | None:
    """For each action before number ``second`` that a later one waits for, the one that a step later is waited for in
    its place. ``outlines`` are two steps that end alike, the second of which begins at ``second``; None: there is no
    such action for one of them.

    What a step waits for of the one before it is the last that was done with something (the last read of a slot, the
    update of a block), so that alike ones are counted from the end of a step.
    """
    asked = {index for outline in outlines[second:] for index in outline.after if index < second}
    count, places = defaultdict[object, int](int), dict[tuple[object, int], int]()
    for index in range(second - 1, -1, -1):
        key = _key(outlines[index])
        count[key] += 1
        if index in asked:
            places[key, count[key]] = index
    count.clear()
    found: dict[int, int] = {}
    for index in range(len(outlines) - 1, second - 1, -1):
        key = _key(outlines[index])
        count[key] += 1
        earlier = places.get((key, count[key]))
        if earlier is not None:
            found[earlier] = index
    return found if len(found) == len(asked) else None


def repeated(outlines: Sequence[Outline], second: int, end: int, found: Mapping[int, int]) -> list[Outline]:
    """``outlines`` with what is between ``second`` and ``end`` once more behind it, and what was put off until after
    it (from ``end`` on) as that of the later step. ``found`` are the ``counterparts``."""
    more = end - second
    later = [_later(outline, second, more, found) for outline in outlines[second:]]
    return [*outlines[:end], *later]


def _later(outline: Outline, second: int, more: int, found: Mapping[int, int]) -> Outline:
    after = sorted(index + more if index >= second else found[index] for index in outline.after)
    return outline._replace(step=outline.step + 1, after=tuple(after))


def _key(outline: Outline) -> object:
    return outline.lane, outline.verb, outline.what, outline.tensor, outline.ops
