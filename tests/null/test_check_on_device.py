"""The checker on updates on the device of blocks that are at home elsewhere: what moves, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update
from forebay.program import Program, Verb
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.ahead import ends_of_steps, issued_earlier
from tests.null.on_device import on_device
from tests.null.programs import drop, plain_program
from tests.null.rearranging import reaches
from tests.null.strategies import HOMES, RESIDENT, roomy, roomy_machine
from tests.null.synthetic import ADAM, block
from tests.null.tracing import Layer, chain_trace, unread_trace

MACHINE = roomy_machine()
HOSTED, DISK = (Tier.HOST, Tier.HOST, Tier.HOST), (Tier.DISK, Tier.HOST, Tier.DISK)
PARAMETERS = (Tier.DISK, Tier.HOST, Tier.HOST)
LOWERINGS = [pytest.param(plain_program, id="plain"), pytest.param(lower, id="lowered")]
MOVES = Verb.LOAD, Verb.STORE

Lowering = Callable[..., Program]


def network(dtype: str = "float32", blocks: int = 3) -> Trace:
    """Blocks of two parameters of 1,024 elements each."""
    made = [block(f"b{i}", *[((32, 32), dtype, True)] * 2) for i in range(blocks)]
    return chain_trace(made, [Layer(b.name, (2048,), 0, 1024) for b in made])


def planned(trace: Trace, home: tuple[Tier, Tier, Tier] = HOSTED, chunk: int = 1024, **how: object) -> Plan:
    plan = roomy(trace, home)
    plan = replace(plan, streaming=replace(plan.streaming, update_chunk=chunk))
    return on_device(trace, plan, **how)  # type: ignore[arg-type]


NARROW, WIDE = network("bfloat16"), network()


def with_action(program: Program, index: int, **changes: object) -> Program:
    actions = list(program.actions)
    actions[index] = replace(actions[index], **changes)  # type: ignore[arg-type]
    return replace(program, actions=tuple(actions))


def place_of(program: Program, verb: Verb, name: str, part: Kind | None = None, step: int = 0, chunk: int = 0) -> int:
    """The first such action."""
    wanted = verb, name, part, step, chunk
    found = enumerate(program.actions)
    return next(i for i, a in found if (a.verb, a.block, a.part, a.step, a.chunk) == wanted)


def refused(trace: Trace, plan: Plan, program: Program, words: str) -> PlanInvalid:
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(trace, MACHINE, plan, program)
    return caught.value


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("home", [home for home in HOMES if home != RESIDENT])
@pytest.mark.parametrize("cells", [1, 3])
def test_every_placement_is_accepted(home: tuple[Tier, Tier, Tier], cells: int, lowering: Lowering) -> None:
    """All blocks, or some; in a chunk or in two; with a master and without."""
    cases = ((NARROW, "cuda", None, 1024), (WIDE, "cpu", None, 4096), (WIDE, "cuda", ("b1",), 1024))
    for trace, device, names, chunk in cases:
        trace = replace(trace, device=device)
        plan = planned(trace, home, chunk, names=names, cells=cells)
        for micro_batches in (1, 2):
            program = lowering(trace, plan, steps=3, micro_batches=micro_batches)
            check(trace, roomy_machine(device), plan, program)
        assert {a.block for a in program.actions if a.lane is Lane.DEVICE_UPDATE} == set(plan.updated(Update.DEVICE))
        check(trace, roomy_machine(device), plan)


# What moves.


def moved(program: Program, verb: Verb, part: Kind, step: int = 0) -> int:
    return sum(a.nbytes for a in program.actions if (a.verb, a.part, a.step) == (verb, part, step))


@pytest.mark.parametrize("states", [("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ()])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_have_a_closed_form(dtype: str, states: tuple[str, ...]) -> None:
    """Of 6,144 elements: states there and back, with a master for 16 bits, gradients there, parameters back; and there
    where there is no master."""
    trace = replace(network(dtype), state_names=states)
    plan = planned(trace)
    n, width, streams = 6144, 2 if dtype == "bfloat16" else 4, len(states) + (dtype == "bfloat16")
    for lowering in (plain_program, lower):
        program = lowering(trace, plan)
        check(trace, MACHINE, plan, program)
        for verb in MOVES:
            assert moved(program, verb, Kind.STATE) == 4 * streams * n
        assert moved(program, Verb.LOAD, Kind.GRADIENT) == moved(program, Verb.STORE, Kind.PARAMETER) == width * n
        assert moved(program, Verb.LOAD, Kind.PARAMETER) == (0 if dtype == "bfloat16" else width * n)


def test_only_what_has_a_gradient_moves() -> None:
    """Of a chunk with a frozen parameter, or one that nobody reads: all states, which lie together, and half of the
    rest. A chunk in which nothing has a gradient stays at home."""
    blocks = [block("a", *[((32, 32), "float32", True)] * 2)]
    trace = chain_trace(blocks, [Layer("a", (2048,), 0, 1024, reads=(0,))])
    for lowering in (plain_program, lower):
        program = lowering(trace, planned(trace, chunk=4096))
        check(trace, MACHINE, planned(trace, chunk=4096), program)
        assert moved(program, Verb.LOAD, Kind.STATE) == 2 * 4 * 2048
        assert moved(program, Verb.LOAD, Kind.GRADIENT) == moved(program, Verb.STORE, Kind.PARAMETER) == 4 * 1024
        plan = planned(trace)
        program = lowering(trace, plan)
        check(trace, MACHINE, plan, program)
        assert {a.chunk for a in program.actions if a.verb in MOVES} == {0}
        load = place_of(program, Verb.LOAD, "a", Kind.GRADIENT)
        more = replace(program, actions=(*program.actions, replace(program.actions[load], chunk=1, after=())))
        error = refused(trace, plan, more, "4096 bytes of gradients of chunk 1 of block a are loaded in step 0, and it")
        assert (error.action, error.subject) == (len(program.actions), "a")


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("trace", [NARROW, WIDE], ids=["narrow", "wide"])
def test_every_part_moves_once_and_whole(trace: Trace, lowering: Lowering) -> None:
    plan = planned(trace)
    program = lowering(trace, plan)
    check(trace, MACHINE, plan, program)
    for index, action in enumerate(program.actions):
        if action.verb not in MOVES or action.step:
            continue
        assert action.part is not None
        where = f"bytes of {action.part.value}s of chunk {action.chunk} of block {action.block} are"
        assert refused(trace, plan, drop(program, index), f": 0 {where}").subject == action.block
        for nbytes in (action.nbytes - 1, 2 * action.nbytes):
            error = refused(trace, plan, with_action(program, index, nbytes=nbytes), f": {nbytes} {where}")
            assert (error.action, error.subject) == (index, action.block)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_it_is_updated_once_and_nowhere_else(lowering: Lowering) -> None:
    plan = planned(WIDE)
    program = lowering(WIDE, plan)
    update = place_of(program, Verb.UPDATE, "b1")
    none = refused(WIDE, plan, drop(program, update), r"chunk 0 of block b1 \(b1.0\) has no update in step 0")
    assert none.subject == "b1.0"
    again = replace(program, actions=(*program.actions, replace(program.actions[update], lane=Lane.UPDATE, after=())))
    assert refused(WIDE, plan, again, "chunk 0 of block b1 has its update twice in step 0").subject == "b1.0"
    home = with_action(program, update, lane=Lane.UPDATE)
    error = refused(WIDE, plan, home, "block b1 is updated on the device, on the device_update lane")
    assert (error.action, error.subject) == (update, "b1")


def test_no_other_block_is_updated_there() -> None:
    """Nor is anything of it brought there."""
    plan = planned(WIDE, names=("b0", "b2"))
    program = plain_program(WIDE, plan)
    check(WIDE, MACHINE, plan, program)
    update = place_of(program, Verb.UPDATE, "b1")
    error = refused(
        WIDE, plan, with_action(program, update, lane=Lane.DEVICE_UPDATE), "block b1 is updated on the host, on the up"
    )
    assert (error.action, error.subject) == (update, "b1")
    other = plain_program(WIDE, planned(WIDE))
    load = next(i for i, a in enumerate(other.actions) if a.verb is Verb.LOAD and a.block == "b1")
    error = refused(WIDE, plan, other, "the plan does not update block 'b1' on the device: there is nothing to load")
    assert (error.action, error.subject) == (load, "b1")


LANES = {Verb.LOAD: (Lane.D2H, Lane.COMPUTE), Verb.STORE: (Lane.H2D, Lane.DEVICE_UPDATE), Verb.FETCH: (Lane.D2H,)}


@pytest.mark.parametrize("verb", LANES)
def test_lanes(verb: Verb) -> None:
    plan = planned(WIDE)
    program = plain_program(WIDE, plan)
    index = next(i for i, a in enumerate(program.actions) if a.verb is verb)
    for lane in LANES[verb]:
        error = refused(WIDE, plan, with_action(program, index, lane=lane), f"a {verb.value} cannot run on lane {lane}")
        assert error.action == index


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "chunk": ({"chunk": 2}, "block b1 has no chunk 2 to "),
    "parameters": ({"chunk": -1}, "block b1 has no chunk -1 to "),
    "step": ({"step": 2}, "there is no step 2"),
    "part": ({"part": None}, "of block b1 moves nothing"),
    "kind": ({"part": Kind.ACTIVATION}, "of block b1 moves activations"),
}


@pytest.mark.parametrize("verb", MOVES)
@pytest.mark.parametrize("name", WRONG)
def test_nothing_moves_that_there_is_not(name: str, verb: Verb) -> None:
    plan = planned(WIDE)
    program = plain_program(WIDE, plan)
    index = place_of(program, verb, "b1", Kind.PARAMETER)
    changes, words = WRONG[name]
    error = refused(WIDE, plan, with_action(program, index, **changes), words)
    assert (error.action, error.subject) == (index, "b1")
    if verb is Verb.STORE:
        refused(WIDE, plan, with_action(program, index, part=Kind.GRADIENT), "a store of block b1 moves gradients")


# When.


def needless(program: Program) -> Iterator[tuple[int, int, Program]]:
    """(action, one that it waits for, the program in which it does not): where nothing else puts the two in order."""
    for index, action in enumerate(program.actions):
        for earlier in action.after:
            spoiled = with_action(program, index, after=tuple(a for a in action.after if a != earlier))
            if not reaches(spoiled, earlier, index):
                yield index, earlier, spoiled


@pytest.mark.parametrize("home", [HOSTED, DISK, PARAMETERS], ids=["host", "disk", "parameters"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cells", [1, 8])
def test_every_wait_of_a_plain_program_matters(dtype: str, home: tuple[Tier, Tier, Tier], cells: int) -> None:
    """Whatever reads or writes at home, or takes a cell, has to wait for what the plain program makes it wait for: for
    landings and stores, for reads from disk, for fetches that have yet to copy, for the update between."""
    trace = network(dtype, blocks=2)
    plan = planned(trace, home, cells=cells)
    program = plain_program(trace, plan)
    check(trace, MACHINE, plan, program)
    pairs = set()
    for index, earlier, spoiled in needless(program):
        action, other = program.actions[index], program.actions[earlier]
        if {action.verb, other.verb} & {Verb.LOAD, Verb.STORE}:
            pairs.add((other.verb, action.verb))
            subject = refused(trace, plan, spoiled, f"{other.block}|{action.block}").subject
            assert subject.split(".")[0] in (action.block, other.block)
    assert pairs >= {(Verb.LAND, Verb.LOAD), (Verb.LOAD, Verb.UPDATE), (Verb.UPDATE, Verb.STORE)}
    assert ((Verb.STORE, Verb.LOAD) in pairs) == (cells == 1)
    if home != HOSTED:
        assert (Verb.STORE, Verb.WRITE) in pairs
        # Parameters with a master are not loaded: what is stored must not be overwritten by what is read.
        assert ((Verb.READ, Verb.STORE) in pairs) == (dtype == "bfloat16" and home == PARAMETERS)
        assert ((Verb.READ, Verb.LOAD) in pairs) == (dtype == "float32" or home == DISK)
    elif cells > 1:
        assert (Verb.STORE, Verb.FETCH) in pairs


def test_gradients_are_read_when_the_step_is_asked_for() -> None:
    """Before that they may be clipped. The last block's have landed long before."""
    plan = planned(WIDE)
    program = plain_program(WIDE, plan, 1)
    end, load = ends_of_steps(program)[0], place_of(program, Verb.LOAD, "b2", Kind.GRADIENT)
    landed = max(i for i, a in enumerate(program.actions) if a.verb is Verb.LAND and a.block == "b2")
    assert landed < end < load
    early = with_action(issued_earlier(program, load, landed + 1), landed + 1, after=(landed,))
    error = refused(WIDE, plan, early, "block b2 is updated before backward of step 0 is over, and the plan does not")
    assert (error.action, error.subject) == (landed + 1, "b2")


def test_what_nobody_has_asked_for_may_come_early() -> None:
    """States do not depend on the step."""
    plan = planned(WIDE, cells=6)
    program = plain_program(WIDE, plan, 1)
    load = place_of(program, Verb.LOAD, "b2", Kind.STATE)
    check(WIDE, MACHINE, plan, issued_earlier(program, load, 0))


def test_the_next_gradient_lands_when_the_last_has_been_loaded() -> None:
    """Whether or not the update is over: it reads its own copy."""
    trace = unread_trace()
    plan = planned(trace)
    program = plain_program(trace, plan, 2)
    check(trace, MACHINE, plan, program)
    landing = max(i for i, a in enumerate(program.actions) if a.verb is Verb.LAND)
    compute = max(program.actions[landing].after)
    assert program.actions[compute].verb is Verb.COMPUTE
    load = place_of(program, Verb.LOAD, "a", Kind.GRADIENT)
    store = place_of(program, Verb.STORE, "a", Kind.STATE)
    # In front of the stores, which are on its lane and say the same.
    actions = list(program.actions)
    moved = [a for a in actions[store:] if a.verb in (Verb.COMPUTE, Verb.LAND)]
    rest = [a for a in actions[store:] if a.verb not in (Verb.COMPUTE, Verb.LAND)]
    order = [*actions[:store], *moved, *rest]
    where = {id(a): i for i, a in enumerate(order)}
    waiting = {
        id(a): tuple(sorted(w for w in (where[id(actions[b])] for b in a.after) if w < where[id(a)])) for a in order
    }
    early = replace(program, actions=tuple(replace(a, after=waiting[id(a)]) for a in order))
    landing = max(i for i, a in enumerate(early.actions) if a.verb is Verb.LAND)
    waited = tuple(sorted({*early.actions[landing].after, load}))
    check(trace, MACHINE, plan, with_action(early, landing, after=waited))
    less = with_action(early, landing, after=tuple(a for a in waited if a != load))
    error = refused(trace, plan, less, f"next gradient of a.0 may overwrite the one that action {load} reads")
    assert (error.action, error.subject) == (landing, "a.0")


@pytest.mark.parametrize(("part", "states"), [(Kind.STATE, ADAM), (Kind.PARAMETER, ())])
def test_what_the_step_before_has_made_is_loaded(part: Kind, states: tuple[str, ...]) -> None:
    """When it is home. Of a block that is fetched the fetch waits for that, and the load comes after it on its lane."""
    trace = replace(unread_trace(), state_names=states)
    plan = planned(trace, cells=3)
    program = plain_program(trace, plan, 2)
    check(trace, MACHINE, plan, program)
    load, store = place_of(program, Verb.LOAD, "a", part, step=1), place_of(program, Verb.STORE, "a", part)
    less = with_action(program, load, after=tuple(a for a in program.actions[load].after if a != store))
    words = f"it loads {part.value}s of chunk 0 of block a, which action {store} may still store"
    error = refused(trace, plan, less, words)
    assert (error.action, error.subject) == (load, "a")


def test_a_fetch_copies_what_has_come_home() -> None:
    plan = planned(WIDE, cells=6)
    program = plain_program(WIDE, plan, 2)
    end = ends_of_steps(program)[0]
    fetch = next(i for i, a in enumerate(program.actions) if i > end and a.verb is Verb.FETCH and a.block == "b0")
    stores = [a for a in program.actions[fetch].after if program.actions[a].verb is Verb.STORE]
    assert len(stores) == 1 and program.actions[stores[0]].part is Kind.PARAMETER
    less = with_action(program, fetch, after=tuple(a for a in program.actions[fetch].after if a not in stores))
    words = rf"it reads block b0 as action {fetch} copied it, without action {stores[0]} \(store b0, step 0\)"
    assert refused(WIDE, plan, less, words).subject == "b0"


def test_a_fetch_does_not_wait_for_states() -> None:
    """Of the last chunk they come home behind the parameters."""
    plan = planned(WIDE, cells=6)
    program = plain_program(WIDE, plan, 2)
    first = place_of(program, Verb.STORE, "b0", Kind.STATE, chunk=1)
    assert program.actions[first + 1].part is Kind.PARAMETER
    where = {first: first + 1, first + 1: first}
    actions = [replace(a, after=tuple(sorted(where.get(b, b) for b in a.after))) for a in program.actions]
    actions[first], actions[first + 1] = actions[first + 1], actions[first]
    assert any(a.verb is Verb.FETCH and first in a.after and first + 1 not in a.after for a in actions)
    check(WIDE, MACHINE, plan, replace(program, actions=tuple(actions)))
