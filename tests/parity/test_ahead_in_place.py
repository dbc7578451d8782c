"""Blocks on disk that are updated ahead of their step while checkpoints name one of their places there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.arenas import arenas_of
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from tests.parity.saving_loops import THINGS, expect_as_copied
from tests.parity.speculating import MIXED, speculating
from tests.parity.test_delays import STATES


def plan_for(dtype: torch.dtype) -> Plan:
    """Every block that trains is updated ahead, in turn wherever one can be; what is on disk has one place more."""
    plan = speculating(MIXED, dtype, disk=True)
    plan = replace(plan, streaming=replace(plan.streaming, disk_copies=2))
    sizes = arenas_of(find_blocks(MIXED.model(dtype)).model, plan, STATES)
    assert sizes.disk_other_parameters and sizes.disk_other_states
    # Three of each: the current copy, the spare one, and that of a checkpoint.
    assert sizes.disk == 3 * (sizes.disk_other_parameters + sizes.disk_other_states)
    assert all(p.update is Update.AHEAD for p in plan.placements if Tier.DISK in (p.parameters, p.states))
    return replace(plan, host=sizes.host, disk=sizes.disk)


@given(
    loop=st.lists(st.sampled_from(THINGS), min_size=4, max_size=14),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=4)
def test_whatever_a_loop_does(loop: list[str], dtype: torch.dtype, seed: int) -> None:
    with TemporaryDirectory() as folder:
        _, committed, redone = expect_as_copied(MIXED, dtype, plan_for(dtype), loop, seed, Path(folder))
    event(f"committed: {committed > 0}, redone: {redone > 0}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_ahead_behind_every_save(dtype: torch.dtype, tmp_path: Path) -> None:
    """All of them but that of a block in the first step, which has a parameter that gets no gradient: a save in between
    takes none of their places."""
    loop = ["step", "step", "background", "step", "save", "step", "step", "look", "step", "background", "step", "look"]
    plan = plan_for(dtype)
    speculated, committed, redone = expect_as_copied(MIXED, dtype, plan, loop, 0, tmp_path)
    blocks = sum(p.update is Update.AHEAD for p in plan.placements)
    assert blocks > 3 and speculated == committed == loop.count("step") * blocks - 1
    assert redone == 0
