"""Any plan, whose blocks are updated in any ways, with jobs that come late, and a loop that saves and goes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.arenas import Sizer, arenas, gradient_nbytes
from forebay.plans import Plan, Update, used_up
from tests.parity.saving_loops import THINGS, USED_UP, expect_as_copied
from tests.parity.test_random_plans import DTYPES, STATES, Subject, plans, subject

WAYS = st.sampled_from([Update.STEP, Update.AHEAD, Update.DEVICE])
NAMES = st.sampled_from(["llama", "llama-tied", "frozen", "unused"])


@st.composite
def mixed(draw: st.DrawFn, drawn_for: Subject) -> Plan:
    """Of a random plan each block that is not resident is updated in a way of its own; or all of them in backward, and
    those that are resident with them, or when their step asks."""
    plan, model = draw(plans(drawn_for)), drawn_for.model
    trained = {b.name for b in model.blocks if b.gradient_nbytes}
    ways = draw(st.sampled_from([WAYS, WAYS, WAYS, st.just(Update.BACKWARD)]))
    there_too = draw(ways) is Update.BACKWARD and draw(st.booleans())
    able = [p for p in plan.placements if p.block in trained and (there_too or not p.resident)]
    placements = tuple(p.updating(draw(ways)) if p in able else p for p in plan.placements)
    there = [p.block for p in placements if p.update is Update.DEVICE]
    sizer = Sizer(model, STATES, plan.streaming.update_chunk, plan.streaming.masters)
    passing = [gradient_nbytes(model.block(name)) for name in used_up(placements, resident=False)]
    streaming = replace(
        plan.streaming,
        disk_copies=draw(st.sampled_from([1, 2])),
        update_window=sizer.update_window(there, draw(st.integers(1, 4))) if there else 0,
        gradient_slots=(max(passing),) * draw(st.integers(1, 3)) if passing else (),
    )
    sizes, before = (
        arenas(model, *how, STATES) for how in ((placements, streaming), (plan.placements, plan.streaming))
    )
    # What is used up there leaves its room: here it is given to nobody.
    device = plan.device + max(0, sizes.device - before.device)
    return replace(
        plan,
        placements=placements,
        streaming=streaming,
        device=device,
        host=sizes.host,
        disk=sizes.disk,
        budget=replace(plan.budget, device=device),
    )


@given(data=st.data(), name=NAMES, dtype=DTYPES, seed=st.integers(0, 1000))
@settings(max_examples=3)
def test_the_numbers_and_the_checkpoints_of_a_loop_that_copies(
    data: st.DataObject, name: str, dtype: torch.dtype, seed: int
) -> None:
    drawn_for = subject(name, dtype)
    plan = data.draw(mixed(drawn_for))
    things = USED_UP if plan.updated(Update.BACKWARD) else THINGS
    loop = data.draw(st.lists(st.sampled_from(things), min_size=4, max_size=10))
    with TemporaryDirectory() as folder:
        _, committed, redone = expect_as_copied(drawn_for.case, dtype, plan, loop, seed, Path(folder))
    event(f"in place: {plan.disk > 0 and plan.streaming.disk_copies > 1}")
    event(f"committed: {committed > 0}, redone: {redone > 0}")
