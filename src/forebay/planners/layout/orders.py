"""Orders in which buffers are placed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from forebay.planners.layout.table import Column, Table

__all__ = ["LARGEST", "ORDERS", "PREORDERS", "SHARES", "largest_share", "order_by"]

Keys = Callable[[Table], tuple[NDArray[np.generic], ...]]

ORDERS: Mapping[str, Keys] = MappingProxyType(
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


def _largest_first(share: float, among: str) -> Callable[[Table], Column]:
    def order(table: Table) -> Column:
        large, small = largest_share(table, np.argsort(-table.size, kind="stable"), share)
        found = []
        for rows, by in ((large, among), (small, "pressure-length")):
            found.append(rows[order_by(table.rows(rows), by)])  # as if the others were not there
        return np.concatenate(found)

    return order


def largest_share(table: Table, by_size: Column, share: float) -> tuple[Column, Column]:
    """The first rows of ``by_size`` that have ``share`` of all bytes times lives, and the others, each in the order of
    the table."""
    extent = _extent(table)[by_size]
    count = np.count_nonzero(np.cumsum(extent) - extent < share * extent.sum())
    return np.sort(by_size[:count]), np.sort(by_size[count:])


SHARES = (0.9, 0.8, 0.95, 0.85, 0.7, 0.6, 0.5)
"""Of all bytes times lives, those of the largest buffers: the likeliest first."""

LARGEST: Mapping[str, Callable[[Table], Column]] = MappingProxyType(
    {
        f"{among}, the largest {share:.0%} first": _largest_first(share, among)
        for share in SHARES
        for among in ("pressure-length", "pressure")
    }
)
"""Orders in which the largest buffers, with such a share of all bytes times lives, come before all others, which then
fill the gaps that those leave. Of 20,000 buffers some 4,000 have nine tenths, and lie a thousandth above their own
bound. Which share is best differs from set to set by a percent: the likeliest ones come first."""


PREORDERS: Mapping[str, Keys] = MappingProxyType(
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
    if name in LARGEST:
        return LARGEST[name](table)
    keys = (ORDERS.get(name) or PREORDERS[name])(table)
    return np.lexsort(tuple(reversed(keys))).astype(np.int64)


def _extent(table: Table) -> NDArray[np.float64]:
    """Bytes times life of each buffer, in floating point: times may be nanoseconds."""
    return table.size.astype(float) * table.life
