"""Orders in which buffers are placed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from forebay.planners.layout.table import Column, Table

__all__ = ["ORDERS", "PREORDERS", "order_by"]

ORDERS: Mapping[str, Callable[[Table], tuple[NDArray[np.generic], ...]]] = MappingProxyType(
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


PREORDERS: Mapping[str, Callable[[Table], tuple[NDArray[np.generic], ...]]] = MappingProxyType(
    {
        "fullest-longest": lambda table: (-table.pressure, -table.life, -_extent(table)),
        "fullest-largest": lambda table: (-table.pressure, -_extent(table), -table.life),
        "longest": lambda table: (-table.life, -_extent(table), -table.pressure),
    }
)
"""Those of minimalloc's search, its preorders TWA, TAW and WAT. Lives count in the time that they were given in, as
there: so its instance I is found after 19,570 nodes."""


def order_by(table: Table, name: str) -> Column:
    """The rows of ``table`` in the order ``name``; of equal ones the first."""
    keys = (ORDERS.get(name) or PREORDERS[name])(table)
    return np.lexsort(tuple(reversed(keys))).astype(np.int64)


def _extent(table: Table) -> NDArray[np.float64]:
    """Bytes times life of each buffer, in floating point: times may be nanoseconds."""
    return table.size.astype(float) * table.life
