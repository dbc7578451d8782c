"""A recording played to a model of an allocator. No torch."""

from __future__ import annotations

from collections.abc import Callable

from forebay.recording import Box, Holder, Life, Recording, Replay
from forebay.simulation.allocators.base import Allocator
from forebay.simulation.allocators.limits import least

__all__ = ["replay", "room_for"]

HOLDERS = 5
"""Requests that are named for the worst moment."""


def replay(name: str, recording: Recording, make: Callable[[int | None], Allocator]) -> Replay:
    """Plays ``recording`` to an allocator that ``make`` makes for a device of so many bytes (None: as many as are asked
    for), and then to another one up to the worst moment, to see what was there."""
    allocator = make(None)
    standing = allocator.reserved
    reserved: list[int] = []
    boxes: dict[int, tuple[tuple[Box, ...], int]] = {}
    lives: list[Life] = []
    for at, event in enumerate(recording.events):
        placed = _serve(allocator, recording, event)
        if event >= 0:
            boxes[event] = placed, at
        else:
            own, made = boxes.pop(-1 - event)
            lives += [Life(box, made, at) for box in own]
        reserved.append(allocator.reserved)
    end = len(recording.events)
    lives += [Life(box, made, end) for own, made in boxes.values() for box in own]
    live = recording.live
    grown = [at for at in range(end) if reserved[at] > (reserved[at - 1] if at else standing)]
    worst = max(grown, key=lambda at: reserved[at] - live[at], default=None)
    again = make(None)
    for event in recording.events[: 0 if worst is None else worst + 1]:
        _serve(again, recording, event)
    return Replay(name, tuple(reserved), live, worst, _holders(again, recording), tuple(lives))


def room_for(recording: Recording, make: Callable[[int | None], Allocator]) -> int:
    """The least bytes of a device, within ``limits.EXACT``, on which an allocator of ``make`` has room for all."""

    def fits(limit: int) -> bool:
        allocator = make(limit)
        for event in recording.events:
            _serve(allocator, recording, event)
            # One that has no limit of its own takes what it takes.
            if event >= 0 and (allocator.out_of_memory or allocator.reserved > limit):
                return False
        return True

    return least(fits, max(recording.live, default=0))


def _serve(allocator: Allocator, recording: Recording, event: int) -> tuple[Box, ...]:
    if event < 0:
        allocator.free(-1 - event)
        return ()
    request = recording.requests[event]
    return allocator.allocate(event, request.nbytes, request.stream)


def _holders(allocator: Allocator, recording: Recording) -> tuple[Holder, ...]:
    """Of each segment that is used in part the largest request in it, the emptiest segments first."""
    held = []
    for segment in allocator.segments():
        if segment.boxes and segment.free:
            box = max(segment.boxes, key=lambda box: box.nbytes)
            request = recording.requests[box.number]
            held.append(Holder(request.what, request.nbytes, segment.free, segment.nbytes))
    held.sort(key=lambda holder: -holder.free)
    return tuple(held[:HOLDERS])
