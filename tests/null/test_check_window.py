"""The checker on the room that updates on the device take: the window there, its cells, and what the host is spared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.lowering import device_bound, lower
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update
from forebay.program import Verb
from forebay.trace import Trace
from tests.null.ahead import ahead
from tests.null.on_device import on_device
from tests.null.programs import plain_program
from tests.null.strategies import roomy
from tests.null.synthetic import block
from tests.null.test_check_on_device import (
    DISK,
    MACHINE,
    NARROW,
    WIDE,
    network,
    place_of,
    planned,
    refused,
    with_action,
)
from tests.null.tracing import Layer, chain_trace
from tests.null.updating import at_home, updating

NARROW_CELL = 3 * 4 * 1024 + 2 * 2 * 1024
WIDE_CELL = 2 * 4 * 1024 + 2 * 4 * 1024
"""Bytes of a chunk of 1,024 elements: master and two states, or two states; parameters and gradients."""


def windowed(plan: Plan, nbytes: int) -> Plan:
    return replace(plan, streaming=replace(plan.streaming, update_window=nbytes))


@pytest.mark.parametrize(("trace", "least"), [(WIDE, WIDE_CELL), (NARROW, NARROW_CELL + 4 * 1024)])
def test_the_window_holds_a_chunk(trace: Trace, least: int) -> None:
    """And, beside 16-bit gradients, these in 32 bits."""
    plan = planned(trace, cells=1)
    assert plan.streaming.update_window == least
    program = plain_program(trace, plan)
    check(trace, MACHINE, plan, program)
    error = refused(trace, windowed(plan, least - 1), program, f"and the update_window has {least - 1}; make it larger")
    assert error.subject == "b0"


def test_the_largest_cell_and_the_widest_gradients_are_of_two_blocks() -> None:
    """All cells are of one size, and one update at a time widens."""
    blocks = [block("a", ((2048,), "float32", True)), block("b", ((1024,), "bfloat16", True))]
    trace = chain_trace(blocks, [Layer(b.name, (2048,), 0, 1024) for b in blocks])
    plan = planned(trace, chunk=4096, cells=1)
    least = 16 * 2048 + 4 * 1024
    assert plan.streaming.update_window == least > max(16 * 2048, NARROW_CELL + 4 * 1024)
    check(trace, MACHINE, plan)
    words = f"takes up to {16 * 2048} bytes and {4 * 1024} to widen gradients"
    refused(trace, windowed(plan, least - 1), plain_program(trace, plan), words)


@pytest.mark.parametrize("trace", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("cells", [1, 2, 3])
def test_as_many_cells_as_the_window_holds(cells: int, trace: Trace) -> None:
    """What is less than a cell is none."""
    plan = planned(trace, cells=cells + 1)
    program = plain_program(trace, plan, 1)
    check(trace, MACHINE, plan, program)
    less = windowed(plan, plan.streaming.update_window - 1)
    loads = [i for i, a in enumerate(program.actions) if a.verb is Verb.LOAD and a.part is Kind.STATE]
    stores = [i for i, a in enumerate(program.actions) if a.verb is Verb.STORE and a.part is Kind.PARAMETER]
    words = f"it needs one of {cells} cells of the update_window, and action {stores[0]} may still use the one it would"
    error = refused(trace, less, program, words)
    assert (error.action, error.subject) == (loads[cells], program.actions[loads[cells]].block)
    # Waiting for whoever had the one before is not enough, waiting for all that the last has stored is.
    for chunk in range(cells, len(loads)):
        after = *program.actions[loads[chunk]].after, stores[chunk - cells]
        program = with_action(program, loads[chunk], after=after)
    check(trace, MACHINE, less, program)
    states = stores[-cells - 1] - 1
    assert program.actions[states].part is Kind.STATE
    late = program.actions[loads[-1]].after
    refused(trace, less, with_action(program, loads[-1], after=(*late[:-1], states)), f"{cells} cells of the update_w")


def test_a_cell_is_taken_from_its_first_load() -> None:
    """That those behind it wait is not enough."""
    plan = planned(WIDE, cells=1)
    program = lower(WIDE, plan)
    check(WIDE, MACHINE, plan, program)
    first, last = (place_of(program, Verb.LOAD, "b1", part, chunk=1) for part in (Kind.STATE, Kind.GRADIENT))
    (store,) = (a for a in program.actions[first].after if program.actions[a].verb is Verb.STORE)
    assert store in program.actions[last].after
    less = with_action(program, first, after=tuple(a for a in program.actions[first].after if a != store))
    refused(WIDE, plan, less, "it needs one of 1 cells of the update_window")


# What stands.


def test_the_window_stands_on_the_device() -> None:
    """In the plan's own figure, in the budget, and in what the program says."""
    plan = planned(NARROW, cells=2)
    window = plan.streaming.update_window
    bare = device_bound(NARROW, at_home(plan))
    exact = device_bound(NARROW, plan)
    assert exact - bare == window == 2 * NARROW_CELL + 4 * 1024
    program = lower(NARROW, plan)
    fitting = replace(plan, device=exact, budget=replace(plan.budget, device=exact))
    check(NARROW, MACHINE, fitting, program)
    refused(NARROW, replace(plan, device=bare), program, f"the plan predicts a device peak of {bare} bytes and what it")
    with pytest.raises(DoesNotFit, match="device memory") as caught:
        check(NARROW, MACHINE, replace(fitting, budget=replace(plan.budget, device=exact - 1)), program)
    assert (caught.value.tier, caught.value.needed, caught.value.allowed) == ("device", exact, exact - 1)
    stands = {kind: n for kind, n in program.standing[Tier.DEVICE].items() if kind is not Kind.STAGING}
    other = replace(program, standing={**program.standing, Tier.DEVICE: stands})
    with pytest.raises(PlanInvalid, match=r"the program says that \d+ bytes stand in device memory"):
        check(NARROW, MACHINE, plan, other)


def test_the_host_widens_no_gradients_for_them() -> None:
    """Where all blocks are updated on the device; else as for the largest chunk of the others."""
    blocks = [block("a", ((1024,), "bfloat16", True)), block("b", ((512,), "bfloat16", True))]
    trace = chain_trace(blocks, [Layer(b.name, (2048,), 0, 1024) for b in blocks])
    # Parameters, gradients, master and two states, whose chunks are whole pages; one gradient of staging.
    homes = 2 * 1536 + 2 * 1536 + 3 * 4 * 1024 + 2 * 4096 + 2 * 1024
    for names, widened in ((("a", "b"), 0), (("a",), 4 * 512), (("b",), 4 * 1024)):
        plan = planned(trace, names=names)
        exact = replace(plan, host=homes + widened, budget=replace(plan.budget, host=homes + widened))
        check(trace, MACHINE, exact)
        with pytest.raises(PlanInvalid, match=f"host peak of {homes + widened - 1} bytes"):
            check(trace, MACHINE, replace(exact, host=homes + widened - 1))


def test_on_disk_only_the_ring_is_on_the_host() -> None:
    plan = planned(NARROW, DISK)
    check(NARROW, MACHINE, plan)
    with pytest.raises(PlanInvalid, match="the plan predicts a host peak"):
        check(NARROW, MACHINE, replace(plan, host=plan.host - 1))


def test_states_in_few_bits_have_no_room_there() -> None:
    trace = replace(network(), state_names=("exp_avg:8bit", "exp_avg_scale:scale"))
    plan = on_device(trace, roomy(trace), ("b1",))
    with pytest.raises(PlanInvalid, match="block b1 is updated on the device, where states in fewer bits") as caught:
        check(trace, MACHINE, plan)
    assert caught.value.subject == "b1"


def test_beside_updates_ahead_of_their_step() -> None:
    """Some blocks are in one of both, some in none."""
    trace = network(blocks=4)
    plan = on_device(trace, ahead(trace, roomy(trace), ("b2", "b3")), ("b0", "b3"))
    assert (plan.updated(Update.DEVICE), plan.updated(Update.AHEAD)) == (("b0", "b3"), ("b2",))
    for program in (lower(trace, plan, steps=3), plain_program(trace, plan, 3)):
        check(trace, MACHINE, plan, program)
        refused(trace, updating(plan, Update.AHEAD), program, "block b2|the plan")
