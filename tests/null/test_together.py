"""Predictions of a step of several micro-batches, together and one after the other. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.budgets import Budget
from forebay.errors import ConfigError
from forebay.figures import with_figures
from forebay.lowering import accumulation_of, lower
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import make_plan
from forebay.planning import assess
from forebay.plans import Plan
from forebay.simulation import Costs, by_turns, in_turn, together
from forebay.states import Masters
from forebay.timeline import CROSSING, Lane
from forebay.trace import Leaves
from tests.null.planning import asked, chain, machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

pytestmark = pytest.mark.usefixtures("short_searches")

LAYERS, WIDTH, ACTIVATION = 4, 64, 65536
TRACE = chain(LAYERS, width=WIDTH, activation=ACTIVATION)
PARAMETERS = 3 * WIDTH * WIDTH * 4
"""Bytes of a layer."""

COUNT = 8
WIDE = 1 << 40
FAST = machine()
SLOW_LINK = machine(h2d=1e6, d2h=1e6)
OPS = sum(len(TRACE.segments[visit.segment].ops) for visit in TRACE.visits)


def planned(policy: str, on: Machine = FAST, count: int = COUNT) -> Plan:
    return with_figures(TRACE, on, make_plan(asked(TRACE, on, device=WIDE), policy), micro_batches=count)


def test_one_micro_batch_is_the_step() -> None:
    for policy in ("stream", "offload-all", "stream-recompute"):
        plan = planned(policy)
        assert together(plan, Costs(TRACE, FAST, Masters.WHOLE), 1).seconds == pytest.approx(plan.step_seconds)


def test_ops_take_longer_where_micro_batches_pass_together() -> None:
    plan, more = planned("keep"), 1e-3
    slow = replace(FAST, together_seconds=more)
    alone, longer = (together(plan, Costs(TRACE, on, Masters.WHOLE), COUNT).seconds for on in (FAST, slow))
    assert longer - alone == pytest.approx(COUNT * OPS * more)
    one, other = (by_turns(plan, Costs(TRACE, on, Masters.WHOLE), COUNT).seconds for on in (slow, FAST))
    assert one == other


def test_blocks_and_gradients_cross_once_and_by_turns_for_each() -> None:
    """In forward every layer is fetched, in backward all but those that the slots still hold; each gradient leaves. The
    forward of a further micro-batch finds in the slots what the backward before it has left there."""
    plan, costs = planned("stream"), Costs(TRACE, FAST, Masters.WHOLE)
    once, turns = together(plan, costs, COUNT), by_turns(plan, costs, COUNT)
    missing = LAYERS - len(plan.streaming.slots)
    assert once.moved[Lane.H2D] == (LAYERS + missing) * PARAMETERS
    assert turns.moved[Lane.H2D] == once.moved[Lane.H2D] + (COUNT - 1) * 2 * missing * PARAMETERS
    assert once.moved[Lane.D2H] == LAYERS * PARAMETERS
    assert turns.moved[Lane.D2H] == COUNT * LAYERS * PARAMETERS
    assert once.moved[Lane.DISK_READ] == once.moved[Lane.DISK_WRITE] == 0


def test_activations_cross_for_each_micro_batch() -> None:
    """All that a layer saves and what goes to the next; the bytes of one micro-batch are those of the plan's arena."""
    plan, costs = planned("offload-all"), Costs(TRACE, FAST, Masters.WHOLE)
    one, many = (together(plan, costs, count).moved for count in (1, COUNT))
    moved = (many[Lane.D2H] - one[Lane.D2H]) // (COUNT - 1)
    assert moved == (many[Lane.H2D] - one[Lane.H2D]) // (COUNT - 1) > 0
    assert moved <= plan.streaming.host_activations
    assert one[Lane.D2H] - moved == sum(b.gradient_nbytes for b in TRACE.model.blocks if b.name in hosted(plan))


def hosted(plan: Plan) -> set[str]:
    return {p.block for p in plan.placements if not p.resident}


def test_where_the_link_binds_a_step_is_no_longer_with_more_micro_batches() -> None:
    plan, costs = planned("stream", SLOW_LINK), Costs(TRACE, SLOW_LINK, Masters.WHOLE)
    assert plan.step_seconds is not None
    assert together(plan, costs, COUNT).seconds < 1.05 * plan.step_seconds
    assert by_turns(plan, costs, COUNT).seconds > 5 * plan.step_seconds


def test_where_compute_binds_a_step_takes_that_of_all() -> None:
    busy = machine(compute=1e6)
    plan, costs = planned("stream", busy), Costs(TRACE, busy, Masters.WHOLE)
    taken = together(plan, costs, COUNT).seconds
    assert COUNT * costs.ops(0, OPS) <= taken <= 1.05 * COUNT * costs.ops(0, OPS)


def test_what_turns_move_is_what_a_program_of_them_moves() -> None:
    for policy in ("stream", "offload-all", "resident"):
        plan, costs = planned(policy), Costs(TRACE, FAST, Masters.WHOLE)
        program = lower(TRACE, plan, micro_batches=5)
        moved = dict.fromkeys(CROSSING, 0)
        for action in program.actions:
            if action.step == program.steps - 1 and action.lane in moved:
                moved[action.lane] += action.nbytes
        assert by_turns(plan, costs, 5).moved == moved


def test_turns_need_the_figures_of_the_plan() -> None:
    with pytest.raises(ConfigError, match="give it its figures first"):
        by_turns(replace(planned("stream"), micro_batch_seconds=None), Costs(TRACE, FAST, Masters.WHOLE), COUNT)


def test_gradients_of_tied_parameters_wait_on_the_host() -> None:
    """Of a block that the forward comes to twice: for each micro-batch out once more and back."""
    tied = block("tied", ((WIDTH, WIDTH), "float32", True))
    inner = block("inner", ((WIDTH, WIDTH), "float32", True))
    layers = [Layer("tied", saved=(4096,), out=4096), Layer("inner", saved=(4096,), out=4096)]
    trace = chain_trace([tied, inner], [*layers, layers[0]], input_nbytes=4096)
    plan = with_figures(trace, FAST, make_plan(asked(trace, FAST, device=WIDE), "stream"), micro_batches=COUNT)
    once = together(plan, Costs(trace, FAST, Masters.WHOLE), COUNT)
    assert once.moved[Lane.D2H] == (2 + COUNT) * WIDTH * WIDTH * 4


def test_where_forward_draws_random_numbers_blocks_are_fetched_for_each_in_forward() -> None:
    """And once in backward, as without."""
    trace = replace(TRACE, works=tuple(replace(work, op=f"{work.op}.native_dropout") for work in TRACE.works))
    assert in_turn(trace) and not in_turn(TRACE)
    plan = planned("stream")
    once, drawn = (together(plan, Costs(one, FAST, Masters.WHOLE), COUNT) for one in (TRACE, trace))
    forward = LAYERS * PARAMETERS
    assert drawn.moved[Lane.H2D] - once.moved[Lane.H2D] == (COUNT - 1) * forward
    assert drawn.moved[Lane.D2H] == once.moved[Lane.D2H]
    report = assess("chain", trace, FAST, Budget(WIDE), "stream", micro_batches=COUNT)
    assert any("draws random numbers" in note for note in report.notes)


def test_so_they_are_where_forward_leaves_something_in_the_modules() -> None:
    once, always = (replace(TRACE, leaves=leaves) for leaves in (Leaves.ONCE, Leaves.ALWAYS))
    assert in_turn(always) and not in_turn(once)
    plan = planned("stream")
    moved = [together(plan, Costs(one, FAST, Masters.WHOLE), COUNT).moved[Lane.H2D] for one in (TRACE, once, always)]
    assert moved[0] == moved[1] == moved[2] - (COUNT - 1) * LAYERS * PARAMETERS
    report = assess("chain", always, FAST, Budget(WIDE), "stream", micro_batches=COUNT)
    assert any("leaves something in the model's modules" in note for note in report.notes)
    assert report.plan is not None and report.plan.accumulation is not None
    assert report.plan.accumulation.leaves is Leaves.ALWAYS


def test_a_plan_says_what_as_many_take_as_it_leaves_room_for() -> None:
    plan = planned("stream", SLOW_LINK)
    assert plan.accumulation is not None
    assert plan.accumulation == replace(
        accumulation_of(TRACE, plan) or plan.accumulation,
        micro_batches=COUNT,
        step_seconds=together(plan, Costs(TRACE, SLOW_LINK, Masters.WHOLE), COUNT).seconds,
    )
    assert plan.seconds_of_step(COUNT, COUNT) == plan.accumulation.step_seconds
    assert plan.seconds_of_step(COUNT) == by_turns(plan, Costs(TRACE, SLOW_LINK, Masters.WHOLE), COUNT).seconds
    assert plan.seconds_of_step(COUNT, 2) is plan.seconds_of_step(2, 2) is None
    assert plan.seconds_of_step(1, 1) == plan.step_seconds
    assert planned("resident").seconds_of_step(COUNT, COUNT) is None
    assert Plan.from_json(plan.to_json()) == plan


def test_a_report_says_what_both_take() -> None:
    report = assess("chain", TRACE, SLOW_LINK, Budget(WIDE), "stream", micro_batches=COUNT)
    found, plan = report.accumulation, report.plan
    assert found is not None and plan is not None and plan.accumulation is not None
    assert (found.micro_batches, report.seconds) == (COUNT, found.seconds)
    assert found.seconds == plan.seconds_of_step(COUNT, COUNT) and found.loop_seconds == plan.seconds_of_step(COUNT)
    tiers = (Tier.DEVICE, Tier.HOST, Tier.DISK)
    assert {t: found.peaks[t] for t in tiers} == {t: plan.accumulation.needed(t, COUNT) for t in tiers}
    assert plan.peaks()[Tier.DEVICE] == plan.device < found.peaks[Tier.DEVICE]
    assert assess("chain", TRACE, SLOW_LINK, Budget(WIDE), "stream").accumulation is None


def test_where_nothing_streams_both_are_the_loop() -> None:
    report = assess("chain", TRACE, FAST, Budget(WIDE), micro_batches=COUNT)
    found = report.accumulation
    assert found is not None and report.plan is not None
    assert (found.seconds, found.moved) == (found.loop_seconds, found.loop_moved)
    assert found.peaks[Tier.DEVICE] == report.plan.device
    assert any("nothing streams" in note for note in report.notes)


def test_micro_batches_for_which_there_is_no_room_do_not_fit() -> None:
    device = make_plan(asked(TRACE, FAST, device=WIDE), "stream-recompute").device
    assert assess("chain", TRACE, FAST, Budget(device)).fits
    report = assess("chain", TRACE, FAST, Budget(device), micro_batches=64)
    assert not report.fits and report.seconds is None
    assert "no plan leaves room for 64 micro-batches" in report.reasons[0]
