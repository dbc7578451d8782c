"""Policies that choose among options of whole blocks by the dynamic programme over the chain (``chaining``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.planners.activations.literature.chaining import Link, Step, best_chain
from forebay.planners.activations.literature.layers import Choice, Layer, moves, reruns
from forebay.planners.activations.literature.placing import Answer, Room, chosen, within
from forebay.planners.activations.menu import Option
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT
from forebay.trace import Phase

__all__ = ["chained", "links_of", "step_of"]


def chained(room: Room, options_of: Callable[[Layer], Sequence[Option]]) -> Answer | None:
    """The fastest of ``options_of`` every block that fits; None where nothing does. Blocks that are alike have the same
    options, which are asked for once."""
    if room.fits(KEPT):
        return Answer(KEPT)
    by_group: dict[int, Sequence[Option]] = {}
    for layer in room.layers:
        if id(layer.group) not in by_group:
            by_group[id(layer.group)] = options_of(layer)
    options = [by_group[id(layer.group)] for layer in room.layers]
    step_by_group = {group: [step_of(option) for option in able] for group, able in by_group.items()}
    steps = [step_by_group[id(layer.group)] for layer in room.layers]
    links = links_of(room.bench, room.layers)
    rate = room.bench.costs.machine.leaving.curve.best

    def solve(allowed: int) -> Choice | None:
        places = best_chain(steps, links, allowed, rate)
        if places is None:
            return None
        return chosen(room.layers, [able[place] for able, place in zip(options, places, strict=True)])

    choice, _ = within(room, solve, sum(layer.items.held for layer in room.layers))
    if choice is None:
        return None
    again, moving = (sum(map(test, choice.values())) for test in (reruns, moves))
    words = (
        f"{again} of {len(choice)} blocks run again and {moving} move, the fastest of {_most(options)} choices a block"
    )
    return Answer(room.level(choice), (words,))


def _most(options: Sequence[Sequence[Option]]) -> int:
    return max(map(len, options), default=0)


def step_of(option: Option) -> Step:
    """What ``option`` costs a chain."""
    seconds = option.seconds + option.encode_seconds
    return Step(option.held, option.workspace, seconds, option.out_seconds, option.back_seconds)


def links_of(bench: Bench, layers: Sequence[Layer]) -> list[Link]:
    """What each of ``layers`` computes, whatever is chosen."""
    costs, backward = bench.costs, dict[str, float]()
    for visit in costs.trace.visits:
        if visit.phase is Phase.BACKWARD:
            last = visit.first_op + len(costs.trace.segments[visit.segment].ops)
            backward[visit.block] = backward.get(visit.block, 0.0) + costs.ops(visit.first_op, last)
    return [Link(layer.seconds, backward.get(layer.name, 0.0)) for layer in layers]
