"""Orders in which buffers are placed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from forebay.planners.layout.table import Column, Table

__all__ = ["ORDERS", "order_by"]

ORDERS: Mapping[str, Callable[[Table], tuple[Column, ...]]] = MappingProxyType(
    {
        "size": lambda table: (-table.size, -table.length),
        "area": lambda table: (-table.size * table.length, -table.size),
        "length": lambda table: (-table.length, -table.size),
        "time": lambda table: (table.lower, -table.size),
        "pressure": lambda table: (-table.pressure, -table.size * table.length),
        "pressure-length": lambda table: (-table.pressure, -table.length, -table.size),
    }
)
"""Keys of each order, the most significant first: the least comes first. ``pressure`` puts together those that meet the
peak, as minimalloc does with the total of a section (Moffitt, "MiniMalloc", ASPLOS 2023, section 5)."""


def order_by(table: Table, name: str) -> Column:
    """The rows of ``table`` in the order ``name``; of equal ones the first."""
    return np.lexsort(tuple(reversed(ORDERS[name](table)))).astype(np.int64)
