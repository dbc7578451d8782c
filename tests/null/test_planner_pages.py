"""Plans for a card leave what pages of its allocator need beyond what is live."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.buffers import Buffer
from forebay.errors import DoesNotFit
from forebay.lowering import Liveness, step_lives
from forebay.memory import PAGES
from forebay.planners import PLANNERS, Problem, make_plan
from forebay.plans import Plan
from forebay.recording import recording_of
from forebay.simulation import Played
from forebay.simulation.allocators import ExpandableAllocator
from forebay.simulation.allocators.limits import EXACT
from forebay.simulation.pages import STEPS
from forebay.slabs import device_slabs
from forebay.trace import Trace
from forebay.units import MiB
from tests.null.planning import asked, machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

pytestmark = pytest.mark.usefixtures("short_searches")

WORKSPACES = 64 * MiB


def scattered(layers: int = 24, *, kept: int = 3 * MiB, temporary: int = 29 * MiB) -> Trace:
    """Small things that stay, each made between large ones that go: what the pages of the large ones were holds them.
    As it is recorded for a card."""
    blocks = [block(f"layers.{i}", ((64, 64), "float32", True)) for i in range(layers)]
    parts = [Layer(b.name, saved=(kept, kept), temporary=temporary + i * MiB, out=kept) for i, b in enumerate(blocks)]
    trace = chain_trace(blocks, parts, input_nbytes=4096)
    return replace(trace, workspace_nbytes=WORKSPACES + PAGES)


def all_there(trace: Trace, *, accumulates: bool = False) -> tuple[Problem, Plan]:
    problem = replace(asked(trace, machine(), device=1 << 40), accumulates=accumulates)
    return problem, make_plan(problem, "resident")


def fits(trace: Trace, plan: Plan, beyond: int) -> bool:
    """The same as it is written here: what stands, then steps, within what is live and so much more."""
    standing = [trace.model.buffer_nbytes, trace.input_nbytes, WORKSPACES // 2, WORKSPACES // 2]
    standing += [slab.nbytes for slab in device_slabs(trace.model, plan, trace.state_names)]
    gradients = [p.nbytes for b in trace.model.blocks for p in b.parameters]
    names = [] if plan.accumulates else [b.name for b in trace.model.blocks]
    lives = step_lives(trace, plan.recompute, plan.activations, names)
    rows = zip(lives.starts.tolist(), lives.ends.tolist(), lives.nbytes.tolist(), strict=True)
    step = recording_of([Buffer(f"{n}", start, end + 1, size) for n, (start, end, size) in enumerate(rows)], STEPS)
    standing += gradients if plan.accumulates else []
    allocator = ExpandableAllocator(sum(standing) + max(step.live) + beyond)
    for number, nbytes in enumerate(standing):
        allocator.allocate(1_000_000 + number, nbytes, 0)
    for event in step.events:
        if event < 0:
            allocator.free(-1 - event)
        else:
            allocator.allocate(event, step.requests[event].nbytes, 0)
    return not allocator.out_of_memory


@pytest.mark.parametrize("accumulates", [False, True])
def test_what_is_needed_is_just_enough(accumulates: bool) -> None:
    trace = scattered()
    _, plan = all_there(trace, accumulates=accumulates)
    played = Played(trace, plan)
    needed = played.needed(0)
    assert needed > EXACT
    assert fits(trace, plan, needed) and not fits(trace, plan, needed - EXACT)
    assert played.needed(needed + 1) == needed + 1  # what is there is enough


def test_what_is_live_is_what_the_plan_counts() -> None:
    """Arenas, buffers, inputs, workspaces and the most that a step makes; the pages themselves are not live."""
    trace = scattered(6)
    _, plan = all_there(trace)
    standing = sum(slab.nbytes for slab in device_slabs(trace.model, plan, trace.state_names))
    standing += trace.outside_nbytes - PAGES
    made = max(Liveness(trace).profile().during)
    assert standing + made <= Played(trace, plan).live <= plan.device - PAGES


def test_a_plan_leaves_what_its_pages_need() -> None:
    """All of this step fits by its bytes, and would run out of pages."""
    trace = scattered(60, kept=12 * MiB, temporary=33 * MiB)
    problem, plan = all_there(trace)
    needed = Played(trace, plan).needed(PAGES)
    assert needed > PAGES
    tight = replace(problem, budget=replace(problem.budget, device=plan.device))
    with pytest.raises(DoesNotFit, match="that pages of the allocator have more than is in them") as refusal:
        make_plan(tight, "resident")
    assert (refusal.value.needed, refusal.value.allowed) == (plan.device + needed - PAGES, plan.device)
    assert refusal.value.nearest[0].needed == refusal.value.needed
    with pytest.raises(DoesNotFit, match="that pages of the allocator have more than is in them") as no_use:
        make_plan(tight.beside(0.0), "resident")
    assert no_use.value.needed == refusal.value.needed and not no_use.value.nearest
    enough = replace(problem, budget=replace(problem.budget, device=refusal.value.needed))
    found = make_plan(enough, "resident")
    assert (found.device, found.budget) == (plan.device, enough.budget)


def test_what_is_no_card_has_no_pages() -> None:
    trace = replace(scattered(60, kept=12 * MiB, temporary=33 * MiB), workspace_nbytes=0)
    problem, plan = all_there(trace)
    tight = replace(problem, budget=replace(problem.budget, device=plan.device))
    assert make_plan(tight, "resident").device == plan.device


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(2, 64),
    kept=st.integers(MiB // 4, 14 * MiB),
    temporary=st.integers(MiB, 64 * MiB),
    part=st.floats(0.3, 1.0),
    policy=st.sampled_from(["auto", "stream-recompute", "keep"]),
)
def test_no_plan_runs_out_of_pages(layers: int, kept: int, temporary: int, part: float, policy: str) -> None:
    """Whatever the budget is, what is left of it is as much as is needed."""
    assert policy in PLANNERS
    trace = scattered(layers, kept=kept, temporary=temporary)
    _, whole = all_there(trace)
    device = int(whole.device * part)
    try:
        plan = make_plan(asked(trace, machine(), device=device), policy)
    except DoesNotFit:
        return
    left = device - plan.device + PAGES
    assert plan.device <= device
    assert Played(trace, plan).needed(left) == left
