"""``swapadvisor``: Belady's rule in pools, what swaps cost, and that the search is no worse than one pool."""

from __future__ import annotations

from itertools import combinations

import pytest

from forebay.planners.activations.items import Item
from forebay.planners.activations.literature.moments import Idle, Moments
from forebay.planners.activations.literature.swapadvisor import Pools, Swaps, evolved
from tests.null.literature.graphs import layers_in
from tests.null.planning import chain

TURN = 100.0
LAYER = layers_in(chain(1))[0]


def swaps(*tensors: tuple[int, float, float]) -> Swaps:
    """Of tensors by bytes, seconds of their last use in forward, and of the first in backward: a byte a second."""
    able = []
    for place, (nbytes, left, asked) in enumerate(tensors):
        item = Item(f"op{place}", 0, 0.0, nbytes, nbytes, nbytes, float(nbytes), float(nbytes))
        able.append(Idle(LAYER, (item.op, 0), item, None, 0.0, left, asked, (0, 0)))
    return Swaps(able, Moments((0.0, 2 * TURN), TURN))


def test_where_a_pool_is_full_that_goes_whose_next_use_is_furthest() -> None:
    some = swaps((4, 10, 190), (4, 20, 180), (4, 30, 170), (2, 40, 199))
    assert some.belady(some.one_pool, 14) == set()
    assert some.belady(some.one_pool, 12) == {3}
    assert some.belady(some.one_pool, 10) == {0}
    assert some.belady(some.one_pool, 8) == {0, 3}
    assert some.belady(some.one_pool, 0) == {0, 1, 2, 3}


def test_each_pool_has_its_share() -> None:
    some = swaps((4, 10, 190), (4, 20, 180), (2, 30, 170), (2, 40, 160))
    apart = Pools((0, 1), (1, 3, 7, 7))  # classes by size: of 2 bytes and of 4
    assert some.belady(apart, 8) == {0, 2}
    assert some.belady(Pools((0, 1), (1, 1, 1, 1)), 8) == {0}
    assert some.belady(Pools((1, 1), (1, 1, 1, 1)), 8) == {0}


def test_copies_follow_each_other_and_hide_under_what_is_computed() -> None:
    some = swaps((10, 10, 190), (30, 15, 150), (20, 95, 110))
    assert some.cost(frozenset()) == (0.0, 0)
    assert some.cost(frozenset({0, 1})) == (0.0, 40)
    # Out from 95 to 115, 15 after the turn; back at 120, 10 after it is asked for.
    assert some.cost(frozenset({2})) == (25.0, 20)


@pytest.mark.parametrize("room", [0, 10, 25, 40, 60])
def test_no_pools_are_better_than_the_best_of_all_and_none_worse_than_one(room: int) -> None:
    some = swaps((10, 10, 190), (30, 60, 150), (20, 90, 115), (10, 94, 112), (30, 20, 180), (20, 98, 105))
    found = evolved(some, room)
    assert found == evolved(some, room) and len(found) == len(set(found))
    sizes = [one.nbytes for one in some.able]
    ways = [frozenset(way) for n in range(len(sizes) + 1) for way in combinations(range(len(sizes)), n)]
    least = min(some.cost(way) for way in ways if sum(sizes) - sum(sizes[place] for place in way) <= room)
    assert least <= some.cost(found[0]) <= some.cost(some.belady(some.one_pool, room))
    assert all(sum(sizes) - sum(sizes[place] for place in way) <= room for way in found)


def test_pools_gain_where_what_is_asked_last_cannot_hide() -> None:
    """The large one lies idle the longest, and takes longer on the link than there is time; the small ones hide."""
    some = swaps((90, 95, 195), *[(5, 5.0 * n, 180.0 - 5 * n) for n in range(8)])
    one = some.cost(some.belady(some.one_pool, 105))
    assert some.cost(evolved(some, 105)[0]) < one
