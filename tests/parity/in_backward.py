"""Plans whose blocks are updated in backward, and runs that read no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

import forebay
from forebay.arenas import arenas_of, gradient_nbytes
from forebay.device.base import Delays
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from tests.null.updating import at_home, updating
from tests.parity.content import states_of
from tests.parity.models import Case
from tests.parity.speculating import Run, speculating
from tests.parity.test_delays import STATES

__all__ = ["Stays", "in_backward", "left_by", "stepped", "used_up"]


def used_up(case: Case, dtype: torch.dtype) -> tuple[str, ...]:
    """The blocks that train and are not in use while others are."""
    model = find_blocks(case.model(dtype)).model
    return tuple(block.name for block in model.blocks if block.gradient_nbytes and not block.held)


Stays = Literal["none", "half", "all"]
"""Which of the blocks that are updated in backward stay on the device."""


def in_backward(case: Case, dtype: torch.dtype, *, disk: bool, slots: int = 2, stays: Stays = "none") -> Plan:
    """Every block that can is updated in backward, through ``slots`` slots for gradients of the largest; at home on the
    host or, with ``disk``, in turn wherever a block can be, or (``stays``: every other one, or each) on the device."""
    plan, names = at_home(speculating(case, dtype, disk=disk)), used_up(case, dtype)
    model = find_blocks(case.model(dtype)).model
    there = frozenset({"none": (), "half": names[1::2], "all": names}[stays])
    every = {"parameters": Tier.DEVICE, "gradients": Tier.DEVICE, "states": Tier.DEVICE}
    placements = tuple(replace(p, **every) if p.block in there else p for p in plan.placements)
    largest = max(gradient_nbytes(model.block(name)) for name in names)
    streaming = replace(plan.streaming, gradient_slots=() if stays == "all" else (largest,) * slots)
    plan = updating(replace(plan, placements=placements), Update.BACKWARD, names, streaming=streaming)
    sizes = arenas_of(model, plan, STATES)
    return replace(plan, host=sizes.host, disk=sizes.disk)


def stepped(run: Run, batch: int) -> torch.Tensor:
    loss = run.backward(batch)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def left_by(
    case: Case, dtype: torch.dtype, plan: Plan, folder: str | None, delays: Delays | None = None, steps: int = 3
) -> dict[str, torch.Tensor]:
    """All that some steps leave: losses, parameters, the optimizer's states."""
    run = Run(case, dtype, plan, folder, delays)
    try:
        left = {f"loss {step}": stepped(run, step) for step in range(steps)}
        left |= {f"parameter {n}": p for n, p in forebay.parameters(run.model).items()}
        left |= {f"value {n}": p.clone() for n, p in run.model.state_dict().items()}
        return left | states_of(run.optimizer)
    finally:
        run.close()
