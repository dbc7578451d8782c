"""A loss of several forwards of the model, some of them without gradients, planned as a whole (``loss_fn``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forebay
from forebay.checking.step import Step
from forebay.errors import DoesNotFit
from forebay.lowering.index import TraceIndex
from forebay.memory import Tier
from forebay.profiler.capture import capture
from forebay.trace import Phase

WIDTH, STEPS = 32, 3

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
                for _ in range(4)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.mean(1)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 16, WIDTH, generator=generator) for name in ("a", "b")}


def contrastive(model: nn.Module, given: Batch) -> torch.Tensor:
    one, other = (F.normalize(model(given[name])) for name in ("a", "b"))
    return F.cross_entropy(10 * one @ other.T, torch.arange(len(one)))


def three(model: nn.Module, given: Batch) -> torch.Tensor:
    return F.triplet_margin_loss(model(given["a"]), model(given["b"]), model(given["a"].flip(0)))


def mined_last(model: nn.Module, given: Batch) -> torch.Tensor:
    anchor, positive = model(given["a"]), model(given["b"])
    with torch.no_grad():
        negative = model(given["a"].flip(0))
    return F.triplet_margin_loss(anchor, positive, negative)


def mined_first(model: nn.Module, given: Batch) -> torch.Tensor:
    with torch.no_grad():
        negative = model(given["a"].flip(0))
    return F.triplet_margin_loss(model(given["a"]), model(given["b"]), negative)


def target(model: nn.Module, given: Batch) -> torch.Tensor:
    with torch.no_grad():
        wanted = model(given["b"])
    return F.mse_loss(model(given["a"]), wanted)


def shorter(model: nn.Module, given: Batch) -> torch.Tensor:
    return F.mse_loss(model(given["a"]), model(given["b"])) + model(given["b"][:, :7]).square().mean()


LOSSES: dict[str, Loss] = {
    loss.__name__: loss for loss in (contrastive, three, mined_last, mined_first, target, shorter)
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Encoder()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def least(loss: str, policy: str) -> int:
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(*made(), batch(0), loss_fn=LOSSES[loss], device_memory=4096, policy=policy, device="cpu")
    return refused.value.needed


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["stream", "stream-recompute", "offload-all", "auto"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_least_device_memory_is_enough(loss: str, policy: str) -> None:
    plain, optimizer = made()
    losses = train(plain, optimizer, LOSSES[loss])
    budget = least(loss, policy)
    model, prepared = forebay.prepare(
        *made(), batch(0), loss_fn=LOSSES[loss], device_memory=budget, policy=policy, device="cpu"
    )
    assert train(model, prepared, LOSSES[loss]) == losses
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in plain.named_parameters())
    (device,) = (usage for usage in forebay.report(model).timeline.tiers if usage.tier is Tier.DEVICE)
    assert device.peak <= forebay.report(model).plan.device <= budget
    forebay.close(model)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("room", [1.1, 1.3, 1.6, 2.2])
@pytest.mark.parametrize("loss", ["contrastive", "shorter"])
def test_within_more(loss: str, room: float) -> None:
    """Forwards of the same ops, and of others: three dimensions that do not lie in order are no one product."""
    plain, optimizer = made()
    losses = train(plain, optimizer, LOSSES[loss])
    budget = int(room * least(loss, "auto"))
    model, prepared = forebay.prepare(*made(), batch(0), loss_fn=LOSSES[loss], device_memory=budget, device="cpu")
    assert train(model, prepared, LOSSES[loss]) == losses
    forebay.close(model)


@pytest.mark.parametrize("loss", ["mined_first", "mined_last", "target"])
def test_a_forward_without_gradients_makes_no_other_wait(loss: str) -> None:
    """Calls with gradients run again one after the other, each for its own backward: not both for the first."""
    assert least(loss, "stream-recompute") < least("three", "stream-recompute") < least("three", "stream")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_forward_has_its_own_backward(loss: str) -> None:
    """In reverse order, but for those without gradients, which have none. The checker finds the same by itself."""
    model, _ = made()
    trace = capture(model, batch(0), "adamw", loss_fn=LOSSES[loss]).trace
    index = TraceIndex(trace)
    blocks = frozenset(block.name for block in trace.model.blocks)
    pairs = index.partners(blocks)
    assert pairs == Step(trace).partners(blocks)
    for block in blocks:
        own = [place for place, visit in enumerate(trace.visits) if visit.block == block]
        forward = [place for place in own if trace.visits[place].phase is Phase.FORWARD]
        backward = [place for place in own if trace.visits[place].phase is Phase.BACKWARD]
        saving = [place for place in forward if trace.segments[trace.visits[place].segment].saves]
        assert len(saving) == len(backward) > 0
        assert [pairs[place] for place in saving] == [frozenset({place}) for place in reversed(backward)]
        assert all(not pairs[place] for place in forward if place not in saving)
