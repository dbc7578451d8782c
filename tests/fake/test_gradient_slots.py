"""Slots for gradients that are used up: who gets which, what its gradients wait for, who has to go."""

from __future__ import annotations

import pytest

from forebay.device.base import Completion
from forebay.errors import ForebayError
from forebay.scheduling.gradients import GradientSlots


class Buffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Done(Completion):
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


def slots(*sizes: int) -> GradientSlots:
    return GradientSlots([Buffer(size) for size in sizes])


def test_the_slot_that_was_given_back_first_is_taken_first() -> None:
    """And what lands there comes after its last reader."""
    made, readers = slots(10, 10, 10), [Done(), Done(), Done()]
    first = [made.take(block, 10).number for block in "abc"]
    assert first == [0, 1, 2]
    for block, reader in zip("bca", readers, strict=True):
        made.give_back(block, (reader,))
    again = [made.take(block, 10) for block in "def"]
    assert [slot.number for slot in again] == [1, 2, 0]
    assert [slot.read for slot in again] == [(reader,) for reader in readers]


def test_a_block_keeps_its_slot_until_it_gives_it_back() -> None:
    made = slots(10)
    slot = made.take("a", 4)
    assert made.of("a") is slot and made.of("b") is None
    made.give_back("a", ())
    assert made.of("a") is None and made.in_the_way(10) is None


def test_who_has_had_one_the_longest_is_in_the_way() -> None:
    made = slots(20, 10, 10)
    assert made.take("small", 10).nbytes == 20  # the first that holds it
    made.take("b", 10)
    assert made.in_the_way(10) is None
    made.take("c", 10)
    assert made.in_the_way(10) == "small"
    made.give_back("small", ())
    made.take("d", 5)
    assert made.in_the_way(5) == "b"
    assert made.in_the_way(11) == "d"  # the only one whose slot is large enough


def test_gradients_that_no_slot_holds() -> None:
    with pytest.raises(ForebayError, match="take 21 bytes and no slot"):
        slots(20, 10).in_the_way(21)
