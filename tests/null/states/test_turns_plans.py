"""Updates in turns on paper: whose turn it is, in the words of the plan, in the program, in its seconds. No torch."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median

import pytest

from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, PlanInvalid
from forebay.lowering import lower
from forebay.memory import Tier
from forebay.planners import INEXACT, PLANNERS, Problem, make_plan
from forebay.planners.states.angel_ptm import ROUNDS
from forebay.plans import Plan, Streaming, Update
from forebay.program import Verb
from forebay.reporting.run import RunReport
from forebay.scheduling.rounds import Rounds
from forebay.simulation import simulate
from forebay.timeline import typical_seconds
from tests.null.planning import ENOUGH, asked, chain, machine

TRACE = chain(6)
NAME = "angel-ptm-lock-free"
SLOW = machine(update=2e7)
"""The update of a step takes longer than its forward and backward."""

DEVICE = make_plan(asked(TRACE, SLOW, device=ENOUGH), "stream").device


def problem(device: int = DEVICE) -> Problem:
    return asked(TRACE, SLOW, device=device)


def made(policy: str = NAME) -> Plan:
    return make_plan(problem(), policy)


TURNS = made()
EVERY = TURNS.streaming.update_every


def test_it_is_asked_for_by_name_and_says_what_it_changes() -> None:
    exact = made("angel-ptm")
    assert PLANNERS[NAME] is INEXACT[NAME]
    assert TURNS.placements == exact.placements and (TURNS.device, TURNS.host) == (exact.device, exact.host)
    assert exact.streaming.update_every == 1 and not exact.changes_numbers
    (words,) = TURNS.changes_numbers
    assert f"each once in {EVERY} steps" in words and f"of up to {EVERY - 1} steps" in words
    assert Plan.from_json(TURNS.to_json()) == TURNS


def test_a_block_is_updated_once_in_a_round_and_its_gradients_are_added_up_in_between() -> None:
    program = lower(TRACE, TURNS)
    rounds = Rounds.of(TURNS)
    assert program.round == EVERY and [*program.settled] == [*range(program.steps - EVERY, program.steps)]
    for block in TRACE.model.blocks:
        own = [a for a in program.actions if a.block == block.name]
        updates = {a.step for a in own if a.verb is Verb.UPDATE}
        assert updates == {s for s in range(program.steps) if rounds.has_turn(block.name, s)}
        assert len(updates & set(program.settled)) == 1
        for action in own:
            if action.verb in (Verb.LAND, Verb.ACCUMULATE):
                begins = action.step == 0 or action.step - 1 in updates
                assert action.verb is (Verb.LAND if begins else Verb.ACCUMULATE)


def test_its_program_is_right_within_its_budgets_and_a_step_takes_the_mean_of_a_round() -> None:
    check(TRACE, SLOW, TURNS)
    timeline = simulate(TRACE, SLOW, TURNS)
    peaks = timeline.peaks
    assert peaks[Tier.DEVICE] <= TURNS.device <= DEVICE and peaks[Tier.HOST] <= TURNS.host
    assert TURNS.step_seconds == pytest.approx(mean(timeline.step_seconds[-EVERY:]))
    assert len(set(timeline.step_seconds[-EVERY:])) > 1  # the last step alone would be another figure
    # What is measured stands beside it: a run that does as foretold is not said to be slower, or faster.
    ran = replace(timeline, step_seconds=(9.0, *timeline.step_seconds[-EVERY:] * 3))
    report = RunReport(TURNS, ran, elapsed=sum(ran.step_seconds), steps=len(ran.step_seconds))
    assert report.step_ratio == pytest.approx(1.0)
    assert median(ran.step_seconds) != pytest.approx(TURNS.step_seconds)


def test_steps_in_turns_are_timed_in_whole_rounds_and_others_each_by_itself() -> None:
    assert typical_seconds((9.0, 1.0, 3.0, 2.0, 4.0, 1.0, 9.0), 2) == 3.0  # rounds of 5, 3, 2: the first step is left
    assert typical_seconds((9.0, 1.0, 2.0)) == 2.0 and typical_seconds((1.0, 2.0), 4) == 1.5
    with pytest.raises(ValueError, match="no step"):
        typical_seconds((), 2)


def test_the_round_is_the_shortest_that_is_as_fast_as_any() -> None:
    """With updates that take no time nothing is gained by a long one; with updates that do, the step gains."""
    fast = make_plan(asked(TRACE, machine(update=1e12, h2d=1e12, d2h=1e12), device=DEVICE), NAME)
    assert fast.streaming.update_every == ROUNDS[0] < EVERY <= len(TRACE.model.blocks)
    exact = made("angel-ptm")
    assert TURNS.step_seconds is not None and exact.step_seconds is not None
    assert TURNS.step_seconds < exact.step_seconds / 2


def test_states_on_disk_are_written_once_in_a_round() -> None:
    """What the lock-free update is for."""
    on, trace = machine(disk=1e8), chain(6, width=512)
    free = make_plan(asked(trace, on, device=ENOUGH), "stream")
    short = asked(trace, on, device=free.device, host=free.host * 3 // 4, disk=ENOUGH)
    exact, turns = make_plan(short, "angel-ptm"), make_plan(short, NAME)
    assert exact.disk == turns.disk > 0 and any(p.states is Tier.DISK for p in turns.placements)
    check(trace, on, turns)
    written = [
        sum(a.nbytes for a in program.actions if a.verb is Verb.WRITE and a.step in program.settled) / program.round
        for program in (lower(trace, exact), lower(trace, turns))
    ]
    assert written[1] == pytest.approx(written[0] / turns.streaming.update_every)


def test_the_program_of_one_schedule_is_refused_for_the_other() -> None:
    other = replace(TURNS, streaming=replace(TURNS.streaming, update_every=3))
    exact = replace(TURNS, streaming=replace(TURNS.streaming, update_every=1))
    with pytest.raises(PlanInvalid, match=r"is updated in steps 0, 1, 2, and the plan has it once in every 4"):
        check(TRACE, SLOW, TURNS, lower(TRACE, exact))
    with pytest.raises(PlanInvalid, match="the plan has it once in every 3"):
        check(TRACE, SLOW, other, lower(TRACE, TURNS))
    with pytest.raises(PlanInvalid, match=r"replaces what was there|has no update in step"):
        check(TRACE, SLOW, exact, lower(TRACE, TURNS))


def test_a_gradient_that_overwrites_what_waits_is_found() -> None:
    program = lower(TRACE, TURNS)
    place = next(i for i, a in enumerate(program.actions) if a.verb is Verb.ACCUMULATE)
    actions = [*program.actions]
    actions[place] = replace(actions[place], verb=Verb.LAND)
    with pytest.raises(PlanInvalid, match=r"is added to what has landed before: expected accumulate"):
        check(TRACE, SLOW, TURNS, replace(program, actions=tuple(actions)))


def test_where_everything_stays_there_is_nothing_to_wait_for() -> None:
    with pytest.raises(CannotServe, match=f"policy {NAME} makes updates .* What would fit: policy angel-ptm or auto"):
        make_plan(problem(ENOUGH), NAME)


def test_what_cannot_take_turns_is_refused() -> None:
    ahead = tuple(p.updating(Update.AHEAD) for p in TURNS.placements)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"changes_numbers": ()}, "must say in changes_numbers that blocks take turns"),
        ({"placements": ahead}, "set the update of block layers.0 to step, got ahead"),
        ({"streaming": replace(TURNS.streaming, delay_after=0)}, "in turns .* or a step late .*, not both"),
    ]
    for changes, words in wrong:
        with pytest.raises(ConfigError, match=words):
            replace(TURNS, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="update_every must be 1 step or more, got 0"):
        Streaming(update_every=0)
    with pytest.raises(ConfigError, match="a round takes 1 step or more"):
        Rounds(("one",), 0)
