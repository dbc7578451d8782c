"""How much of a ranking of tensors a stage gives up: as little as its device has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.planners.activations.literature.mixing import Move, choice_of
from forebay.planners.parallel.dapple import running_again
from forebay.planners.parallel.pipelines import Decision, Line, Seat

__all__ = ["as_little_as_fits"]


def as_little_as_fits(
    line: Line, seat: Seat, moves: Sequence[Move], to_peers: Callable[[Sequence[Move]], float] = lambda taken: 0.0
) -> Decision:
    """The fewest of ``moves``, which are in order, with which the device has room for the stage; ``to_peers`` says what
    share of what moves goes to other devices. Where all of them do not do, every block runs again."""

    def made(count: int) -> Decision:
        taken = moves[:count]
        return Decision(choice_of(taken), to_peers(taken))

    low, high = 0, len(moves)
    if line.over(seat, made(high)) > 0:
        return running_again(seat)
    while low < high:
        middle = (low + high) // 2
        if line.over(seat, made(middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    return made(high)
