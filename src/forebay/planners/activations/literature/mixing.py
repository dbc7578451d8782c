"""Swapping and recomputation chosen tensor by tensor: from a ranking of what to do to what a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.graph import Name
from forebay.planners.activations.literature.layers import Choice, Layer
from forebay.planners.activations.literature.moments import Idle
from forebay.planners.activations.literature.placing import Answer, Room
from forebay.planners.activations.menu import AGAIN, MOVE, Option

__all__ = ["Move", "as_many_as_need_be", "choice_of"]


@dataclass(frozen=True, slots=True)
class Move:
    """One decision: ``what`` is made again if ``again``, else swapped."""

    what: Idle
    again: bool


def choice_of(moves: Iterable[Move]) -> Choice:
    """What a plan says of ``moves``. A block of which anything is made again runs again: what of it is not named by
    them is as in ``Layer.unnamed``."""
    by_block: dict[str, tuple[Layer, dict[Name, int]]] = {}
    for move in moves:
        layer = move.what.layer
        _, fates = by_block.setdefault(layer.name, (layer, {}))
        fates[move.what.name] = AGAIN if move.again else MOVE
    return {name: _option(layer, fates) for name, (layer, fates) in by_block.items()}


def _option(layer: Layer, fates: Mapping[Name, int]) -> Option:
    def fate(item: Item) -> int | None:
        return fates.get((item.op, item.occurrence))

    if AGAIN not in fates.values():
        return layer.kept(lambda item: fate(item) == MOVE)

    def done(item: Item) -> int:
        found = fate(item)
        return layer.unnamed(item) if found is None else found

    return layer.again(done)


def as_many_as_need_be(room: Room, moves: Sequence[Move]) -> Answer | None:
    """The fewest of ``moves``, which are in order, that fit; None where all of them do not."""
    low, high = 0, len(moves)
    level = room.level(choice_of(moves))
    if not room.fits(level):
        return None
    while low < high:
        middle = (low + high) // 2
        one = room.level(choice_of(moves[:middle]))
        if room.fits(one):
            high, level = middle, one
        else:
            low = middle + 1
    taken = moves[:high]
    again = sum(move.again for move in taken)
    words = f"{high - again} tensors are swapped and {again} made again, of {len(moves)} that could be"
    return Answer(level, (words,))
