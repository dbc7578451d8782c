"""A program with one of its actions changed, repeated or elsewhere; and what comes after what in it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.program import Action, Program, Verb
from forebay.timeline import Lane

__all__ = ["behind", "changed", "numbered", "reaches", "twice"]


def numbered(program: Program, *verbs: Verb) -> Iterator[tuple[int, Action]]:
    """The actions of these verbs, with their places."""
    return ((i, a) for i, a in enumerate(program.actions) if a.verb in verbs)


def changed(program: Program, index: int, **changes: object) -> Program:
    """Action ``index`` with other fields."""
    actions = list(program.actions)
    actions[index] = replace(actions[index], **changes)  # type: ignore[arg-type]
    return replace(program, actions=tuple(actions))


def twice(program: Program, index: int) -> Program:
    """The action once more, directly after itself."""
    actions = [
        replace(a, after=tuple(b + (b > index) for b in a.after)) if i > index else a
        for i, a in enumerate(program.actions)
    ]
    actions.insert(index + 1, program.actions[index])
    return replace(program, actions=tuple(actions))


def behind(program: Program, index: int, after: int) -> Program:
    """Action ``index`` moved behind action ``after``; nobody waits for it any longer."""
    order = [*range(index), *range(index + 1, after + 1), index, *range(after + 1, len(program.actions))]
    place = {old: new for new, old in enumerate(order)}
    actions = [
        replace(program.actions[old], after=tuple(sorted(place[a] for a in program.actions[old].after if a != index)))
        for old in order
    ]
    return replace(program, actions=tuple(actions))


def reaches(program: Program, first: int, second: int) -> bool:
    """Whether ``second`` comes after ``first`` by lanes and dependencies."""
    before: dict[Lane, int] = {}
    follows: list[list[int]] = []
    for index, action in enumerate(program.actions):
        follows.append([*action.after, *([before[action.lane]] if action.lane in before else [])])
        before[action.lane] = index
    seen, waiting = set[int](), [second]
    while waiting:
        for earlier in follows[waiting.pop()]:
            if earlier >= first and earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)
    return first in seen
