"""Random traces, machines and plans: what is lowered is accepted, what is spoiled is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.errors import DeviceOutOfMemory, DoesNotFit, PlanInvalid
from forebay.lowering import device_bound, lower
from forebay.memory import Tier
from forebay.model import Block
from forebay.plans import Placement, Streaming
from forebay.program import Program
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.treatments import Fate, Selection, Treatment
from tests.null.corruptions import CORRUPTIONS
from tests.null.programs import device_standing, plain_program
from tests.null.strategies import HOMES, Case, cases, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace, peak_live
from tests.null.treated_bytes import moved_bytes
from tests.null.treating import treated_program

ENOUGH = 1 << 50


def roomy_case(case: Case) -> Case:
    """The case with more device memory than anything needs."""
    return replace(case, plan=replace(case.plan, budget=replace(case.plan.budget, device=ENOUGH)))


def rich_case() -> Case:
    """All there is at once: every placement, a 16-bit block, a frozen parameter, recomputation, chunks."""

    def own(name: str, dtype: str) -> Block:
        return block(name, ((40, 64), dtype, True), ((64,), dtype, name != "b2"))

    blocks = [own(f"b{i}", "bfloat16" if i % 2 else "float32") for i in range(len(HOMES) + 2)]
    trace = chain_trace(blocks, [Layer(b.name, (640, 4160), 320, 4096) for b in blocks], held_nbytes=64)
    homes = (*HOMES, *HOMES[-2:])
    placements = tuple(Placement(b.name, *home) for b, home in zip(blocks, homes, strict=True))
    most = max(b.nbytes for b in blocks)
    out, away = Treatment("out", 0, Fate.OFFLOAD), Treatment("linear", 1, Fate.OFFLOAD)
    kept = Selection(("b0", "b4"), (Treatment("linear", 0, Fate.KEEP), out))
    disk = Treatment("linear", 1, Fate.DISK), Treatment("out", 0, Fate.DISK, 8)
    codes = Treatment("linear", 1, Fate.KEEP, 4), Treatment("out", 0, Fate.OFFLOAD, 2)
    treated = (
        kept,
        Selection(("b3",), (away,)),
        Selection(("b1", "b2"), (away, out)),
        Selection(("b5",), disk),
        Selection(("b6",), codes),
    )
    streaming = Streaming(
        (most, most),
        (16384, 16384),
        gradient_window=6000,
        offload_window=6000,
        reload_window=6000,
        host_activations=sum(-(-n // 64) * 64 for n in moved_bytes(trace, treated)),
        disk_activations=sum(-(-n // 4096) * 4096 for n in moved_bytes(trace, treated, Fate.DISK)),
        disk_window=8192,
        update_chunk=1024,
    )
    plan = plan_for(trace, placements, streaming, ("b0", "b3", "b4"), treated, roomy=True)
    return roomy_case(Case(trace, roomy_machine(), plan))


@pytest.fixture(scope="module")
def rich() -> Case:
    return rich_case()


@given(case=cases(activations=True), steps=st.integers(1, 3), micro_batches=st.integers(1, 3))
def test_plain_programs_are_accepted(case: Case, steps: int, micro_batches: int) -> None:
    case = roomy_case(case)
    check(case.trace, case.machine, case.plan, treated_program(case.trace, case.plan, steps, micro_batches))


@given(case=cases(activations=True), micro_batches=st.integers(1, 3))
def test_what_is_lowered_is_accepted_within_the_peaks_of_its_plan(case: Case, micro_batches: int) -> None:
    """With no byte more on the device than Liveness promises: planners give that for the peak, and the budget."""
    program = lowered(case, micro_batches)
    most = device_bound(case.trace, case.plan)
    plan = replace(case.plan, device=most, budget=replace(case.plan.budget, device=most))
    check(case.trace, case.machine, plan, program)


@given(case=cases(activations=True))
def test_check_lowers_by_itself(case: Case) -> None:
    lowered(case, 1)
    check(case.trace, case.machine, case.plan)


@given(case=cases(recompute=False))
def test_a_budget_below_what_the_trace_needs_is_refused(case: Case) -> None:
    """Whatever streams: the arenas and, at some op, the live tensors are there."""
    least = device_standing(case.trace, case.plan) + peak_live(case.trace)
    assume(least > device_standing(case.trace, case.plan, gradients=True))  # else the plan's own figure is too small
    short = replace(case.plan, device=least - 1, budget=replace(case.plan.budget, device=least - 1))
    program = plain_program(case.trace, short)
    with pytest.raises(DoesNotFit, match=r"(op|action) \d+ \(") as caught:
        check(case.trace, case.machine, short, program)
    assert caught.value.tier == Tier.DEVICE
    assert caught.value.needed >= least
    assert caught.value.allowed == least - 1


@given(case=cases(activations=True), micro_batches=st.integers(1, 2))
@settings(max_examples=50)
def test_what_check_accepts_simulate_never_overfills(case: Case, micro_batches: int) -> None:
    """Under the smallest device budget that is accepted: each refusal says what would have been enough."""
    program = lowered(case, micro_batches)
    tight = replace(case.plan, device=device_standing(case.trace, case.plan, gradients=True))
    for _ in range(3):
        tight = replace(tight, budget=replace(tight.budget, device=tight.device))
        try:
            check(case.trace, case.machine, tight, program)
        except DoesNotFit as refusal:
            tight = replace(tight, device=refusal.needed)
        else:
            break
    check(case.trace, case.machine, tight, program)
    usages = play(program, Costs(case.trace, case.machine, Masters.WHOLE)).tiers
    peaks = {usage.tier: usage.peak for usage in usages}
    assert peaks[Tier.DEVICE] <= tight.budget.device
    assert peaks[Tier.HOST] <= (tight.budget.host or 0)
    assert peaks.get(Tier.DISK, 0) <= (tight.disk if tight.budget.disk else 0)


@given(data=st.data(), case=cases(activations=True), micro_batches=st.integers(1, 2))
@settings(max_examples=12)
def test_any_corruption_is_refused(data: st.DataObject, case: Case, micro_batches: int) -> None:
    """One program of each kind, of every case: to draw the cases is most of the work."""
    case = roomy_case(case)
    program = lowered(case, micro_batches)
    for kind, spoil in CORRUPTIONS.items():
        spoiled = spoil(case, program)
        event(f"{kind}: {'some' if spoiled else 'no'} candidates")
        if spoiled:
            wrong, subjects = data.draw(st.sampled_from(spoiled), label=kind)
            refuse(case, wrong, subjects)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize(("lowering", "micro_batches"), [(lower, 2), (treated_program, 1)])
def test_every_corruption_of_a_rich_program_is_refused(
    kind: str, micro_batches: int, lowering: object, rich: Case
) -> None:
    program = lowering(rich.trace, rich.plan, micro_batches=micro_batches)  # type: ignore[operator]
    check(rich.trace, rich.machine, rich.plan, program)
    spoiled = CORRUPTIONS[kind](rich, program)
    assert spoiled or (kind == "understate_memory" and lowering is treated_program)
    for wrong, subjects in spoiled:
        refuse(rich, wrong, subjects)


def lowered(case: Case, micro_batches: int) -> Program:
    try:
        return lower(case.trace, case.plan, micro_batches=micro_batches)
    except DeviceOutOfMemory as error:  # two blocks at once, and one slot
        event("too few slots")
        pytest.fail(f"the strategy drew too few slots: {error}")


def refuse(case: Case, program: Program, subjects: frozenset[str]) -> None:
    with pytest.raises(PlanInvalid) as caught:
        check(case.trace, case.machine, case.plan, program)
    assert caught.value.subject in subjects, str(caught.value)
    assert -1 <= caught.value.action <= len(program.actions)
