"""Masters of which plans keep the lower half: who does, what it takes, what moves, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.budgets import Budget
from forebay.checking import check
from forebay.cli.compare import compare_policies
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.layout import LOWER, MASTER, state_layout
from forebay.lowering import lower
from forebay.machine import Machine
from forebay.memory import Kind, Tier
from forebay.planners import Bench, Problem, for_policy, make_plan, make_room
from forebay.planners.parts import Draft, all_resident
from forebay.planners.room import Room
from forebay.plans import Plan, Update
from forebay.program import Verb
from forebay.simulation import Costs, forecast, settled_seconds, simulate
from forebay.simulation.stages import block_stages
from forebay.states import Masters, masters_for
from forebay.trace import Trace
from forebay.workspaces import widened_copies, workspace_nbytes
from tests.null.on_device import on_device
from tests.null.planning import ENOUGH, asked, machine
from tests.null.strategies import roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

ON = machine(compute=1e8, h2d=1e9, d2h=1e9, update=1e9)
SIDE, EACH, BLOCKS = 64, 3, 6
ELEMENTS = SIDE * SIDE * EACH
"""Of a block: whole pages of every stream."""


def network(dtype: str = "bfloat16", states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> Trace:
    made = [block(f"layers.{i}", *[((SIDE, SIDE), dtype, True)] * EACH) for i in range(BLOCKS)]
    trace = chain_trace(made, [Layer(b.name, (8192,) * EACH, 0, 8192) for b in made], input_nbytes=8192)
    return replace(trace, state_names=states)


def problem(trace: Trace, on: Machine = ON, *, device: int = 1 << 20, host: int = ENOUGH) -> Problem:
    return replace(asked(trace, on, device=device, host=host), state_names=trace.state_names)


@pytest.mark.parametrize(
    ("dtype", "states", "kept"),
    [
        ("bfloat16", ("exp_avg", "exp_avg_sq"), Masters.LOWER),
        ("bfloat16", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), Masters.LOWER),
        ("float16", ("exp_avg", "exp_avg_sq"), Masters.WHOLE),
        ("float32", ("exp_avg", "exp_avg_sq"), Masters.WHOLE),
        ("bfloat16", ("exp_avg",), Masters.WHOLE),
        ("bfloat16", (), Masters.WHOLE),
        ("bfloat16", ("exp_avg:bfloat16", "exp_avg_sq:bfloat16"), Masters.WHOLE),
        (
            "bfloat16",
            ("exp_avg:8bit", "exp_avg_scale:scale", "exp_avg_sq:8bit", "exp_avg_sq_scale:scale"),
            Masters.WHOLE,
        ),
    ],
)
def test_where_a_half_is_enough(dtype: str, states: tuple[str, ...], kept: Masters) -> None:
    """The parameter is the other half, and a state that is never negative has a sign to spare."""
    asked_for = problem(network(dtype, states))
    assert asked_for.masters is Masters.WHOLE
    assert for_policy(asked_for, "auto").masters is kept
    assert for_policy(asked_for, "zero-offload").masters is Masters.WHOLE
    assert masters_for(states, {dtype, "float32"}) is kept


def test_a_drive_that_computes_has_no_parameters() -> None:
    disk = machine(disk=1e9).disk
    assert disk is not None
    drives = replace(problem(network()), machine=replace(ON, disk=replace(disk, update_rate=1e9)))
    assert for_policy(drives, "auto").masters is Masters.WHOLE


def test_two_bytes_an_element_less_at_home() -> None:
    """Everything streams: parameter, gradient, both moments and the master, 16 bytes and 14; staging is the same, but
    for what torch's ops, where there are no kernels, would widen a chunk in: gradients, 4 bytes, then masters too."""
    trace = network()
    whole = make_plan(problem(trace), "stream")
    half = make_plan(for_policy(problem(trace), "stream"), "stream")
    assert (whole.streaming.masters, half.streaming.masters) == (Masters.WHOLE, Masters.LOWER)
    hosted = sum(p.states is Tier.HOST for p in half.placements)
    assert hosted == BLOCKS and whole.host - half.host == 2 * hosted * ELEMENTS - 4 * ELEMENTS
    for plan in (whole, half):
        check(trace, ON, plan)
        peaks = simulate(trace, ON, plan).peaks
        assert peaks[Tier.HOST] == plan.host and peaks[Tier.DEVICE] <= plan.device


def test_a_simulation_takes_the_seconds_of_the_plan() -> None:
    """An update that binds goes at the rate of masters as they are kept."""
    trace, slow = network(), machine(compute=1e8, h2d=1e9, d2h=1e9, update=1e6)
    plan = make_plan(for_policy(problem(trace, slow), "stream"), "stream")
    assert plan.streaming.masters is Masters.LOWER
    assert settled_seconds(simulate(trace, slow, plan).step_seconds, lower(trace, plan)) == plan.step_seconds
    assert forecast(trace, slow, plan).step_seconds == plan.step_seconds


@pytest.mark.parametrize(("masters", "kept"), [(Masters.WHOLE, 12), (Masters.LOWER, 10)])
def test_costs_count_masters_as_they_are_kept(masters: Masters, kept: int) -> None:
    """Of an element, bytes of its states and of what an update touches: those and the parameter in and out, the
    gradient in. The same for a block, a stage of a pipeline, and what is read and written beside the storage."""
    costs = Costs(network(), ON, masters)
    for one, stage in zip(costs.trace.model.blocks, block_stages(costs), strict=True):
        assert costs.states(one) == kept * ELEMENTS
        assert costs.touched(one) == stage.touched == (2 * kept + 3 * 2) * ELEMENTS
    assert costs.states_share == kept / (2 * kept + 3 * 2)


def test_a_card_with_room_for_some_whole_masters_has_these_where_that_is_faster() -> None:
    """Torch's ops take halves apart and put them together, in 70 bytes an element: of blocks that stay on a card this
    makes a step longer. More memory never does."""
    trace, slow = network(), machine(compute=1e9, h2d=1e8, d2h=1e8, update=3e7)
    slow = replace(slow, device_bandwidth=3e8)
    whole = Bench(problem(trace, slow)).device(all_resident(trace.model))
    kept, seconds = [], []
    for share in (0.3, 0.7, 1.0):
        asked_for = problem(trace, slow, device=int(share * whole))
        room = make_room(asked_for, "auto", 1, lambda asked, bench: make_plan(asked, "auto", bench))
        assert room.plan.streaming.masters is room.bench.problem.masters
        kept.append(room.plan.streaming.masters)
        seconds.append(room.plan.step_seconds)
        assert seconds[-1] == min(make_plan(p, "auto").step_seconds for p in (asked_for, for_policy(asked_for, "auto")))
    assert kept == [Masters.LOWER, Masters.WHOLE, Masters.WHOLE]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("compute", "bandwidth", "asks"), [(1e7, 3e8, [Masters.LOWER]), (1e8, 3e8, [Masters.LOWER, Masters.WHOLE])]
)
def test_whole_masters_are_not_planned_for_where_no_such_plan_can_be_faster(
    compute: float, bandwidth: float, asks: list[Masters]
) -> None:
    """Only with halves does everything stay, beside a link that hardly moves. Putting them together takes a notable
    part of both steps, but less than what is computed again without, in the first."""
    trace, slow = network(), machine(compute=compute, h2d=1e4, d2h=1e4, update=1e4)
    tight = problem(trace, replace(slow, device_bandwidth=bandwidth))
    tight = replace(tight, budget=Budget(Bench(tight.with_halves()).device(all_resident(trace.model))))
    asked_for = []

    def make(wanted: Problem, bench: Bench) -> Plan:
        asked_for.append(wanted.masters)
        return make_plan(wanted, "auto", bench)

    room = make_room(tight, "auto", 1, make)
    assert asked_for == asks
    assert room.plan == make_plan(tight.with_halves(), "auto")
    whole = make_plan(tight, "auto").step_seconds
    assert room.plan.step_seconds is not None and whole is not None and room.plan.step_seconds < whole


@pytest.mark.parametrize("policy", ["resident", "recompute"])
def test_where_halves_take_more_than_whole_masters_these_fit(policy: str) -> None:
    """All of a small block is put together at one time: 4 bytes an element, for the 2 that halves spare. What is
    needed is what whole masters need, and enough."""
    one = block("layers.0", *[((SIDE, SIDE), "bfloat16", True)] * EACH)
    wanted = problem(chain_trace([one], [Layer(one.name, (64,), 0, 64)]), device=1, host=1)
    with pytest.raises(DoesNotFit) as whole:
        make_plan(wanted, policy)
    with pytest.raises(DoesNotFit) as halves:
        make_plan(wanted.with_halves(), policy)
    with pytest.raises(DoesNotFit) as refused:
        room_of(wanted, policy)
    assert refused.value.needed == whole.value.needed < halves.value.needed
    enough = replace(wanted, budget=replace(wanted.budget, device=refused.value.needed))
    assert room_of(enough, policy).plan.device <= refused.value.needed


def test_blocks_that_run_again_keep_whole_masters_where_putting_halves_together_takes_long() -> None:
    trace, slow = network(), machine(compute=1e12)
    wanted = problem(trace, slow, device=1 << 30)
    whole, halves = make_plan(wanted, "recompute"), make_plan(wanted.with_halves(), "recompute")
    assert whole.step_seconds is not None and halves.step_seconds is not None
    assert whole.step_seconds < halves.step_seconds
    assert room_of(wanted, "recompute").plan == whole


def room_of(wanted: Problem, policy: str) -> Room:
    return make_room(wanted, policy, 1, lambda asked, bench: make_plan(asked, policy, bench))


def test_a_comparison_asks_what_a_plan_is_asked() -> None:
    """Half of each master under forebay's own policy, all of it under that of a published system."""
    trace = network()
    own, published = compare_policies(trace, ON, [Budget(1 << 20)], ["stream", "zero-offload"])
    for candidate, masters in ((own, Masters.LOWER), (published, Masters.WHOLE)):
        plan = make_plan(for_policy(problem(trace), candidate.policy), candidate.policy)
        assert plan.streaming.masters is masters
        assert candidate.peaks[Tier.HOST] == plan.host and candidate.step_seconds == plan.step_seconds


def test_room_for_second_copies() -> None:
    """On a host with hardly any room beside whole masters a plan with halves has more of them, and is faster for it."""
    trace, slow = network(), machine(compute=2e8, h2d=1e9, d2h=1e9, update=6e7)
    host = make_plan(problem(trace, slow), "stream").host
    tight = problem(trace, slow, device=300 << 10, host=host)
    whole, half = make_plan(tight, "auto"), make_plan(for_policy(tight, "auto"), "auto")
    assert len(half.updated(Update.AHEAD)) > len(whole.updated(Update.AHEAD))
    assert whole.step_seconds is not None and half.step_seconds is not None
    assert half.step_seconds < 0.9 * whole.step_seconds
    assert max(whole.host, half.host) <= host
    assert any("lower halves are kept" in reason for reason in half.reasons)
    assert not any("lower halves are kept" in reason for reason in whole.reasons)


def test_coarse_steps_have_halves_too() -> None:
    """A draft does not know of masters. They are what the plan has, even in steps that only compare."""
    trace = network()
    draft = Draft.of(make_plan(problem(trace), "stream"))
    for asked_for in (problem(trace), for_policy(problem(trace), "auto")):
        bench = Bench(asked_for)
        assert bench.coarse(draft).masters is bench.plan("", draft).streaming.masters is asked_for.masters


def halved(plan: Plan) -> Plan:
    return replace(plan, streaming=replace(plan.streaming, masters=Masters.LOWER))


def test_bytes_of_updates_on_the_device() -> None:
    """10 bytes of states an element there and back, parameters and gradients there, parameters back."""
    trace = network()
    plan = on_device(trace, halved(roomy(trace, (Tier.HOST, Tier.HOST, Tier.HOST))))
    program = lower(trace, plan)
    check(trace, roomy_machine(), plan, program)

    def moved(verb: Verb, part: Kind) -> int:
        return sum(a.nbytes for a in program.actions if (a.verb, a.part, a.step) == (verb, part, 0))

    n = BLOCKS * ELEMENTS
    assert moved(Verb.LOAD, Kind.STATE) == moved(Verb.STORE, Kind.STATE) == 10 * n
    assert (
        moved(Verb.LOAD, Kind.PARAMETER)
        == moved(Verb.STORE, Kind.PARAMETER)
        == moved(Verb.LOAD, Kind.GRADIENT)
        == 2 * n
    )


def test_streams_begin_at_whole_lines() -> None:
    """However few elements a piece has, so that no two threads write to one line."""
    odd = block("a", ((3,), "bfloat16", True), ((33,), "bfloat16", True), ((5, 7), "bfloat16", True))
    layout = state_layout(odd, ("exp_avg", "exp_avg_sq"), 1024, Masters.LOWER)
    assert layout.streams == (LOWER, "exp_avg", "exp_avg_sq") and MASTER not in layout.streams
    for chunk in layout.chunks:
        for name, (at, _) in layout.spans(chunk).items():
            width = 2 if name == LOWER else 4
            assert all((at + width * piece.offset) % 64 == 0 for piece in chunk.pieces)
    (first, *_) = odd.parameters
    assert [widened_copies(first, masters) for masters in Masters] == [1, 2]
    assert workspace_nbytes(layout.streams, 10, 10, ()) == 40


@pytest.mark.parametrize("copies", [1, 2])
def test_on_disk_in_as_many_copies_as_a_checkpoint_asks_for(copies: int) -> None:
    """10 bytes of states an element of each block there, however many places these have."""
    made = [block(f"layers.{i}", *[((256, 256), "bfloat16", True)] * EACH) for i in range(BLOCKS)]
    trace = chain_trace(made, [Layer(b.name, (8192,) * EACH, 0, 8192) for b in made], input_nbytes=8192)
    on = machine(compute=1e8, h2d=1e9, d2h=1e9, disk=1e9, update=1e9)

    def of(host: int) -> Problem:
        return replace(asked(trace, on, device=1 << 21, host=host, disk=ENOUGH), disk_copies=copies)

    everything = make_plan(for_policy(of(ENOUGH), "stream"), "stream")
    assert everything.streaming.masters is Masters.LOWER
    plan = make_plan(for_policy(of(everything.host * 3 // 4), "stream"), "stream")
    placed = sum(p.states is Tier.DISK for p in plan.placements)
    assert placed and not any(p.parameters is Tier.DISK for p in plan.placements)
    assert plan.streaming.masters is Masters.LOWER
    assert plan.disk == copies * placed * 10 * EACH * 256**2
    check(trace, on, plan)
    assert simulate(trace, on, plan).peaks[Tier.DISK] == plan.disk


def test_plans_that_could_not_be_run_are_refused() -> None:
    trace = network()
    plan = halved(make_plan(problem(trace), "stream"))
    other = network(states=("exp_avg",))
    with pytest.raises(PlanInvalid, match=r"bfloat16 and an optimizer that keeps exp_avg_sq in fp32; the model trains"):
        check(other, ON, replace(plan, fingerprint=""))
    placements = tuple(replace(p, states=Tier.DISK, update=Update.STORAGE) for p in plan.placements)
    with pytest.raises(ConfigError, match="updated beside the storage"):
        replace(plan, placements=placements)
