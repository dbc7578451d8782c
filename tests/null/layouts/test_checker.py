"""The checker of addresses against a comparison of all pairs, and what it says."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.errors import PlanInvalid
from tests.null.layouts.making import buffer_tuples


def placed(buffers: tuple[Buffer, ...], *offsets: int) -> Addresses:
    return Addresses(BufferSet(buffers), offsets, "a test", False, 0.0)


def overlap(addresses: Addresses) -> bool:
    places = list(zip(addresses.given.buffers, addresses.offsets, strict=True))
    return any(
        a.lower < b.upper and b.lower < a.upper and at < there + b.size and there < at + a.size and a.size and b.size
        for (a, at), (b, there) in combinations(places, 2)
    )


@given(st.data(), buffer_tuples(8))
def test_it_finds_what_a_comparison_of_all_pairs_finds(data: st.DataObject, buffers: tuple[Buffer, ...]) -> None:
    addresses = placed(buffers, *(data.draw(st.integers(0, 30)) for _ in buffers))
    if overlap(addresses):
        with pytest.raises(PlanInvalid, match="overlap in memory"):
            check_addresses(addresses)
    else:
        check_addresses(addresses)


def test_lives_that_touch_may_share_bytes_and_those_that_meet_may_not() -> None:
    a, b = Buffer("a", 0, 3, 4), Buffer("b", 3, 9, 4)
    check_addresses(placed((a, b), 0, 0))
    late = Buffer("late", 2, 9, 4)
    with pytest.raises(PlanInvalid, match=r"a and late|late and a") as fault:
        check_addresses(placed((a, late), 0, 3))
    assert fault.value.subject in ("a", "late")
    check_addresses(placed((a, late), 0, 4))


def test_an_address_is_on_its_alignment_and_not_below_0() -> None:
    wide = Buffer("wide", 0, 1, 3, alignment=8)
    check_addresses(placed((wide,), 16))
    for offset in (4, -8):
        with pytest.raises(PlanInvalid, match="wide is at address"):
            check_addresses(placed((wide,), offset))
