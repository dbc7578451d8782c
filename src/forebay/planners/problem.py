"""What a planner is asked."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.plans import Budget
from forebay.trace import Footprint, Model

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """A model, what its step needs beside the parameters, and what is allowed.

    ``host_limit`` and ``disk_limit`` are bytes: the budget, or what the machine has where the budget names none
    (``disk_limit`` 0: no disk). ``state_names`` are the optimizer's states per element. ``overlap_update`` says
    whether host updates may run beside compute: not where both share the cores.
    """

    model: Model
    footprint: Footprint
    budget: Budget
    host_limit: int
    disk_limit: int
    state_names: tuple[str, ...]
    overlap_update: bool
