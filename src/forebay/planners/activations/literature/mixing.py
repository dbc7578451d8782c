"""Swapping and recomputation chosen tensor by tensor: from a ranking of what to do to what a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.fewest import fewest_that_fit
from forebay.planners.activations.literature.graph import Name
from forebay.planners.activations.literature.layers import Choice, Layer
from forebay.planners.activations.literature.moments import Idle
from forebay.planners.activations.literature.placing import Answer, Room
from forebay.planners.activations.menu import AGAIN, MOVE, Option, in_parts
from forebay.planners.parts import Level
from forebay.treatments import Split

__all__ = ["Move", "as_many_as_need_be", "choice_of", "fewest_moves"]


@dataclass(frozen=True, slots=True)
class Move:
    """One decision: ``what`` is made again if ``again``, else swapped; ``split`` of it, or (None) all of it."""

    what: Idle
    again: bool
    split: Split | None = None


def choice_of(moves: Iterable[Move]) -> Choice:
    """What a plan says of ``moves``; of several about one tensor the last holds. A block of which anything is made
    again runs again: what of it is not named by them is as in ``Layer.unnamed``."""
    by_block: dict[str, tuple[Layer, dict[Name, Move]]] = {}
    for move in moves:
        layer = move.what.layer
        _, fates = by_block.setdefault(layer.name, (layer, {}))
        fates[move.what.name] = move
    return {name: _option(layer, fates) for name, (layer, fates) in by_block.items()}


def _option(layer: Layer, moves: Mapping[Name, Move]) -> Option:
    splits = {name: move.split for name, move in moves.items() if move.split is not None}
    if not any(move.again for move in moves.values()):
        option = layer.kept(lambda item: (item.op, item.occurrence) in moves)
    else:

        def done(item: Item) -> int:
            move = moves.get((item.op, item.occurrence))
            if move is None:
                return layer.unnamed(item)
            return AGAIN if move.again else MOVE

        option = layer.again(done)
    return in_parts(layer.items, option, splits) if splits else option


def fewest_moves(room: Room, moves: Sequence[Move]) -> tuple[int, Level] | None:
    """How many of ``moves``, which are in order, have to be made so that they fit, and what a plan then says; None
    where all of them do not."""

    def level(count: int) -> Level:
        return room.level(choice_of(moves[:count]))

    count = fewest_that_fit(len(moves), lambda count: room.over(level(count)))
    return None if count is None else (count, level(count))


def as_many_as_need_be(room: Room, moves: Sequence[Move]) -> Answer | None:
    """The fewest of ``moves``, which are in order and each about another tensor, that fit; None where all of them do
    not."""
    found = fewest_moves(room, moves)
    if found is None:
        return None
    count, level = found
    again = sum(move.again for move in moves[:count])
    words = f"{count - again} tensors are swapped and {again} made again, of {len(moves)} that could be"
    return Answer(level, (words,))
