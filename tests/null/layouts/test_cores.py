"""Orders of what is live when memory is fullest."""

from __future__ import annotations

import numpy as np

from benchmarks.layout.instances import random_buffers
from forebay.buffers import Addresses
from forebay.checking.addresses import check_addresses
from forebay.planners.layout.cores import Cores
from forebay.planners.layout.fits import BEST, FIRST
from forebay.planners.layout.greedy import fitted
from forebay.planners.layout.orders import LARGEST, order_by
from forebay.planners.layout.table import Table


def test_orders_of_the_core_are_lower_than_the_same_orders_of_all_buffers() -> None:
    given = random_buffers(4000, seed=5, times=400)
    table = Table.of(given.buffers)
    greedy = [fitted(table, order_by(table, name), name, best) for name in LARGEST for best in (BEST, FIRST)]
    lowest = min(one.height for one in greedy)
    search = Cores(table, greedy[0])
    heights = []
    for _ in range(25):
        search.advance()
        heights.append(search.best.height)
        assert search.best.height == int((search.best.offsets + table.size).max())
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] - table.peak < 0.8 * (lowest - table.peak)
    offsets = np.zeros(len(given.buffers), np.int64)
    offsets[table.number] = search.best.offsets
    check_addresses(Addresses(given, tuple(offsets.tolist()), "", False, 0.0))
