"""Losses that are summed up where they were computed: the one number keeps the bytes of all, and plans know it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import forebay
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.profiler.unlike import TrueResults

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "mse-sum": lambda made, wanted: F.mse_loss(made, wanted, reduction="sum"),
    "mse-none": lambda made, wanted: F.mse_loss(made, wanted, reduction="none").mean(),
    "smooth-l1": F.smooth_l1_loss,
    "soft-margin": lambda made, wanted: F.soft_margin_loss(made, wanted.sign()),
    "cross-entropy": lambda made, wanted: F.binary_cross_entropy(made.sigmoid(), wanted.sigmoid()),
    "with-logits": lambda made, wanted: F.binary_cross_entropy_with_logits(made, wanted.sigmoid()),
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "squares": lambda made, wanted: (made - wanted).square().mean(),
    "two": lambda made, wanted: F.mse_loss(made, wanted) + F.smooth_l1_loss(made, wanted),
}


class Bytes(TorchDispatchMode):
    """Of every result that is a single number: the bytes of its storage, as the op or ``TrueResults`` has made it."""

    def __init__(self, true: TrueResults | None = None) -> None:
        super().__init__()
        self.true = true
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if self.true is not None:
            made = self.true.of(func, args, kwargs or {}, made)
        if isinstance(made, torch.Tensor) and made.dim() == 0:
            self.found.append(made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("shapes", [((6, 50), (6, 50)), ((6, 50), (1, 50)), ((), ())], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_bytes_of_the_op(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1 and name in ("cross-entropy", "with-logits"):
        pytest.skip("takes no target of another shape")
    made, wanted = (torch.rand(shape) for shape in shapes)
    with Bytes() as real:
        LOSSES[name](made, wanted)
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(made), mode.from_tensor(wanted)
        with Bytes(TrueResults()) as fake:
            LOSSES[name](*fakes)
    assert fake.found == real.found


class Net(nn.Module):
    """Two layers and a head of ``width``; returns the loss."""

    def __init__(self, width: int, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.head, self.loss = nn.Linear(64, width), loss

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.loss(self.head(x), wanted)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
@pytest.mark.parametrize("width", [16, 2048])
@pytest.mark.parametrize("name", LOSSES)
def test_the_least_device_memory_is_enough(name: str, width: int, policy: str) -> None:
    """And all of it is used, to the byte."""
    given = {"x": torch.randn(8, 64), "wanted": torch.randn(8, width)}

    def prepared(budget: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(width, LOSSES[name])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return forebay.prepare(model, optimizer, given, device_memory=budget, policy=policy, device="cpu")

    with pytest.raises(DoesNotFit) as refused:
        prepared(256)
    model, optimizer = prepared(refused.value.needed)
    for _ in range(3):
        loss = model(**given)  # that of the step before is there until now
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (device,) = (usage for usage in forebay.report(model).timeline.tiers if usage.tier is Tier.DEVICE)
    assert device.peak == refused.value.needed
    forebay.close(model)
