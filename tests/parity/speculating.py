"""Plans in which every block that trains is updated ahead of its step, and a small model to run them on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import forebay
from forebay.arenas import arenas_of
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.memory import Tier
from forebay.model import Model
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.states import masters_for
from tests.null.updating import updating
from tests.parity.content import states_of
from tests.parity.models import Case, WithLoss, images
from tests.parity.test_delays import AMPLE, STATES, Narrow, tiered

__all__ = ["AMPLE", "MIXED", "Run", "counters", "speculating", "trained"]


class Partly(nn.Linear):
    """Has a parameter that is used only when ``whole``, and that fills chunks of its own."""

    def __init__(self) -> None:
        super().__init__(40, 40)
        self.whole = False
        self.sometimes = nn.Parameter(torch.full((60, 40), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return made + self.sometimes.sum(0) if self.whole else made


class Mixed(Narrow):
    """Layers of two chunks each, or more; one has a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Partly(), nn.Linear(40, 40), nn.Linear(40, 40)])
        self.layers[1].bias.requires_grad_(False)


MIXED = Case(lambda: WithLoss(Mixed()), images)


def trained(model: Model) -> tuple[str, ...]:
    """The blocks that have a gradient."""
    return tuple(block.name for block in model.blocks if block.gradient_nbytes)


def speculating(
    case: Case, dtype: torch.dtype, *, disk: bool, host_slots: int = 2, states: tuple[str, ...] = STATES
) -> Plan:
    """Every block that trains speculates; at home on the host or, with ``disk``, in turn wherever a block can be. Of
    masters half is kept where that is enough."""
    plan = tiered(case, dtype, overlap=True, host_slots=host_slots)
    placements = plan.placements
    if not disk:
        on_host = {"parameters": Tier.HOST, "states": Tier.HOST}
        placements = tuple(replace(p, **on_host) if p.parameters is not Tier.DEVICE else p for p in placements)
        placements = tuple(replace(p, states=Tier.HOST) for p in placements)
    model = find_blocks(case.model(dtype)).model
    masters = masters_for(states, {str(dtype).removeprefix("torch.")})
    streaming = replace(plan.streaming, masters=masters)
    plan = updating(replace(plan, placements=placements, streaming=streaming), Update.AHEAD, trained(model))
    sizes = arenas_of(model, plan, states)
    return replace(plan, host=sizes.host, disk=sizes.disk)


def counters(model: nn.Module) -> tuple[int, int, int]:
    """Updates that ran ahead of their step, those that a step took over, those that a step made anew."""
    counted = forebay.report(model).timeline.counters
    return counted["speculated"], counted["committed"], counted["redone"]


class Run:
    """A model that trains under forebay, with two parameter groups that differ in learning rate and decay."""

    def __init__(self, case: Case, dtype: torch.dtype, plan: Plan, disk: str | None, delays: Delays | None) -> None:
        self.case, self.dtype = case, dtype
        self.device = CpuDevice(AMPLE, delays=delays)
        model = case.model(dtype)
        self.model, self.optimizer = forebay.prepare(
            model, two_groups(model), plan=plan, device_memory=AMPLE, disk=disk, device=self.device
        )

    def backward(self, batch: int, scale: float = 1.0) -> torch.Tensor:
        loss = self.model(**self.case.inputs(batch, self.dtype))["loss"]
        (loss * scale).backward()
        return loss.detach()

    def everything(self) -> dict[str, torch.Tensor]:
        """All that a loop may look at: parameters, gradients, the optimizer's states."""
        seen = {f"parameter {n}": p for n, p in forebay.parameters(self.model).items()}
        seen |= {f"value {n}": p.clone() for n, p in self.model.state_dict().items()}
        seen |= {f"gradient {n}": g for n, g in forebay.gradients(self.model).items()}
        return seen | states_of(self.optimizer)

    def close(self) -> None:
        forebay.close(self.model)
        self.device.close()


def two_groups(model: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in parameters.items() if n.endswith("weight")], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if not n.endswith("weight")], "lr": 3e-2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, fused=fused)
