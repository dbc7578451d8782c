"""Planners of addresses: buffers with known lives get places in one piece of memory. No torch.

best-fit    placed one after the other in several orders, the lowest layout is taken (``greedy``)
periodic    best fit, its order improved by local search (Imanishi and Xu, ISMM 2024)
roam        what lives long first, then each stretch of time by itself (Shu et al. 2023; its layout half)
exact       depth-first search over canonical layouts (Moffitt, ASPLOS 2023)
arena       all of that, a beam search (``beams``), exact searches on joined buffers (``multilevel``) and local ones
            with a pool of what finds no gap (``pools``) in turns, until nothing is left to gain or the time is over:
            the default

Each is asked part by part: what shares no time can be laid out apart, above what is live as long as all that it meets
(``ground``). The compiled functions are compiled ahead of
the time that a search has (``ahead``), which takes some seconds once, and kept on disk (``kernels.jit``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.errors import ConfigError
from forebay.planners.layout.ahead import compile_greedy
from forebay.planners.layout.aim import Aim, Deadline, Found, Planner
from forebay.planners.layout.arena import arena, exact, periodic
from forebay.planners.layout.greedy import best_fit, flowed
from forebay.planners.layout.ground import grounded
from forebay.planners.layout.roam import roam
from forebay.planners.layout.table import Table

__all__ = ["LAYOUTS", "lay_out"]

LAYOUTS: Mapping[str, Planner] = MappingProxyType(
    {"arena": arena, "best-fit": best_fit, "exact": exact, "periodic": periodic, "roam": roam}
)

SECONDS = 5.0
"""How long a layout as low as possible is searched for, where nobody says how long."""

SECONDS_TO_FIT = 60.0
"""The same where there is a capacity and nothing that fits into it has been found."""

POLISH = 0.3
"""Seconds after which a layout that fits is not made lower any more, and as much again for each ``MANY`` buffers."""

MANY = 2000

PAIR = 2e-9
"""Seconds that looking at a pair of buffers takes, about: every planner looks at all pairs that a part has."""

ONE_PASS = 1.0
"""Seconds that one look at all of them may take, even where no time is left."""


def lay_out(given: BufferSet, layout: str = "arena", seconds: float | None = None) -> Addresses:
    """Addresses for the buffers of ``given``, by the planner ``layout``, after ``seconds`` at most, as near as a turn
    of a search comes to that. That they do not fit into the capacity is an answer too (``Addresses.feasible``).

    Raises ``ConfigError`` for a planner that there is not, and for seconds that are not more than 0.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"there is no layout {layout!r}; layouts are {', '.join(sorted(LAYOUTS))}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"a layout is searched for some seconds, more than 0, got {seconds}")
    compile_greedy()  # ahead of the time that there is
    capacity, bound = given.capacity, given.lower_bound
    polish = POLISH * (1 + len(given.buffers) / MANY)
    usual = SECONDS if capacity is None else SECONDS_TO_FIT
    hopeless = capacity is not None and capacity < bound
    start = Deadline(min(seconds or usual, polish) if hopeless else seconds or usual)
    aim = Aim(bound, None if hopeless else capacity, Deadline(polish), start)
    offsets, found = _by_parts(given.buffers, LAYOUTS[layout], aim)
    names = list(dict.fromkeys(one.by for one in found))
    exhausted = any(one.exhausted for one in found)
    by = f"{layout}: {', '.join(names)}" if names else layout
    made = Addresses(given, offsets, by, False, start.spent)
    proven = made.height == bound if made.feasible else exhausted or hopeless
    return Addresses(given, offsets, by, proven, made.solve_seconds)


def _by_parts(buffers: tuple[Buffer, ...], planner: Planner, aim: Aim) -> tuple[tuple[int, ...], list[Found]]:
    """The offsets of all buffers, and what was found for each part that is above the ground (``ground``): those that
    take the most memory first, since they decide. For one so large that all its pairs cannot be looked at in the time
    that is left, buffers are placed as time goes."""
    offsets = np.zeros(len(buffers), np.int64)
    found = []
    for one in sorted(grounded(Table.of(buffers), offsets), key=lambda one: -one.peak):
        short = PAIR * len(one.part) ** 2 > max(ONE_PASS, aim.deadline.left)
        found.append(flowed(one.part) if short else planner(one.part, aim.above(one.base)))
        offsets[one.part.number] = one.base + found[-1].offsets
    return tuple(offsets.tolist()), found
