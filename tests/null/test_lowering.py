"""Programs of chains small enough to write down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checking import check
from forebay.errors import ConfigError, DeviceOutOfMemory
from forebay.lowering import Grain, device_bound, lower, sketch
from forebay.lowering.recorder import Recorder
from forebay.memory import Kind, Tier
from forebay.plans import Placement, Plan, Update
from forebay.program import Action, Change, Program, Sketch, Verb
from forebay.simulation import Costs, play, simulate
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from tests.null.simulating import MACHINE
from tests.null.strategies import RESIDENT, Case, cases, plan_for, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import chain_trace

HOSTED = (Tier.HOST, Tier.HOST, Tier.HOST)
ON_DISK = (Tier.DISK, Tier.HOST, Tier.DISK)
NBYTES = 4 * 1300  # of a parameter and of its gradient


def chain(n: int = 3, **more: object) -> Trace:
    return chain_trace([block(f"{i}", ((1300,), "float32", True)) for i in range(n)], **more)  # type: ignore[arg-type]


def planned(trace: Trace, home: tuple[Tier, Tier, Tier] = HOSTED, slots: int = 2, **streaming: object) -> Plan:
    plan = roomy(trace, home, slots)
    return replace(plan, streaming=replace(plan.streaming, **streaming))  # type: ignore[arg-type]


def last_step(program: Program) -> list[Action]:
    return [a for a in program.actions if a.step == program.steps - 1]


def on(actions: list[Action], lane: Lane) -> list[str]:
    return [a.what for a in actions if a.lane is lane]


def test_a_step_with_one_slot() -> None:
    # One slot, no prefetch: every block comes when it is asked for. The last block is there when backward begins; the
    # first one makes no gradient of its input, so that its backward reads no parameter.
    program = lower(chain(), planned(chain(), slots=1, prefetch_distance=0))
    assert program.steps == 3  # the first updates that forward waits for are those of the step before
    step = last_step(program)
    assert on(step, Lane.H2D) == ["fetch 0", "fetch 1", "fetch 2", "fetch 1"]
    assert on(step, Lane.D2H) == ["gradient 2.0", "gradient 1.0", "gradient 0.0"]
    assert on(step, Lane.UPDATE) == ["update 0", "update 1", "update 2"]
    assert dict.fromkeys(on(step, Lane.COMPUTE)) == dict.fromkeys(
        ["forward 0", "forward 1", "forward 2", "forward", "backward", "backward 2", "backward 1", "backward 0"]
    )


def test_a_step_with_prefetch() -> None:
    # Two slots, one ahead: blocks 1 and 2 are still there when backward asks for them. The step's end fetches the first
    # block of the pass that follows, once it is updated.
    step = last_step(lower(chain(), planned(chain(), slots=2, prefetch_distance=1)))
    assert on(step, Lane.H2D) == ["fetch 1", "fetch 2", "fetch 0"]


def test_what_waits_for_what() -> None:
    program = lower(chain(), planned(chain(), slots=1, prefetch_distance=0, gradient_window=0))
    actions = program.actions
    last: dict[object, int] = {}
    for index, action in enumerate(actions):
        if action.verb is Verb.FETCH and Lane.COMPUTE in last:  # the slot's last reader may be the last compute
            assert last[Lane.COMPUTE] in action.after
            updated = last.get((Verb.UPDATE, action.block), -1)  # the home is read after its last update
            assert updated < 0 or any(i >= updated and actions[i].lane is Lane.UPDATE for i in action.after)
        if action.verb is Verb.LAND:
            assert last[Lane.COMPUTE] in action.after
        if action.verb is Verb.UPDATE:
            landed = last[Verb.LAND, action.block]
            assert any(i >= landed and actions[i].lane is Lane.D2H for i in action.after)
        for use in action.uses:
            assert last[Verb.FETCH, use.block] == last[Verb.FETCH]
        last[action.lane] = last[action.verb] = last[action.verb, action.block] = index
    # A window of 0 bytes: no op runs while a gradient is under way.
    for index, action in enumerate(actions[:-1]):
        if action.verb is Verb.LAND:
            following = next((a for a in actions[index:] if a.lane is Lane.COMPUTE), None)
            assert following is None or index in following.after


def test_gradients_leave_the_device_when_they_have_landed() -> None:
    program = lower(chain(), planned(chain()))
    gradient = 0
    for action in program.actions:
        gradient += sum(c.nbytes for c in action.changes if c.kind is Kind.GRADIENT)
        assert gradient >= 0
        if action.verb is Verb.LAND:
            assert action.changes == (Change(Kind.GRADIENT, -NBYTES),)
            assert action.nbytes == NBYTES
    assert gradient == 0
    assert sum(c.nbytes for a in program.actions for c in a.changes) == 0


def test_compute_waits_once_and_for_the_last_of_what_it_is_held_for() -> None:
    """In whatever order it is: of two on one lane the later one."""
    recorder = Recorder(in_step_with_compute=False)
    fetched = [recorder.add(Lane.H2D, Verb.FETCH, what) for what in "abc"]
    for place in (1, 2, 0):
        recorder.hold_compute(fetched[place])
    for op in range(2):
        what = f"forward {op}"
        recorder.compute(what, "", (op, op + 1), recomputed=False, treated=False, uses=(), peak=0, changes=())
    assert [action.after for action in recorder.actions[3:]] == [(2,), ()]


def test_a_pass_begins_when_no_gradient_of_the_one_before_is_under_way() -> None:
    """Whatever the window would let be: what a pass takes is worked out without any of those (``device_bound``)."""
    program = lower(chain(), planned(chain(), slots=3, gradient_window=1 << 20), micro_batches=2)
    landed, begun = -1, 0
    for index, action in enumerate(program.actions):
        if action.what == "forward 0" and landed >= 0:
            assert landed in action.after
            begun += 1
        landed = index if action.lane is Lane.D2H else landed
    assert begun == 2 * program.steps - 1


def test_the_second_micro_batch_is_added() -> None:
    step = last_step(lower(chain(), planned(chain()), micro_batches=2))
    landed = [a for a in step if a.lane is Lane.D2H]
    assert [a.verb for a in landed] == [Verb.LAND] * 3 + [Verb.ACCUMULATE] * 3
    assert [a.what for a in landed[3:]] == ["accumulate 2.0", "accumulate 1.0", "accumulate 0.0"]
    assert len(on(step, Lane.UPDATE)) == 3


def test_resident_blocks_are_updated_where_they_compute() -> None:
    program = lower(chain(), planned(chain(), RESIDENT))
    assert {a.lane for a in program.actions} == {Lane.COMPUTE}
    updates = [a for a in last_step(program) if a.verb is Verb.UPDATE]
    # Nothing is fetched, so nothing says in which order the blocks are used: that of the plan holds.
    assert [(a.what, a.chunk) for a in updates] == [("update 0", -1), ("update 1", -1), ("update 2", -1)]
    # Two states of 4 bytes, 1300 elements and 12 of padding, in and out; parameter in and out, gradient in.
    assert {a.nbytes for a in updates} == {2 * 2 * 4 * 1312 + 3 * NBYTES}
    # Each gradient is there from its completion to the end of the step, and none before.
    assert Kind.GRADIENT not in program.standing[Tier.DEVICE]
    changes = [c.nbytes for a in last_step(program) for c in a.changes if c.kind is Kind.GRADIENT]
    assert changes == [NBYTES, NBYTES, NBYTES, -3 * NBYTES]


def test_gradients_that_stay_are_there_once_however_many_passes_add_to_them() -> None:
    def most(micro_batches: int) -> int:
        program = lower(chain(), planned(chain(), RESIDENT), micro_batches=micro_batches)
        return play(program, Costs(chain(), MACHINE, Masters.WHOLE)).peaks[Tier.DEVICE]

    trace = chain()
    bound = device_bound(trace, planned(trace, RESIDENT))
    assert most(1) < bound  # the step's peak is the loss, and by then the first pass has made no gradient
    assert most(2) == most(3) == bound


def test_disk() -> None:
    program = lower(chain(2), planned(chain(2), ON_DISK, prefetch_distance=0, update_chunk=1024))
    step = last_step(program)
    chunks = ["0", "8192"]  # 1024 elements of two states of 4 bytes, whole pages
    states = [[f"states of {b} at {offset}" for offset in chunks] for b in "01"]
    # An update reads the parameters, then chunk by chunk the states.
    assert on(step, Lane.DISK_WRITE) == [f"write {w}" for b in (0, 1) for w in (*states[b], str(b))]
    updating = [w for w in on(step, Lane.DISK_READ) if "states" in w]
    assert updating == [f"read {w}" for b in (0, 1) for w in states[b]]
    actions = program.actions
    for index, action in enumerate(actions):
        if action.verb is Verb.WRITE:
            assert any(actions[i].verb is Verb.UPDATE for i in action.after)
        if action.verb is Verb.FETCH:
            read = max(i for i in range(index) if actions[i].what == f"read {action.block}")
            assert read in action.after


def test_settled_updates() -> None:
    for overlap in (True, False):
        program = lower(chain(), planned(chain(), slots=3, overlap_update=overlap))
        first = next(a for a in last_step(program) if a.verb is Verb.COMPUTE)
        waits_for_all = any(program.actions[i].what == "update 2" for i in first.after)
        assert waits_for_all is not overlap


def test_recomputed_blocks_run_again_before_their_backward() -> None:
    trace = chain()
    plan = replace(planned(trace), recompute=("1",))
    compute = [a for a in last_step(lower(trace, plan)) if a.verb is Verb.COMPUTE]
    again = [a for a in compute if a.recomputed]
    forward = [a for a in compute if a.what == "forward 1"]
    # One op that keeps what it makes; the one that makes the result saves nothing more.
    first = forward[0].ops[0]
    assert [a.ops for a in again] == [(first, first + 1)]
    assert [a.ops for a in forward] == [(first, first + 2)]
    assert again[0].what == "recompute 1"
    assert [u.block for u in again[0].uses] == ["1"]
    assert compute[compute.index(again[0]) + 1].what == "backward 1"


def test_on_the_cpu_nothing_is_issued_ahead_of_compute() -> None:
    program = lower(chain(device="cpu"), planned(chain(device="cpu"), ON_DISK))
    last = -1
    for index, action in enumerate(program.actions):
        if action.lane is Lane.COMPUTE:
            last = index
        elif last >= 0:
            assert last in action.after


def test_outputs_are_held_during_the_next_forward() -> None:
    trace = chain(held_nbytes=5000)
    actions = lower(trace, planned(trace)).actions
    held = peak = 0
    for action in actions:
        held += sum(c.nbytes for c in action.changes)
        peak = max(peak, held)
        if action.what == "forward" and action.step == 1:
            assert held == sum(
                c.nbytes for a in actions if a.step == 0 and a.what.startswith("forward") for c in a.changes
            )
    assert held == 5000


def test_refusals() -> None:
    trace = chain()
    plan = planned(trace)
    with pytest.raises(ConfigError, match="made for another model"):
        lower(trace, replace(plan, placements=plan.placements[1:]))
    with pytest.raises(ConfigError, match="recomputes block nothing"):
        lower(trace, replace(plan, recompute=("nothing",)))
    with pytest.raises(ConfigError, match="1 step and 1 micro-batch"):
        lower(trace, plan, micro_batches=0)
    small = replace(plan, streaming=replace(plan.streaming, slots=(64,)))
    with pytest.raises(DeviceOutOfMemory, match="no device slot for block 0"):
        lower(trace, small)


def test_steps_end_in_one_that_repeats() -> None:
    frozen = chain_trace([block(f"{i}", ((1300,), "float32", i % 2 == 0)) for i in range(4)])
    placements = tuple(Placement(b.name, *HOSTED) for b in frozen.model.blocks)
    plan = plan_for(frozen, placements, replace(planned(frozen).streaming, prefetch_distance=2), roomy=True)
    program = lower(frozen, plan)
    longer = lower(frozen, plan, steps=program.steps + 2)
    words = [[(a.lane, a.what, a.slot) for a in p.actions if a.step == p.steps - 1] for p in (program, longer)]
    assert words[0] == words[1]


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 2))
def test_actions_wait_for_earlier_ones_on_other_lanes(case: Case, micro_batches: int) -> None:
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    for index, action in enumerate(program.actions):
        assert all(i < index for i in action.after)
        lanes = [program.actions[i].lane for i in action.after]
        assert action.lane not in lanes and len(set(lanes)) == len(lanes)
        assert action.peak >= 0
    ops = sum(a.ops[1] - a.ops[0] for a in program.actions if a.verb is Verb.COMPUTE and not a.recomputed)
    assert ops == program.steps * micro_batches * sum(1 for _ in case.trace.ops())


def test_states_on_disk_are_read_while_others_are_written() -> None:
    # 16 chunks of one block, reads and writes as fast as each other, an update that takes no time: from the first write
    # of a step to the last one the disk writes all the time, and what comes next has been read meanwhile.
    trace = chain_trace([block("0", ((16 * 1024,), "float32", True))])
    plan = planned(trace, (Tier.HOST, Tier.HOST, Tier.DISK), update_chunk=1024)
    machine = replace(roomy_machine(), update_rate=1e15, host_bandwidth=1e15)
    check(trace, machine, plan)
    writes = [e for e in simulate(trace, machine, plan).events if e.lane is Lane.DISK_WRITE][-16:]
    assert writes[-1].end - writes[0].start == pytest.approx(sum(e.end - e.start for e in writes))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 1 << 16))
def test_gradients_that_land_together_are_the_same_bytes_in_fewer_parts(case: Case, together: int) -> None:
    """Of each backward visit the last part of a block may be smaller than asked for, and no other."""
    each = sketch(case.trace, case.plan)
    assert each == sketch(case.trace, case.plan)
    gathered = landings(sketch(case.trace, case.plan, grain=Grain(together)))
    visits = sum(visit.phase is Phase.BACKWARD for visit in case.trace.visits)
    assert gathered.keys() == landings(each).keys()
    for key, parts in landings(each).items():
        assert sum(gathered[key]) == sum(parts) and len(gathered[key]) <= len(parts)
        if not case.plan.updated(Update.BACKWARD):
            assert sum(part < together for part in gathered[key]) <= visits


def landings(program: Sketch) -> dict[tuple[int, str], list[int]]:
    """Bytes that land, by step and block."""
    found: dict[tuple[int, str], list[int]] = {}
    for action in program.actions:
        if action.verb in (Verb.LAND, Verb.ACCUMULATE):
            found.setdefault((action.step, action.block), []).append(action.nbytes)
    return found
