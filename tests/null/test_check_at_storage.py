"""The checker on updates beside the storage: gradients go there and parameters come back, in time; states stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.arenas import UPDATE_CELLS
from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.lowering import device_bound, lower
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update
from forebay.program import Program, Verb
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.at_storage import at_storage, cases_at_storage
from tests.null.programs import drop, plain_program
from tests.null.strategies import Case, roomy
from tests.null.test_check_on_device import MACHINE, NARROW, WIDE, moved, needless, network, place_of, with_action
from tests.null.test_check_properties import roomy_case
from tests.null.treating import treated_program
from tests.null.updating import at_home

ON_HOST, ON_DISK = (Tier.HOST, Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST, Tier.DISK)
LOWERINGS = [pytest.param(plain_program, id="plain"), pytest.param(lower, id="lowered")]
THERE, BACK = (Verb.LOAD, Lane.DISK_WRITE), (Verb.STORE, Lane.DISK_READ)

Lowering = Callable[..., Program]

CELL = {"bfloat16": 1024 * (12 + 2 + 2), "float32": 1024 * (8 + 4 + 4)}
"""Bytes of a cell for 1,024 elements: states, with a master for 16 bits, parameters and gradients."""


def planned(
    trace: Trace, home: tuple[Tier, Tier, Tier] = ON_HOST, chunk: int = 1024, density: float | None = None
) -> Plan:
    plan = roomy(trace, home)
    return at_storage(trace, replace(plan, streaming=replace(plan.streaming, update_chunk=chunk)), density=density)


def refused(trace: Trace, plan: Plan, program: Program, words: str) -> PlanInvalid:
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(trace, MACHINE, plan, program)
    return caught.value


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("home", [ON_HOST, ON_DISK, (Tier.DEVICE, Tier.HOST, Tier.DISK)])
@pytest.mark.parametrize("trace", [NARROW, WIDE], ids=["narrow", "wide"])
def test_wherever_the_parameters_are_it_is_accepted(
    trace: Trace, home: tuple[Tier, Tier, Tier], lowering: Lowering
) -> None:
    for chunk in (1024, 4096):
        plan = planned(trace, home, chunk)
        program = lowering(trace, plan, steps=3, micro_batches=2)
        check(trace, MACHINE, plan, program)
        assert {a.block for a in program.actions if a.lane is Lane.STORAGE_UPDATE} == set(plan.updated(Update.STORAGE))
        assert not any(a.lane is Lane.UPDATE for a in program.actions)
        check(trace, MACHINE, plan)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_have_a_closed_form(dtype: str, lowering: Lowering) -> None:
    """Of 6,144 elements: gradients there and parameters back, and there where no fp32 master stands for them. The
    states, four or six times as many bytes, move nowhere."""
    trace = network(dtype)
    program = lowering(trace, planned(trace))
    n, width = 6144, 2 if dtype == "bfloat16" else 4
    assert moved(program, Verb.LOAD, Kind.GRADIENT) == moved(program, Verb.STORE, Kind.PARAMETER) == width * n
    assert moved(program, Verb.LOAD, Kind.PARAMETER) == (0 if dtype == "bfloat16" else width * n)
    assert {(a.verb, a.lane) for a in program.actions if a.verb in (Verb.LOAD, Verb.STORE)} == {THERE, BACK}
    assert not any(a.part is Kind.STATE or a.verb in (Verb.READ, Verb.WRITE) for a in program.actions)


def test_host_memory_has_a_closed_form() -> None:
    """The states leave the host, the ring goes through which they would come, and cells come in its place: of states
    (12 bytes an element), parameters and gradients (2 each) in whole pages, and fp32 for gradients, of one chunk."""
    home = roomy(NARROW, ON_HOST)
    streaming = replace(home.streaming, update_chunk=1024)
    plan = at_storage(NARROW, replace(home, streaming=streaming))
    there = at_storage(NARROW, plan, ())
    element = 12 + 2 + 2
    assert plan.host - there.host == UPDATE_CELLS * (1024 * element) + 4 * 1024 - (3 * 12 * 1024 + 4 * 1024)
    check(NARROW, MACHINE, plan)
    with pytest.raises((PlanInvalid, DoesNotFit), match=f"{plan.host}"):
        check(NARROW, MACHINE, replace(plan, host=plan.host - 1))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("density", "kept"), [(0.01, 11), (0.5, 512), (1.0, 1024)])
def test_the_largest_elements_have_a_closed_form(density: float, kept: int, dtype: str, lowering: Lowering) -> None:
    """Of each of six pieces of 1,024 elements so many, rounded up, with 4 bytes for the place; all else as ever."""
    trace = network(dtype)
    whole, plan = planned(trace), planned(trace, density=density)
    program = lowering(trace, plan)
    check(trace, MACHINE, plan, program)
    width = 2 if dtype == "bfloat16" else 4
    assert moved(program, Verb.LOAD, Kind.GRADIENT) == 6 * kept * (4 + width)
    others = lowering(trace, whole)
    for verb, part in ((Verb.LOAD, Kind.PARAMETER), (Verb.STORE, Kind.PARAMETER)):
        assert moved(program, verb, part) == moved(others, verb, part)
    # The host keeps an fp32 number for each element, and cells have room for what comes in pages.
    sent = -(-kept * (4 + width) // 64) * 64
    pages = [-(-(size) // 4096) * 4096 for size in (CELL[dtype], CELL[dtype] + sent)]
    assert plan.host - whole.host == 4 * 6144 + UPDATE_CELLS * (pages[1] - pages[0])
    with pytest.raises((PlanInvalid, DoesNotFit), match=f"{plan.host}"):
        check(trace, MACHINE, replace(plan, host=plan.host - 1))
    others = replace(plan, streaming=replace(plan.streaming, gradient_density=density / 2))
    refused(trace, replace(others, host=plan.host), program, "bytes of gradients of .* and it takes")


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("density", [None, 0.1])
def test_every_part_moves_once_and_by_its_own_way(density: float | None, lowering: Lowering) -> None:
    plan = planned(WIDE, density=density)
    program = lowering(WIDE, plan)
    for index, action in enumerate(program.actions):
        if action.verb not in (Verb.LOAD, Verb.STORE) or action.step:
            continue
        assert refused(WIDE, plan, drop(program, index), f": 0 bytes of .* of block {action.block} are")
        assert (
            refused(WIDE, plan, with_action(program, index, nbytes=action.nbytes - 1), "and it takes").action == index
        )
        other = Lane.H2D if action.verb is Verb.LOAD else Lane.D2H
        error = refused(WIDE, plan, with_action(program, index, lane=other), f"on lane {other.value}, and its way is")
        assert (error.action, error.subject) == (index, action.block)
        more = with_action(program, index, part=Kind.STATE)
        assert refused(WIDE, plan, more, f"bytes of .* of block {action.block} are").subject == action.block


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_it_is_updated_there_and_its_states_stay(lowering: Lowering) -> None:
    plan = planned(WIDE)
    program = lowering(WIDE, plan)
    update = place_of(program, Verb.UPDATE, "b1")
    for lane in (Lane.UPDATE, Lane.DEVICE_UPDATE):
        words = "block b1 is updated beside the storage, on the storage_update lane"
        error = refused(WIDE, plan, with_action(program, update, lane=lane), words)
        assert (error.action, error.subject) == (update, "b1")
    read = with_action(program, update, lane=Lane.DISK_READ, verb=Verb.READ)
    refused(WIDE, plan, read, "the states of block b1 are updated where they lie: there is nothing to read")
    other = at_storage(WIDE, plan, ("b0", "b2"))
    whole = lowering(WIDE, other)
    load = program.actions[place_of(program, Verb.LOAD, "b1", Kind.GRADIENT)]
    more = replace(whole, actions=(*whole.actions, replace(load, after=())))
    refused(WIDE, other, more, "the plan does not update block 'b1' on the device: there is nothing to load for it")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("home", [ON_HOST, ON_DISK], ids=["host", "disk"])
def test_every_wait_of_a_plain_program_matters(dtype: str, home: tuple[Tier, Tier, Tier]) -> None:
    trace = network(dtype, blocks=2)
    plan = planned(trace, home)
    program = plain_program(trace, plan)
    check(trace, MACHINE, plan, program)
    pairs = set()
    for index, earlier, spoiled in needless(program):
        action, other = program.actions[index], program.actions[earlier]
        if {action.verb, other.verb} & {Verb.LOAD, Verb.STORE}:
            pairs.add((other.verb, action.verb))
            refused(trace, plan, spoiled, f"{other.block}|{action.block}")
    assert pairs >= {
        (Verb.LAND, Verb.LOAD),
        (Verb.LOAD, Verb.UPDATE),
        (Verb.UPDATE, Verb.STORE),
    }
    assert ((Verb.STORE, Verb.LOAD) in pairs) == (home == ON_HOST)


@given(case=cases_at_storage(), micro_batches=st.integers(1, 2))
@settings(max_examples=8)
def test_random_plans_are_accepted(case: Case, micro_batches: int) -> None:
    """Beside the storage, on the device, ahead of their step and at home, all in one plan."""
    roomy = roomy_case(case)
    check(roomy.trace, roomy.machine, roomy.plan, treated_program(roomy.trace, roomy.plan, 2, micro_batches))
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    most = device_bound(case.trace, case.plan)
    plan = replace(case.plan, device=most, budget=replace(case.plan.budget, device=most))
    check(case.trace, case.machine, plan, program)


def test_a_plan_keeps_what_it_updates_there() -> None:
    for plan in (planned(NARROW), planned(NARROW, density=0.25)):
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_is_a_share(density: float) -> None:
    with pytest.raises(ConfigError, match="gradient_density is a share, above 0 and at most 1"):
        replace(planned(WIDE).streaming, gradient_density=density)


def test_a_density_is_for_updates_beside_the_storage_and_is_said() -> None:
    plan = planned(WIDE, density=0.5)
    with pytest.raises(ConfigError, match="must say in changes_numbers that not all of a gradient is sent"):
        replace(plan, changes_numbers=())
    assert replace(planned(WIDE, density=1.0), changes_numbers=()).changes_numbers == ()
    with pytest.raises(ConfigError, match=r"the plan makes none there; leave it out, or set the update"):
        at_home(plan)


def test_more_bits_than_are_kept_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is float64, and what of a gradient is not sent is kept in fp32; leave"):
        planned(network("float64"), density=0.5)
