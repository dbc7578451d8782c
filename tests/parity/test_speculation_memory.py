"""What updates ahead of their step take: a second copy of parameters and states, to the byte, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.arenas import DISK_BLOCK, UPDATE_RING, arenas_of
from forebay.memory import Kind, Tier, TierUsage
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from tests.null.updating import updating
from tests.parity.square import BLOCKS, ELEMENTS, STATES, STEPS, WIDTHS, network, plan_for, train


def used_by(dtype: torch.dtype, plan: Plan) -> dict[Tier, TierUsage]:
    """The accounts of some steps, each of which took over what ran ahead of it."""
    timeline = train(dtype, plan)
    assert timeline.counters["committed"] == STEPS * len(plan.updated(Update.AHEAD))
    return {usage.tier: usage for usage in timeline.tiers}


@pytest.mark.parametrize("speculate", [0, 1, BLOCKS])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_on_the_host(dtype: torch.dtype, speculate: int, tmp_path: Path) -> None:
    used = used_by(dtype, plan_for(dtype, Tier.HOST, tmp_path, ahead=speculate))
    width, states, workspace = (n * ELEMENTS for n in WIDTHS[dtype])
    host = used[Tier.HOST]
    copies = BLOCKS + speculate
    assert host.at_peak[Kind.PARAMETER] == copies * width
    assert host.at_peak[Kind.STATE] == copies * states
    assert host.at_peak[Kind.GRADIENT] == BLOCKS * width
    # One gradient waits to be added to what has landed before.
    assert host.peak == copies * (width + states) + BLOCKS * width + width + workspace


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    """The second copies are on disk too, and what passes through the host is no more."""
    width, states, workspace = (n * ELEMENTS for n in WIDTHS[dtype])
    for speculate in (0, BLOCKS):
        used = used_by(dtype, plan_for(dtype, Tier.DISK, tmp_path, ahead=speculate))
        assert used[Tier.DISK].peak == (BLOCKS + speculate) * (width + states)
        staging = width + 2 * width + UPDATE_RING * states + DISK_BLOCK
        assert used[Tier.HOST].peak == BLOCKS * width + staging + workspace


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
def test_the_plan_promises_what_is_measured(home: Tier, tmp_path: Path) -> None:
    plan = plan_for(torch.float32, home, tmp_path, ahead=2)
    used = used_by(torch.float32, plan)
    assert used[Tier.HOST].peak == plan.host
    assert (used[Tier.DISK].peak if Tier.DISK in used else 0) == plan.disk


def test_one_block_of_several(tmp_path: Path) -> None:
    """A block that speculates beside others that do not: both kinds of update in one step."""
    plan = plan_for(torch.float32, Tier.HOST, tmp_path, ahead=BLOCKS)
    one = updating(plan, Update.AHEAD, ("2",))
    one = replace(one, host=arenas_of(find_blocks(network(torch.float32)).model, one, STATES).host)
    assert plan.host - one.host == (BLOCKS - 1) * (4 + 8) * ELEMENTS
    used_by(torch.float32, one)
