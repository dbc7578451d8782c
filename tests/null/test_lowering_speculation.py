"""Updates ahead of their step on paper: when they run, what they wait for, what they leave as it is, what they take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.arenas import arenas_of, home_nbytes
from forebay.budgets import DiskBudget
from forebay.checking import check
from forebay.layout import state_layout
from forebay.lowering import lower, sketch
from forebay.memory import Kind, Tier
from forebay.phases import phases
from forebay.plans import Plan, Update
from forebay.program import Action, Program, Verb
from forebay.simulation import Costs, simulate
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.at_storage import at_storage
from tests.null.on_device import on_device
from tests.null.strategies import plans, roomy, roomy_machine, traces
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.updating import at_home, updating

HOMES = {
    "host": (Tier.HOST, Tier.HOST, Tier.HOST),
    "a slot": (Tier.DEVICE, Tier.HOST, Tier.HOST),
    "states on disk": (Tier.HOST, Tier.HOST, Tier.DISK),
    "parameters on disk": (Tier.DISK, Tier.HOST, Tier.HOST),
    "disk": (Tier.DISK, Tier.HOST, Tier.DISK),
}


NOTHING = dict.fromkeys(Tier, 0)
ENOUGH = 1 << 50


def trained(trace: Trace) -> frozenset[str]:
    """Blocks of which something has a gradient."""
    names = [b.name for b in trace.model.blocks for _ in b.parameters]
    return frozenset(names[v.resolve(g.parameter)] for _, v, op in trace.ops() for g in op.gradients)


def speculating(trace: Trace, plan: Plan, blocks: frozenset[str]) -> Plan:
    """``plan`` with updates of ``blocks`` ahead of their step, and room for them."""
    plan = updating(plan, Update.AHEAD, blocks)
    sizes = arenas_of(trace.model, plan, trace.state_names)
    disk = DiskBudget("folder", ENOUGH) if sizes.disk else None
    budget = replace(plan.budget, host=ENOUGH, pinned=None, disk=disk)
    return replace(plan, budget=budget, host=sizes.host, disk=sizes.disk)


@st.composite
def speculations(draw: st.DrawFn) -> tuple[Trace, Plan]:
    """A random trace and plan, with any of its blocks that train and are not resident updated ahead of their step."""
    trace = draw(traces())
    plan = draw(plans(trace))
    able = sorted(trained(trace) & {p.block for p in plan.placements if not p.resident})
    chosen = draw(st.sets(st.sampled_from(able))) if able else set[str]()
    return trace, speculating(trace, plan, frozenset(chosen))


def of(program: Program, *verbs: Verb) -> list[tuple[int, Action]]:
    return [(i, a) for i, a in enumerate(program.actions) if a.verb in verbs and a.tensor < 0]


@settings(max_examples=25)
@given(speculations(), st.integers(1, 3))
def test_a_block_is_updated_as_soon_as_nothing_more_lands(drawn: tuple[Trace, Plan], micro_batches: int) -> None:
    trace, plan = drawn
    program = lower(trace, plan, micro_batches=micro_batches)
    event(f"{len(plan.updated(Update.AHEAD))} of {len(plan.placements)} ahead")
    last: dict[tuple[str, int], int] = {}
    for index, action in of(program, Verb.LAND, Verb.ACCUMULATE):
        last[action.block, action.step] = index
    computed = {a.step: i for i, a in enumerate(program.actions) if a.verb is Verb.COMPUTE}
    work = (Verb.UPDATE, Verb.READ, Verb.WRITE)
    for name in plan.updated(Update.AHEAD):
        for step in range(program.steps):
            end = last[name, step]
            jobs = [(i, a) for i, a in of(program, *work) if (a.block, a.step) == (name, step)]
            # A read of the parameters may be a fetch's; all else is the update's and follows the last landing at once.
            own = [i for i, a in jobs if a.verb is not Verb.READ or a.chunk >= 0 or i > end]
            assert min(own) == end + 1
            updates = [i for i, a in jobs if a.verb is Verb.UPDATE]
            after = range(end + 1, max(updates) + 1)
            assert all(program.actions[i].verb in work and program.actions[i].block == name for i in after)
    for index, action in of(program, Verb.UPDATE):
        if action.block not in plan.updated(Update.AHEAD):
            assert index > computed[action.step]


@settings(max_examples=25)
@given(speculations(), st.integers(1, 2))
def test_every_chunk_is_written_once(drawn: tuple[Trace, Plan], micro_batches: int) -> None:
    """Also one of which nothing has a gradient: the other copy has to be whole."""
    trace, plan = drawn
    program = lower(trace, plan, micro_batches=micro_batches)
    found = Counter((a.block, a.chunk, a.step, a.verb) for _, a in of(program, Verb.UPDATE, Verb.WRITE))
    for placement in plan.placements:
        if placement.update is not Update.AHEAD:
            continue
        layout = state_layout(
            trace.model.block(placement.block), trace.state_names, plan.streaming.update_chunk, Masters.WHOLE
        )
        for step in range(program.steps):
            for chunk, content in enumerate(layout.chunks):
                assert found.pop((placement.block, chunk, step, Verb.UPDATE)) == 1
                if placement.states is Tier.DISK and content.nbytes:
                    assert found.pop((placement.block, chunk, step, Verb.WRITE)) == 1
            if placement.parameters is Tier.DISK:
                assert found.pop((placement.block, -1, step, Verb.WRITE)) == 1
    assert not any(name in plan.updated(Update.AHEAD) for name, *_ in found)


def test_a_chunk_without_a_gradient_goes_along_into_the_other_copy() -> None:
    """In place nobody writes it."""
    trace = chain_trace([block("b", *[((1024,), "float32", True)] * 2)], [Layer("b", reads=(0,))])
    plan = roomy(trace)
    plan = replace(plan, streaming=replace(plan.streaming, update_chunk=1024))
    for one, chunks in ((plan, [0]), (speculating(trace, plan, frozenset("b")), [0, 1])):
        assert [a.chunk for _, a in of(lower(trace, one, steps=1), Verb.UPDATE)] == chunks


@settings(max_examples=25)
@given(speculations(), st.integers(1, 2))
def test_what_the_device_sees_stays_as_it_was(drawn: tuple[Trace, Plan], micro_batches: int) -> None:
    """The same compute, fetches and gradients in the same order, with the same bytes on the device."""
    trace, plan = drawn
    lanes = (Lane.COMPUTE, Lane.H2D, Lane.D2H)

    def seen(one: Plan) -> dict[Lane, list[Action]]:
        actions = lower(trace, one, steps=2, micro_batches=micro_batches).actions
        return {lane: [replace(a, after=()) for a in actions if a.lane is lane] for lane in lanes}

    assert seen(plan) == seen(at_home(plan))


@settings(max_examples=30)
@given(speculations(), st.integers(1, 3))
def test_the_checker_accepts_it(drawn: tuple[Trace, Plan], micro_batches: int) -> None:
    """It shares no code with the lowering."""
    trace, plan = drawn
    check(trace, roomy_machine(trace.device), plan, lower(trace, plan, micro_batches=micro_batches))


def waits(program: Program) -> list[set[int]]:
    """All that comes before each action: what it waits for, the one before it on its lane, and what those wait for."""
    before: list[set[int]] = []
    latest: dict[Lane, int] = {}
    for index, action in enumerate(program.actions):
        found: set[int] = set()
        for earlier in (*action.after, *((latest[action.lane],) if action.lane in latest else ())):
            found |= before[earlier] | {earlier}
        before.append(found)
        latest[action.lane] = index
    return before


@settings(max_examples=20)
@given(speculations(), st.integers(1, 2))
def test_the_order_that_two_copies_need(drawn: tuple[Trace, Plan], micro_batches: int) -> None:
    """Of every step: gradients land before the update reads them, the next fetch comes after it, and the one that reads
    the copy that it writes (those of the step before) before it."""
    trace, plan = drawn
    program = lower(trace, plan, steps=4, micro_batches=micro_batches)
    before = waits(program)
    ends = {a.step: i for i, a in enumerate(program.actions) if a.verb is Verb.COMPUTE}
    found: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for index, action in enumerate(program.actions):
        # What is fetched behind the last compute of a step is the next step's.
        step = action.step + (action.verb is Verb.FETCH and index > ends[action.step])
        name = "land" if action.verb in (Verb.LAND, Verb.ACCUMULATE) else action.verb.value
        if action.tensor < 0:
            found[name, action.block, step].append(index)
    homes = {p.block: p.parameters for p in plan.placements}
    for name in plan.updated(Update.AHEAD):
        for step in range(program.steps):
            for update in found["update", name, step]:
                assert before[update].issuperset(found["land", name, step])
                assert before[update].issuperset(found["update", name, step - 1])
                if homes[name] is not Tier.DISK:
                    assert before[update].issuperset(found["fetch", name, step - 1])
                for landing in found["land", name, step + 1]:
                    assert update in before[landing]
                for fetch in found["fetch", name, step + 1]:
                    assert update in before[fetch]


def network(dtype: str = "bfloat16") -> Trace:
    """Layers of two chunks of 1024 elements, of which one layer has a frozen parameter."""
    layers = [block(f"b{i}", ((1024,), dtype, True), ((1024,), dtype, i != 1)) for i in range(3)]
    return chain_trace(layers, [Layer(b.name, (640,), 0, 640) for b in layers])


@pytest.mark.parametrize("home", HOMES)
def test_an_update_into_another_copy_moves_no_more(home: str) -> None:
    """Bytes of an update: states and parameters in and out, gradients in, ahead of its step as well. What is not
    trained goes along, unless all of the block passes through memory anyway."""
    trace = network()
    plan = roomy(trace, HOMES[home], slots=2)
    plan = replace(plan, streaming=replace(plan.streaming, update_chunk=1024))
    usual = sum(a.nbytes for _, a in of(lower(trace, plan, steps=1), Verb.UPDATE))
    ahead = speculating(trace, plan, frozenset({"b1", "b2"}))
    more = sum(a.nbytes for _, a in of(lower(trace, ahead, steps=1), Verb.UPDATE)) - usual
    # b1 has 1024 elements of bf16 that are not trained.
    assert more == (0 if HOMES[home][0] is Tier.DISK else 2 * 1024 * 2)


@pytest.mark.parametrize("home", HOMES)
def test_an_update_is_apart_where_it_reads_one_copy_in_memory_and_writes_another(home: str) -> None:
    """What comes from disk and goes there is updated where it lies in between; without a second copy all is."""
    trace = network()
    plan = roomy(trace, HOMES[home], slots=2)
    ahead = speculating(trace, plan, frozenset({"b1", "b2"}))
    for one in (plan, ahead):
        program = lower(trace, one)
        for _, update in of(program, Verb.UPDATE):
            assert update.apart == (update.block in one.updated(Update.AHEAD) and home != "disk")
        assert [a.apart for a in sketch(trace, one).actions] == [a.apart for a in program.actions]
    # Without states there are parameters alone.
    bare = replace(network("float32"), state_names=())
    ahead = speculating(bare, roomy(bare, HOMES[home], slots=2), frozenset({"b1"}))
    updates = [a for _, a in of(lower(bare, ahead), Verb.UPDATE) if a.block == "b1"]
    assert {a.apart for a in updates} == {HOMES[home][0] is not Tier.DISK}


TOGETHER = (Verb.UPDATE, Verb.LOAD, Verb.STORE)


def taken_together(actions: Sequence[Action]) -> list[list[int]]:
    """The numbers of actions that a sketch takes for one: updates of a block on the host, one behind the other, what
    goes to a cell for one job, and what comes back; but nothing that is chosen first, nor what goes with that."""
    found: list[list[int]] = []
    chosen = {(a.block, a.chunk) for a in actions if a.chosen_from}
    for number, action in enumerate(actions):
        before = actions[found[-1][-1]] if found else None
        alike = before is not None and all(
            getattr(before, name) == getattr(action, name) for name in ("lane", "verb", "block", "step")
        )
        whole = action.lane is Lane.UPDATE or (before is not None and before.chunk == action.chunk)
        beside = action.lane in (Lane.DEVICE_UPDATE, Lane.STORAGE_UPDATE)
        apart = beside or (action.verb is Verb.LOAD and (action.block, action.chunk) in chosen)
        if alike and whole and action.verb in TOGETHER and not apart:
            found[-1].append(number)
        else:
            found.append([number])
    return found


@pytest.mark.parametrize(
    ("way", "density"), [(Update.AHEAD, None), (Update.DEVICE, None), (Update.STORAGE, None), (Update.STORAGE, 0.01)]
)
def test_a_sketch_has_the_actions_of_the_program(way: Update, density: float | None) -> None:
    """In outline: whatever its seconds follow from, and of transfers and updates the block. What is one behind the
    other, for one job, is one action that begins when all of it may, and takes as long."""
    trace = network("float32" if way is Update.STORAGE else "bfloat16")  # parameters go there, beside gradients
    plan = roomy(trace, HOMES["states on disk" if way is Update.STORAGE else "host"], slots=2)
    plan = replace(plan, streaming=replace(plan.streaming, update_chunk=1024))
    blocks = frozenset({"b0", "b2"})
    if way is Update.STORAGE:
        # Settled: else the last step is the second once more, when not every cell had been used before.
        streaming = replace(plan.streaming, overlap_update=False)
        plan = at_storage(trace, replace(plan, streaming=streaming), blocks, density)
    else:
        plan = speculating(trace, plan, blocks) if way is Update.AHEAD else on_device(trace, plan, blocks)
    program, outline = lower(trace, plan), sketch(trace, plan)
    groups = taken_together(program.actions)
    assert (max(map(len, groups)) > 1) is (density is None)
    assert len(groups) == len(outline.actions) and program.steps == outline.steps
    place = {number: index for index, group in enumerate(groups) for number in group}
    costs = Costs(trace, roomy_machine(), Masters.WHOLE)
    for group, short in zip(groups, outline.actions, strict=True):
        actions = [program.actions[number] for number in group]
        first, last = actions[0], actions[-1]
        assert (short.lane, short.verb, short.step, short.ops, short.apart) == (
            *(first.lane, first.verb, first.step, first.ops, first.apart),
        )
        assert short.nbytes == sum(action.nbytes for action in actions)
        assert short.block == (last.block if last.verb is not Verb.COMPUTE else "")
        waited = {place[earlier] for action in actions for earlier in action.after}
        latest: dict[Lane, int] = {}
        for index in sorted(waited):
            latest[outline.actions[index].lane] = index
        assert short.after == tuple(sorted(latest.values()))
        seconds = [costs.action(action) for action in actions]
        assert costs.action(short) == pytest.approx(sum(seconds), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("home", HOMES)
def test_second_copies_stand_all_the_time(home: str) -> None:
    """In the accounts of the program, of the simulation and of every phase of a run."""
    trace = network()
    plan = roomy(trace, HOMES[home], slots=2)
    ahead = speculating(trace, plan, frozenset({"b1", "b2"}))
    parameters, _, states = HOMES[home]
    homes = [trace.model.block(name) for name in ahead.updated(Update.AHEAD)]
    layouts = [state_layout(b, trace.state_names, plan.streaming.update_chunk, Masters.WHOLE) for b in homes]
    second = {
        (Tier.HOST, Kind.PARAMETER): 0 if parameters is Tier.DISK else sum(b.nbytes for b in homes),
        (Tier.HOST, Kind.STATE): 0 if states is Tier.DISK else sum(layout.nbytes for layout in layouts),
        (Tier.DISK, Kind.PARAMETER): sum(home_nbytes(b) for b in homes) if parameters is Tier.DISK else 0,
        (Tier.DISK, Kind.STATE): sum(layout.nbytes for layout in layouts) if states is Tier.DISK else 0,
    }
    once, twice = (lower(trace, one, steps=1).standing for one in (plan, ahead))
    for (tier, kind), nbytes in second.items():
        assert twice.get(tier, {}).get(kind, 0) - once.get(tier, {}).get(kind, 0) == nbytes
    peaks = simulate(trace, roomy_machine(), ahead).peaks
    assert (peaks[Tier.HOST], peaks.get(Tier.DISK, 0)) == (ahead.host, ahead.disk)
    assert all((p.host, p.disk) == (ahead.host, ahead.disk) for p in phases(trace, ahead, NOTHING | peaks).values())


def test_second_copies_of_parameters_are_page_locked_if_there_is_room_for_all_of_them() -> None:
    """They are an arena of their own: what stood without them stays page-locked."""
    trace = replace(network(), device="cuda")
    plan = speculating(trace, roomy(trace), frozenset({"b0", "b1", "b2"}))
    sizes = arenas_of(trace.model, plan, trace.state_names)
    assert sizes.host_spare_parameters == sum(b.nbytes for b in trace.model.blocks) == sizes.host_parameters // 2
    for pinned, locked in (
        (None, sizes.host_parameters),
        (sizes.host_parameters, sizes.host_parameters),
        (sizes.host_parameters - 1, sizes.host_parameters // 2),
        (sizes.host_parameters // 2 - 1, 0),
    ):
        limited = replace(plan, budget=replace(plan.budget, pinned=pinned))
        assert lower(trace, limited, steps=1).standing[Tier.PINNED].get(Kind.PARAMETER, 0) == locked
