"""Random plans that update blocks ahead of their step: what is lowered is accepted, what is spoiled is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.checking.step import Step
from forebay.errors import PlanInvalid
from forebay.lowering import device_bound, lower
from forebay.plans import Update
from forebay.program import Verb
from tests.null.ahead import ahead, cases_ahead, ends_of_steps, too_early
from tests.null.corruptions import CORRUPTIONS
from tests.null.strategies import Case
from tests.null.test_check_properties import refuse, rich_case, roomy_case
from tests.null.treating import TreatedOps, treated_program
from tests.null.updating import updating


@given(case=cases_ahead(), steps=st.integers(1, 3), micro_batches=st.integers(1, 3))
@settings(max_examples=25)
def test_plain_programs_are_accepted(case: Case, steps: int, micro_batches: int) -> None:
    case = roomy_case(case)
    check(case.trace, case.machine, case.plan, treated_program(case.trace, case.plan, steps, micro_batches))


@given(case=cases_ahead(), micro_batches=st.integers(1, 3))
@settings(max_examples=25)
def test_what_is_lowered_is_accepted_within_the_peaks_of_its_plan(case: Case, micro_batches: int) -> None:
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    ends = ends_of_steps(program)
    early = any(a.verb is Verb.UPDATE and i < ends[a.step] for i, a in enumerate(program.actions))
    event(f"{'some' if early else 'no'} updates before backward is over")
    most = device_bound(case.trace, case.plan)
    plan = replace(case.plan, device=most, budget=replace(case.plan.budget, device=most))
    check(case.trace, case.machine, plan, program)


@given(data=st.data(), case=cases_ahead(), micro_batches=st.integers(1, 2))
@settings(max_examples=8)
def test_any_corruption_is_refused(data: st.DataObject, case: Case, micro_batches: int) -> None:
    case = roomy_case(case)
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    for kind, spoil in CORRUPTIONS.items():
        if spoiled := spoil(case, program):
            wrong, subjects = data.draw(st.sampled_from(spoiled), label=kind)
            refuse(case, wrong, subjects)
    if early := list(too_early(case, program)):
        wrong, _ = data.draw(st.sampled_from(early), label="too early")
        refuse(case, wrong, everything(case))


def everything(case: Case) -> frozenset[str]:
    """All that a fault may be ascribed to that is a block's, a parameter's or a moved tensor's."""
    blocks = case.trace.model.blocks
    moved = map(Step(case.trace).name, TreatedOps(case.trace, case.plan).roots)
    return frozenset((*(b.name for b in blocks), *(p.name for b in blocks for p in b.parameters), *moved))


@pytest.fixture(scope="module")
def rich() -> Case:
    """All there is at once, and the updates of every other block ahead of their step."""
    case = rich_case()
    names = [p.block for p in case.plan.placements if not p.resident]
    return roomy_case(replace(case, plan=ahead(case.trace, case.plan, names[::2])))


@pytest.mark.parametrize("lowering", [lower, treated_program])
def test_every_corruption_of_a_rich_program_is_refused(lowering: object, rich: Case) -> None:
    program = lowering(rich.trace, rich.plan)  # type: ignore[operator]
    check(rich.trace, rich.machine, rich.plan, program)
    kinds = "drop_fetch", "drop_update", "repeat_update", "drop_state_io", "lose_dependency"
    for wrong, subjects in (spoiled for kind in kinds for spoiled in CORRUPTIONS[kind](rich, program)[::4]):
        refuse(rich, wrong, subjects)
    early = list(too_early(rich, program))
    assert len(early) > len(rich.plan.updated(Update.AHEAD))
    for wrong, _ in early:
        refuse(rich, wrong, everything(rich))


def test_a_plan_without_second_copies_refuses_the_program(rich: Case) -> None:
    """Each block whose update comes before backward is over is one that has to be named."""
    program = lower(rich.trace, rich.plan)
    ends = ends_of_steps(program)
    early = {a.block for i, a in enumerate(program.actions) if a.verb is Verb.UPDATE and i < ends[a.step]}
    there = rich.plan.updated(Update.AHEAD)
    assert early <= set(there) and len(early) > 1
    for name in early:
        others = updating(rich.plan, Update.AHEAD, [other for other in there if other != name])
        with pytest.raises(PlanInvalid, match=rf"block {name}\b|{name}\.\d") as caught:
            check(rich.trace, rich.machine, others, program)
        assert caught.value.subject.startswith(name)
