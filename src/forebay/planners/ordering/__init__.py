"""Planners of the order in which the ops of a graph run: the fewer bytes are live at one time, the better. No torch.

program     as the program has it
roam        a better one, after Shu et al., "ROAM: memory-efficient large DNN training via optimized operator ordering
            and memory layout" (2023)

ROAM cuts the graph at the ops that can only run at one place, orders what is between them by an integer programme, and
places the updates of parameters among the rest where that lowers the peak. Here the graph is cut at the same ops
(``parts``). In each part the moment with the most bytes is asked for the fewest bytes that can be live while its op
runs: that is a smallest cut (``cuts``), an integer programme whose relaxation is whole, and it says which ops, updates
among them, belong in front of that moment and which behind it. Then the next moment is asked, until one is reached that
nothing makes lower. What is left is searched op by op (``search``). No bound but that of a cut or of a search that was
complete is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from forebay.errors import ConfigError
from forebay.op_graph import OpGraph, Ordered
from forebay.planners.layout.aim import Deadline
from forebay.planners.ordering.cuts import least_before
from forebay.planners.ordering.parts import Part, parts_of
from forebay.planners.ordering.refine import refined

__all__ = ["ORDERS", "order_ops"]

ORDERS: Final[Mapping[str, str]] = MappingProxyType(
    {"program": "as the program has it", "roam": "the ops moved so that fewer bytes are live at one time"}
)

SECONDS: Final = 10.0
"""How long an order is searched for, where nobody says how long."""


def order_ops(given: OpGraph, order: str = "roam", seconds: float | None = None) -> Ordered:
    """An order of the ops of ``given``, by the planner ``order``, after ``seconds`` (10) at most, as near as a cut or a
    step of a search comes to that. Its peak is never above that of program order.

    Raises ``ConfigError`` for a planner that there is not, and for seconds that are not more than 0.
    """
    if order not in ORDERS:
        raise ConfigError(f"there is no order {order!r}; orders are {', '.join(ORDERS)}")
    seconds = SECONDS if seconds is None else seconds
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"an order is searched for some seconds, more than 0, got {seconds}")
    deadline = Deadline(seconds)
    parts = parts_of(given)
    # What one part cannot go below, no order can: a part that is not above it needs no work.
    floor = max((part.floor for part in parts), default=0)
    found: dict[int, tuple[int, ...]] = {}
    for number in sorted(range(len(parts)), key=lambda number: -parts[number].peak):
        part = parts[number]
        if part.peak <= floor:
            break
        if order == "program":
            levels = part.levels(range(len(part.ops)))
            floor = max(floor, least_before(part, levels.index(part.peak))[1])
            break
        answer = refined(part, floor, deadline)
        found[number], floor = answer.order, max(floor, answer.lower_bound)
    whole = tuple(op for number, part in enumerate(parts) for op in _named(part, found.get(number)))
    return Ordered(given, whole, floor, order, deadline.spent)


def _named(part: Part, order: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ops of a part in an order of their places in it, as the graph calls them."""
    return part.ops if order is None else tuple(part.ops[place] for place in order)
