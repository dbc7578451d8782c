"""What a forward does to its modules beside computing: a run under fake tensors leaves nothing of it."""

from __future__ import annotations

from collections import defaultdict, deque

import torch
from torch import nn

import forebay
from forebay.profiler.capture import capture

ROOMY = "64MiB"


class Noting(nn.Module):
    """Counts its calls and computes with the count, keeps what it made, fills whatever can be filled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.scale: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self.named: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.nested = {"seen": [1]}
        self.latest: deque[int] = deque([1, 2], maxlen=2)
        self.shapes: set[int] = {1}
        self.register_buffer("cached", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1, 8)
            self.late = True
            self.cached = torch.ones(8)
        y = self.linear(x).tanh() * self.scale * self.cached * (1 + self.calls)
        self.losses.append(y.mean())
        self.named["mean"].append(y.mean())
        self.nested["seen"].append(2)
        self.latest.append(3)
        self.shapes.add(len(x))
        return y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Noting() for _ in range(3)))


def test_a_capture_leaves_attributes_as_they_were() -> None:
    captured = model()
    before = [dict(m.__dict__) for m in captured.modules()]
    assert capture(captured, torch.ones(4, 8)).trace.visits
    for module, attributes in zip(captured.modules(), before, strict=True):
        assert list(module.__dict__) == list(attributes)
        assert all(module.__dict__[name] is value for name, value in attributes.items())
    for noting in captured:
        assert (noting.calls, noting.scale, noting.cached, noting.losses) == (0, None, None, [])
        assert (dict(noting.named), noting.nested) == ({}, {"seen": [1]})
        assert (list(noting.latest), noting.shapes) == ([1, 2], {1})


def losses(policy: str | None) -> list[torch.Tensor]:
    trained: nn.Module = model()
    modules = list(trained)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    if policy is not None:
        trained, optimizer = forebay.prepare(trained, optimizer, batches[0], device_memory=ROOMY, policy=policy)
    found = []
    for x in batches:
        loss = trained(x).square().mean() + sum(loss for m in modules for loss in m.losses)
        for module in modules:
            module.losses.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    forebay.close(trained)
    return found


def test_training_begins_with_attributes_as_they_were() -> None:
    assert all(torch.equal(ours, plain) for ours, plain in zip(losses("auto"), losses(None), strict=True))
