"""What updates ahead of their step take: a second copy of parameters and states, to the byte, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import DISK_BLOCK, UPDATE_RING, arenas
from forebay.memory import Kind, Tier, TierUsage
from forebay.plans import Budget, DiskBudget, Placement, Plan, Streaming
from forebay.runtime.blocks import find_blocks
from forebay.units import MiB

WIDTH, BLOCKS = 64, 4
ELEMENTS = WIDTH * WIDTH
STATES = ("exp_avg", "exp_avg_sq")
AMPLE = 4 * MiB

# Bytes of an element: of a parameter and its gradient, of its states (a 16-bit parameter has an fp32 master), and of
# the workspace in which an update widens its gradient.
WIDTHS = {torch.float32: (4, 2 * 4, 0), torch.bfloat16: (2, 3 * 4, 4)}


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]).to(dtype)


def plan_for(dtype: torch.dtype, home: Tier, speculate: int, folder: Path) -> Plan:
    """The first ``speculate`` blocks are updated ahead of their step."""
    model = find_blocks(network(dtype)).model
    nbytes = model.blocks[0].nbytes
    assert nbytes == ELEMENTS * WIDTHS[dtype][0]
    streaming = Streaming(slots=(nbytes, nbytes), host_slots=(nbytes, nbytes), gradient_window=nbytes)
    placements = tuple(Placement(b.name, home, Tier.HOST, home) for b in model.blocks)
    names = tuple(b.name for b in model.blocks[:speculate])
    sizes = arenas(model, placements, streaming, STATES, names)
    disk = DiskBudget(str(folder), 64 * MiB) if home is Tier.DISK else None
    return Plan("test", Budget(AMPLE, disk=disk), placements, streaming, AMPLE, sizes.host, sizes.disk, speculate=names)


def train(dtype: torch.dtype, plan: Plan) -> dict[Tier, TierUsage]:
    model = network(dtype)
    disk = plan.budget.disk
    model, optimizer = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        plan=plan,
        device_memory=AMPLE,
        disk=None if disk is None else f"{disk.path}:{disk.nbytes}B",
        device="cpu",
    )
    for _ in range(3):
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    timeline = forebay.report(model).timeline
    assert timeline.counters["committed"] == 3 * len(plan.speculate)
    forebay.close(model)
    return {usage.tier: usage for usage in timeline.tiers}


@pytest.mark.parametrize("speculate", [0, 1, BLOCKS])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_on_the_host(dtype: torch.dtype, speculate: int, tmp_path: Path) -> None:
    used = train(dtype, plan_for(dtype, Tier.HOST, speculate, tmp_path))
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
        used = train(dtype, plan_for(dtype, Tier.DISK, speculate, tmp_path))
        assert used[Tier.DISK].peak == (BLOCKS + speculate) * (width + states)
        staging = width + 2 * width + UPDATE_RING * states + DISK_BLOCK
        assert used[Tier.HOST].peak == BLOCKS * width + staging + workspace


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
def test_the_plan_promises_what_is_measured(home: Tier, tmp_path: Path) -> None:
    plan = plan_for(torch.float32, home, 2, tmp_path)
    used = train(torch.float32, plan)
    assert used[Tier.HOST].peak == plan.host
    assert (used[Tier.DISK].peak if Tier.DISK in used else 0) == plan.disk


def test_one_block_of_several(tmp_path: Path) -> None:
    """A block that speculates beside others that do not: both kinds of update in one step."""
    plan = plan_for(torch.float32, Tier.HOST, BLOCKS, tmp_path)
    sizes = arenas(find_blocks(network(torch.float32)).model, plan.placements, plan.streaming, STATES, ("2",))
    one = replace(plan, speculate=("2",), host=sizes.host)
    assert plan.host - one.host == (BLOCKS - 1) * (4 + 8) * ELEMENTS
    train(torch.float32, one)
