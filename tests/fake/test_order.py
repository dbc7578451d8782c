"""The record of block uses: what it announces, and what it makes of a pass that differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.scheduling.order import NEVER, AccessOrder

TRAINING, EVALUATION = "training", "evaluation"


def recorded(uses: str, kind: str = TRAINING) -> AccessOrder:
    """An order whose last pass used the blocks in ``uses`` (a letter each), at the beginning of the next one."""
    order = AccessOrder()
    order.begin(kind)
    for block in uses:
        order.note(block)
    order.begin(kind)
    return order


def after(uses: str, noted: str) -> AccessOrder:
    order = recorded(uses)
    for block in noted:
        order.note(block)
    return order


def test_nothing_is_announced_before_there_is_a_record() -> None:
    order = AccessOrder()
    assert list(order.upcoming(3)) == [] and order.distance("a") == NEVER and order.first_uses() == []
    order.begin(TRAINING)
    for block in "abc":
        order.note(block)
    assert list(order.upcoming(3)) == [] and order.distance("a") == NEVER
    assert order.deviations == 0


def test_the_last_pass_announces_the_next() -> None:
    order = after("abccba", "a")
    assert list(order.upcoming(0)) == []
    assert list(order.upcoming(2)) == ["b", "c"]
    assert list(order.upcoming(9)) == ["b", "c", "a"]  # each once
    assert [order.distance(block) for block in "abcd"] == [3, 0, 1, NEVER]


def test_backward_is_told_from_forward_by_where_the_pass_is() -> None:
    order = after("abcba", "abc")
    assert list(order.upcoming(2)) == ["b", "a"]
    order.note("b")
    assert list(order.upcoming(2)) == ["a"]
    assert order.distance("b") == NEVER


def test_uses_in_a_row_are_one() -> None:
    order = after("aaabbb", "aaaa")
    assert list(order.upcoming(2)) == ["b"] and order.deviations == 0
    assert order.first_uses() == ["a"]


def test_each_kind_of_pass_has_its_own_record() -> None:
    order = recorded("abcba")
    order.note("a")  # cut short: a forward without backward becomes the record
    order.begin(EVALUATION)
    assert list(order.upcoming(1)) == []
    for block in "cab":
        order.note(block)
    order.begin(TRAINING)
    assert list(order.upcoming(3)) == ["a"]
    order.begin(EVALUATION)
    assert list(order.upcoming(3)) == ["c", "a", "b"]
    assert order.deviations == 0


def test_a_pass_without_uses_leaves_the_record() -> None:
    order = recorded("ab")
    order.begin(TRAINING)
    order.begin(EVALUATION)
    order.begin(TRAINING)
    assert list(order.upcoming(2)) == ["a", "b"]


def test_a_skipped_block_is_one_deviation_and_the_rest_is_still_announced() -> None:
    order = after("abcdcba", "ac")
    assert order.deviations == 1
    assert list(order.upcoming(1)) == ["d"]
    for block in "dca":
        order.note(block)
    assert order.deviations == 2  # the second b is missing too
    assert list(order.upcoming(1)) == []


def test_an_unknown_block_is_one_deviation_and_loses_nothing() -> None:
    order = after("abc", "ax")
    assert order.deviations == 1
    assert list(order.upcoming(2)) == ["b", "c"]
    order.note("b")
    assert list(order.upcoming(1)) == ["c"] and order.deviations == 1


def test_a_longer_pass_than_the_record_counts_what_is_new() -> None:
    order = after("ab", "abab")
    assert order.deviations == 2
    assert list(order.upcoming(1)) == []


def test_first_uses_are_those_of_the_pass_that_runs_or_ran() -> None:
    order = recorded("abcba")
    assert order.first_uses() == ["a", "b", "c"]
    order.note("c")
    assert order.first_uses() == ["c"]


USES = st.text("abcd", max_size=12)


@given(USES)
def test_a_pass_like_the_last_is_announced_use_by_use(uses: str) -> None:
    order = recorded(uses)
    once = "".join(block for i, block in enumerate(uses) if i == 0 or uses[i - 1] != block)
    for position, block in enumerate(once):
        rest = once[position:]
        assert list(order.upcoming(1)) == [block]
        assert list(order.upcoming(4)) == list(dict.fromkeys(rest))
        for other in "abcd":
            assert order.distance(other) == (rest.index(other) if other in rest else NEVER)
        order.note(block)
    assert list(order.upcoming(1)) == []
    assert order.deviations == 0


@given(USES, USES)
def test_whatever_a_pass_does_it_is_the_next_one_s_record(record: str, uses: str) -> None:
    order = after(record, uses)
    assert order.deviations <= len(uses)
    assert set(order.upcoming(4)) <= set(record)
    order.begin(TRAINING)
    assert list(order.upcoming(4)) == list(dict.fromkeys(uses or record))


def test_updates_follow_the_order_of_use() -> None:
    order = AccessOrder()
    order.begin("training")
    for block in ("b", "a", "c", "a", "b"):
        order.note(block)
    # Unused blocks come last, in the order given; a use of what is not asked for is left out.
    assert order.in_order_of_use(["x", "a", "b", "y"]) == ["b", "a", "x", "y"]
    assert order.record("training") == ()
    order.begin("training")
    assert order.record("training") == ("b", "a", "c", "a", "b")
    assert order.in_order_of_use(["a", "b"]) == ["b", "a"]
