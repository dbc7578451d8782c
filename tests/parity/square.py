"""Four square layers at one home, for closed forms of what updates take."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import forebay
from forebay.arenas import Sizer, arenas
from forebay.budgets import Budget, DiskBudget
from forebay.memory import Tier
from forebay.planners.parts import Draft
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.runtime.blocks import find_blocks
from forebay.states import Masters
from forebay.timeline import Timeline
from forebay.units import MiB

__all__ = ["AMPLE", "BLOCKS", "ELEMENTS", "STATES", "STEPS", "WIDTH", "WIDTHS", "network", "plan_for", "train"]

WIDTH, BLOCKS, STEPS = 64, 4, 3
ELEMENTS = WIDTH * WIDTH
STATES = ("exp_avg", "exp_avg_sq")
AMPLE = 4 * MiB

WIDTHS = {torch.float32: (4, 2 * 4, 0), torch.bfloat16: (2, 3 * 4, 4)}
"""Bytes of an element: of a parameter and its gradient, of its states (a 16-bit parameter has an fp32 master), and of
the workspace in which an update widens its gradient."""


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]).to(dtype)


def plan_for(
    dtype: torch.dtype, home: Tier, folder: Path, *, ahead: int = 0, there: int = 0, chunks: int = 1, cells: int = 2
) -> Plan:
    """All at ``home``, gradients on the host. The first ``ahead`` blocks are updated ahead of their step; the first
    ``there`` on the device, each in ``chunks`` chunks, through a window of ``cells``."""
    model = find_blocks(network(dtype)).model
    nbytes = model.blocks[0].nbytes
    assert nbytes == ELEMENTS * WIDTHS[dtype][0]
    names = [block.name for block in model.blocks]
    chunk = ELEMENTS // chunks
    streaming = Streaming(
        slots=(nbytes, nbytes),
        host_slots=(nbytes, nbytes),
        gradient_window=nbytes,
        update_chunk=chunk,
        update_window=Sizer(model, STATES, chunk, Masters.WHOLE).update_window(names[:there], cells),
    )
    placements = tuple(Placement(b.name, home, Tier.HOST, home) for b in model.blocks)
    draft = Draft(placements, streaming).updating(Update.AHEAD, names[:ahead]).updating(Update.DEVICE, names[:there])
    sizes = arenas(model, draft.placements, streaming, STATES)
    return Plan(
        planner="test",
        budget=Budget(AMPLE, disk=DiskBudget(str(folder), 64 * MiB) if home is Tier.DISK else None),
        placements=draft.placements,
        streaming=streaming,
        device=AMPLE,
        host=sizes.host,
        disk=sizes.disk,
    )


def train(dtype: torch.dtype, plan: Plan) -> Timeline:
    """What ``STEPS`` steps under ``plan`` leave, each with clipping that clips nothing."""
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
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    forebay.synchronize(model)
    timeline = forebay.report(model).timeline
    forebay.close(model)
    return timeline
