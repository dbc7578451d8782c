"""Random plans that update blocks on the device: what is lowered is accepted, what is spoiled is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.lowering import device_bound, lower
from forebay.memory import Kind
from forebay.plans import Update
from forebay.program import Program, Verb
from forebay.timeline import Lane
from tests.null.corruptions import CORRUPTIONS
from tests.null.on_device import cases_on_device, on_device
from tests.null.programs import drop
from tests.null.strategies import Case
from tests.null.test_check_ahead_properties import everything
from tests.null.test_check_on_device import needless
from tests.null.test_check_properties import refuse, rich_case, roomy_case
from tests.null.treating import treated_program

KINDS = (
    "drop_fetch",
    "swap_fetches",
    "drop_update",
    "repeat_update",
    "drop_landing",
    "repeat_landing",
    "drop_state_io",
    "lose_dependency",
)
"""Corruptions of what an update reads or makes."""


@given(case=cases_on_device(), steps=st.integers(1, 3), micro_batches=st.integers(1, 3))
@settings(max_examples=12)
def test_plain_programs_are_accepted(case: Case, steps: int, micro_batches: int) -> None:
    case = roomy_case(case)
    check(case.trace, case.machine, case.plan, treated_program(case.trace, case.plan, steps, micro_batches))


@given(case=cases_on_device(), micro_batches=st.integers(1, 3))
@settings(max_examples=20)
def test_what_is_lowered_is_accepted_within_the_peaks_of_its_plan(case: Case, micro_batches: int) -> None:
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    there = {a.block for a in program.actions if a.lane is Lane.DEVICE_UPDATE}
    event(f"{len(there)} blocks on the device, {len(case.plan.updated(Update.AHEAD))} ahead of their step")
    assert there <= set(case.plan.updated(Update.DEVICE))
    most = device_bound(case.trace, case.plan)
    plan = replace(case.plan, device=most, budget=replace(case.plan.budget, device=most))
    check(case.trace, case.machine, plan, program)


def spoiled(program: Program) -> Iterator[Program]:
    """Loads and stores that are missing, made twice or of other bytes; updates elsewhere."""
    for index, action in enumerate(program.actions):
        actions = list(program.actions)
        if action.verb in (Verb.LOAD, Verb.STORE):
            yield drop(program, index)
            yield replace(program, actions=(*actions, replace(action, after=(len(actions) - 1,))))
            actions[index] = replace(action, nbytes=action.nbytes - 1)
            yield replace(program, actions=tuple(actions))
            actions[index] = replace(action, part=Kind.BUFFER)
            yield replace(program, actions=tuple(actions))
        elif action.lane is Lane.DEVICE_UPDATE:
            actions[index] = replace(action, lane=Lane.UPDATE)
            yield replace(program, actions=tuple(actions))
        elif action.verb is Verb.UPDATE and action.lane is Lane.UPDATE:
            actions[index] = replace(action, lane=Lane.DEVICE_UPDATE)
            yield replace(program, actions=tuple(actions))


@given(data=st.data(), case=cases_on_device(), micro_batches=st.integers(1, 2))
@settings(max_examples=4)
def test_any_corruption_is_refused(data: st.DataObject, case: Case, micro_batches: int) -> None:
    case = roomy_case(case)
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    for kind in KINDS:
        if wrongs := CORRUPTIONS[kind](case, program):
            wrong, subjects = data.draw(st.sampled_from(wrongs), label=kind)
            refuse(case, wrong, subjects | everything(case))
    if wrong_ones := list(spoiled(program)):
        refuse(case, data.draw(st.sampled_from(wrong_ones), label="on the device"), everything(case))


@pytest.fixture(scope="module")
def rich() -> Case:
    """All there is at once, and every other block updated on the device."""
    case = rich_case()
    names = [p.block for p in case.plan.placements if not p.resident]
    return roomy_case(replace(case, plan=on_device(case.trace, case.plan, names[::2])))


@pytest.mark.parametrize("lowering", [lower, treated_program])
def test_every_corruption_of_a_rich_program_is_refused(lowering: object, rich: Case) -> None:
    program = lowering(rich.trace, rich.plan)  # type: ignore[operator]
    check(rich.trace, rich.machine, rich.plan, program)
    for wrong, subjects in (one for kind in KINDS for one in CORRUPTIONS[kind](rich, program)[::16]):
        refuse(rich, wrong, subjects)
    found = list(spoiled(program))
    assert len(found) > 100
    for wrong in found[::37]:
        refuse(rich, wrong, everything(rich))
    if lowering is treated_program:
        moves = Verb.LOAD, Verb.STORE
        wrongs = [
            wrong
            for index, earlier, wrong in needless(program)
            if program.actions[index].verb in moves or program.actions[earlier].verb in moves
        ]
        assert len(wrongs) > 50
        for wrong in wrongs[::11]:
            refuse(rich, wrong, everything(rich))
