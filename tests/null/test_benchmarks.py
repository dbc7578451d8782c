"""A race of scripted contenders against a scripted clock: what it computes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.case import BenchmarkError, Contender
from benchmarks.measure import Outcome, Runner, noticing_exhaustion, race
from tests.null.benching import FOREBAY, PLAIN, ROUNDS, WARMUP, Scripted, case_of, out_of_memory, run


def test_medians_and_ratios_are_taken_round_by_round() -> None:
    plain, forebay = run(case_of(PLAIN, FOREBAY), alone=2)
    assert plain.alone == (1.0, 2.0)
    assert plain.seconds == (1.0, 2.0, 4.0)
    assert plain.median == 2.0
    assert plain.ratio == 1.0
    # One second of tail over two steps; warm-up and what happens between turns are not counted.
    assert forebay.seconds == (1.5, 3.5, 5.5)
    assert forebay.ratios == (1.5, 1.75, 1.375)
    assert forebay.median == 3.5
    # Not 3.5 / 2.0: the ratio of the medians would mix rounds.
    assert forebay.ratio == 1.5
    assert forebay.account.counters == {"fetches": 7}


def test_the_order_rotates_and_everyone_is_closed_once() -> None:
    log: list[str] = []
    run(case_of(PLAIN, FOREBAY), log)
    assert log == [
        *["plain", "plain", "close plain"],
        *["plain", "forebay", "forebay", "plain", "plain", "forebay", "forebay", "plain"],
        "close plain",
        "close forebay",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (replace(FOREBAY, first_loss=4.000000000000001), "do not compute the same"),
        (replace(FOREBAY, loss_shift=0.01), "losses after updates differ"),
        (replace(FOREBAY, loss_shift=float("nan")), "has losses"),
    ],
)
def test_unequal_losses_are_refused_and_everyone_is_closed(changed: Scripted, message: str) -> None:
    log: list[str] = []
    with pytest.raises(BenchmarkError, match=message):
        run(case_of(PLAIN, changed), log)
    assert sorted(log[-2:]) == ["close forebay", "close plain"]


def test_losses_after_an_update_may_differ_in_rounding() -> None:
    scores = run(case_of(PLAIN, replace(FOREBAY, loss_shift=1e-6)))
    assert [score.outcome for score in scores] == [Outcome.FINISHED] * 2


def test_a_contender_that_runs_out_of_memory_keeps_its_row() -> None:
    log: list[str] = []
    plain, forebay = run(case_of(PLAIN, replace(FOREBAY, fails_in=WARMUP + 1)), log)
    assert forebay.outcome is Outcome.OUT_OF_MEMORY
    assert forebay.detail == "MemoryError: no room for an activation"
    assert forebay.seconds == (1.5,)
    assert forebay.ratios == (1.5,)
    assert len(plain.seconds) == ROUNDS
    assert log.count("close forebay") == 1


def test_a_contender_that_cannot_start_keeps_its_row() -> None:
    plain, forebay = run(case_of(PLAIN, replace(FOREBAY, fails_to_start=True)))
    assert (forebay.outcome, forebay.median, forebay.ratio) == (Outcome.OUT_OF_MEMORY, None, None)
    assert len(plain.seconds) == ROUNDS


def test_without_a_baseline_there_is_no_ratio() -> None:
    plain, forebay = run(case_of(replace(PLAIN, fails_to_start=True), FOREBAY))
    assert plain.outcome is Outcome.OUT_OF_MEMORY
    assert forebay.seconds == (1.5, 3.5, 5.5)
    assert forebay.ratio is None


def test_other_errors_are_not_kept_as_a_row() -> None:
    def start(contender: Contender) -> Runner:
        with noticing_exhaustion(out_of_memory):
            raise ValueError("a fault of its own")

    with pytest.raises(ValueError, match="a fault of its own"):
        race(case_of(PLAIN, FOREBAY), start, say=lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": (PLAIN, PLAIN, FOREBAY)}, "one name"),
        ({"baseline": "nobody"}, "the baseline is 'nobody'"),
        ({"subject": "nobody"}, "the subject is 'nobody'"),
        ({"control": "nobody"}, "the control is 'nobody'"),
        ({"rounds": 2}, "at least 3 rounds"),
        ({"steps": 1}, "at least 2 steps"),
    ],
)
def test_a_case_is_validated_at_birth(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        case_of(*changes.pop("contenders", (PLAIN, FOREBAY)), **changes)
