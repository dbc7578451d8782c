"""The fewest that fit: as many as trying each would find, in few questions."""

from __future__ import annotations

import pytest

from forebay.planners.activations.literature.fewest import FEW, SPARE, fewest_that_fit


@pytest.mark.parametrize("most", [1, 7, FEW, FEW + 1, 3000])
@pytest.mark.parametrize("power", [0.3, 1.0, 4.0])
def test_it_is_found_in_hardly_more_questions_than_bisection_asks(most: int, power: float) -> None:
    for answer in sorted({1, most // 3 + 1, most}):
        asked: list[int] = []

        def over(count: int, answer: int = answer, asked: list[int] = asked) -> int:
            asked.append(count)
            return int(1e6 * ((answer - 0.5) ** power - count**power))

        assert fewest_that_fit(most, over) == answer
        assert len(asked) <= 2 + most.bit_length() + SPARE


def test_nothing_need_be_done_and_nothing_that_can_be_is_enough() -> None:
    assert fewest_that_fit(5, lambda count: 0) == 0 and fewest_that_fit(0, lambda count: -1) == 0
    assert fewest_that_fit(5, lambda count: 1) is None and fewest_that_fit(0, lambda count: 1) is None


def test_what_falls_evenly_takes_few_questions() -> None:
    asked: list[int] = []

    def over(count: int) -> int:
        asked.append(count)
        return 1234 - count

    assert fewest_that_fit(3000, over) == 1234
    assert len(asked) <= 6
