"""Which of two plans is taken, the one with all logits at once or the one in pieces, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from forebay.errors import ConfigError, DoesNotFit, ModelError, NoRoomTogether
from forebay.loss import Cut
from forebay.memory import Tier
from forebay.planning import choose_plan, choose_report
from forebay.plans import Placement, Plan
from forebay.reporting.forecast import Alternative, PlanReport
from tests.null.test_plan_report import PLAN, STEP

EXACT, OTHER = Cut(1024, 65536, exact=True), Cut(1024, 65536, exact=False)


def exact(allowed: int | None) -> Cut:
    return EXACT


def other(allowed: int | None) -> Cut:
    return OTHER


def little(allowed: int | None) -> str:
    return "it is little"


def taking(seconds: float) -> Callable[..., Plan]:
    return lambda *asked: replace(PLAN, step_seconds=seconds)


def refused(*asked: object) -> NoReturn:
    raise DoesNotFit("device memory: too little", tier="device", needed=9, allowed=5)


def unfit(*asked: object) -> NoReturn:
    raise ModelError("its loss cannot be cut")


def never(*asked: object) -> NoReturn:
    raise AssertionError("nobody should have asked")


def report(seconds: float | None) -> PlanReport:
    made = PlanReport("m", "here", "auto", {}, 1.0)
    if seconds is None:
        return made
    step = replace(STEP, seconds=seconds, low=seconds, high=seconds)
    return replace(made, plan=PLAN, step=step)


@pytest.mark.parametrize(("chunked", "taken"), [(1.0, 1.0), (3.0, 2.0), (2.0, 2.0)])
def test_the_faster_plan_is_taken_where_both_fit(chunked: float, taken: float) -> None:
    assert choose_plan(taking(2.0), taking(chunked), exact).step_seconds == taken


def alone(seconds: float) -> Callable[..., NoReturn]:
    """No room for several micro-batches, and a plan for one at a time."""

    def refuse(*asked: object) -> NoReturn:
        plan = replace(PLAN, step_seconds=seconds)
        raise NoRoomTogether("too little together", tier="device", needed=9, allowed=5, alone=plan)

    return refuse


@pytest.mark.parametrize(("chunked", "taken"), [(1.0, 1.0), (3.0, 2.0), (2.0, 2.0)])
def test_the_faster_plan_for_one_at_a_time_is_handed_back(chunked: float, taken: float) -> None:
    with pytest.raises(NoRoomTogether, match="too little together") as e:
        choose_plan(alone(2.0), alone(chunked), exact)
    assert e.value.alone.step_seconds == taken
    with pytest.raises(NoRoomTogether) as only:
        choose_plan(refused, alone(chunked), exact)
    assert only.value.alone.step_seconds == chunked


def test_pieces_are_taken_where_nothing_else_fits() -> None:
    assert choose_plan(refused, taking(3.0), exact).step_seconds == 3.0
    with pytest.raises(DoesNotFit, match="too little"):
        choose_plan(refused, refused, exact)
    with pytest.raises(DoesNotFit, match="too little"):
        choose_plan(refused, unfit, exact)
    assert choose_plan(taking(2.0), refused, exact).step_seconds == 2.0
    assert choose_plan(taking(2.0), unfit, exact).step_seconds == 2.0


@pytest.mark.parametrize(("allows", "needed"), [(64, 1064), (16, 1024), (None, 4000)])
def test_a_refusal_says_what_is_needed_once_that_is_allowed(allows: int | None, needed: int) -> None:
    """Pieces become larger with the budget, and above some budget nobody thinks of them."""

    def find(allowed: int | None) -> Cut | str:
        if allowed is None:
            return Cut(16, 2048, exact=True)
        assert 1024 < allowed < 1100
        return "it is little" if allows is None else Cut(allows, 2048, exact=True)

    def plain() -> NoReturn:
        raise DoesNotFit("too little", tier="device", needed=4000, allowed=5)

    def chunked(cut: Cut, faster_than: float) -> NoReturn:
        raise DoesNotFit("too little", tier="device", needed=1024 + (40 if cut.piece == 64 else 0), allowed=5)

    with pytest.raises(DoesNotFit) as error:
        choose_plan(plain, chunked, find)
    assert error.value.needed == needed


def test_what_may_round_otherwise_is_named_and_not_taken() -> None:
    assert choose_plan(taking(2.0), never, other).step_seconds == 2.0
    with pytest.raises(DoesNotFit, match=r"loss='chunked' takes 1.0 KiB of logits .* instead of 64.0 KiB") as error:
        choose_plan(refused, never, other)
    assert (error.value.tier, error.value.needed, error.value.allowed) == ("device", 9, 5)


def test_a_loss_that_is_not_cut_has_one_plan() -> None:
    assert choose_plan(taking(2.0), never, little).step_seconds == 2.0
    with pytest.raises(DoesNotFit, match=r"too little$"):
        choose_plan(refused, never, little)


def test_where_all_fits_nobody_asks_how_the_loss_could_be_cut() -> None:
    """Pieces save memory and nothing else: a plan that gives up nothing for want of it gains nothing by them."""
    home = Placement("layers.0", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
    resident = replace(PLAN, placements=(home,), step_seconds=2.0)
    assert choose_plan(lambda: resident, never, never) is resident
    for given_up in (replace(resident, recompute=("layers.0",)), replace(PLAN, step_seconds=2.0)):
        assert choose_plan(lambda plan=given_up: plan, taking(1.0), exact).step_seconds == 1.0


def test_a_report_says_why_and_what_else_there_is() -> None:
    assert choose_report(report(2.0), report(1.0), EXACT).step == report(1.0).step
    assert "would be 2.00 s a step" in choose_report(report(2.0), report(1.0), EXACT).reasons[-1]
    assert "nothing fits" in choose_report(report(None), report(1.0), EXACT).reasons[-1]
    assert choose_report(report(1.0), report(2.0), EXACT).step == report(1.0).step
    assert not choose_report(report(None), report(None), EXACT).fits
    for plain in (report(2.0), report(None)):
        left = choose_report(plain, report(1.0), OTHER)
        assert left.step == plain.step
        assert left.alternatives[0].step_seconds == 1.0
        assert left.alternatives[0].words.startswith("--loss chunked: 1.00 s a step")
    assert choose_report(report(2.0), report(1.0), EXACT).solve_seconds == 2.0


def test_a_plan_in_pieces_says_so() -> None:
    made = EXACT.of(PLAN)
    assert made.loss_piece == 1024
    assert made.changes_numbers == ()
    assert "at most 1.0 KiB of logits: all at once they would be 64.0 KiB" in made.reasons[-1]
    assert "no tokens" in made.notes[-1]
    assert "round otherwise" in OTHER.of(PLAN).changes_numbers[0]
    assert Plan.from_json(made.to_json()) == made


def test_fewer_than_no_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="loss_piece must be 0 bytes or more"):
        replace(PLAN, loss_piece=-1)


def test_where_neither_fits_what_would_do_for_pieces_is_said_too() -> None:
    """The nearest of them, and tiles; what the plain loss has as well is not said twice."""

    def refusing(*words: str) -> PlanReport:
        return replace(report(None), alternatives=tuple(Alternative(one) for one in words))

    plain = refusing("device_memory 9MiB", "the optimizer sgd")
    pieces = refusing("device_memory 6MiB", "the optimizer sgd", "--tile 1MiB, which cuts head")
    said = [other.words for other in choose_report(plain, pieces, EXACT).alternatives]
    assert said == [
        "device_memory 9MiB",
        "the optimizer sgd",
        "--loss chunked with device_memory 6MiB",
        "--loss chunked with --tile 1MiB, which cuts head",
    ]
    assert "--loss chunked (it may round otherwise) with device_memory 6MiB" in [
        other.words for other in choose_report(plain, pieces, OTHER).alternatives
    ]
