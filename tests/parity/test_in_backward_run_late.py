"""Updates in backward of a module that is called twice, first for what is frozen of it: recomputed, it runs again after
all of its gradients are complete, and so waits for its step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay.plans import Update

WIDTH = 16


class Twice(nn.Module):
    """Adds what is frozen, which backward reads nothing of, and the second time goes through what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, *, first: bool) -> torch.Tensor:
        return torch.tanh(x + self.frozen if first else self.trained(x)).sin()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()
        self.before, self.between = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.between(self.twice(self.before(x), first=True))
        out: torch.Tensor = self.twice(between, first=False)
        return out.square().mean()


@pytest.mark.parametrize("policy", ["recompute", "chen", "stream-recompute"])
def test_it_waits_for_its_step(policy: str) -> None:
    seen = []
    for prepared in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Network()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        batches = [torch.randn(4, WIDTH) for _ in range(3)]
        if prepared:
            blocks = ["before", "twice", "between"]
            how = {"device_memory": "64MiB", "policy": policy, "blocks": blocks, "update": "backward"}
            model, optimizer = forebay.prepare(model, optimizer, batches[0], **how)  # type: ignore[arg-type]
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = forebay.parameters(model) if prepared else dict(model.named_parameters())
        seen.append({name: value.detach().clone() for name, value in values.items()})
        if prepared:
            plan = forebay.report(model).plan
            assert plan.recompute and "twice" not in plan.updated(Update.BACKWARD)
            assert plan.updated(Update.BACKWARD)
            forebay.close(model)
    plain, made = seen
    assert plain.keys() == made.keys()
    assert all(torch.equal(made[name], value) for name, value in plain.items())
