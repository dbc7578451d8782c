"""oneDNN's LSTM leaves a workspace to its backward, many times its output, of which its fake results know nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.profiler.capture import capture
from tests.parity.capture_rig import real_peak, traced_peak
from tests.parity.compare import assert_same_training
from tests.parity.models import Case, WithLoss, images

WIDTH, LAYERS = 32, 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both ways": {"bidirectional": True},
    "two": {"num_layers": 2, "dropout": 0.1},
}


class Layer(nn.Module):
    def __init__(self, kind: dict[str, Any]) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)[0][..., :WIDTH]
        return x + out


class Stack(nn.Module):
    def __init__(self, kind: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), -1, WIDTH)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x[:, -1])
        return out


def case(name: str) -> Case:
    return Case(lambda: WithLoss(Stack(KINDS[name])), images)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_a_trace_has_the_bytes_of_a_step(name: str, dtype: torch.dtype) -> None:
    model, given = case(name).model(dtype), case(name).inputs(0, dtype)
    trace = capture(model, given).trace
    assert traced_peak(trace) == real_peak(model, given)
    with torch.no_grad():
        model(**given)  # leaves none


@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_the_least_that_is_not_refused_is_kept(policy: str) -> None:
    one = case("plain")
    with pytest.raises(DoesNotFit) as refused:
        assert_same_training(one, torch.float32, policy=policy, device_memory="16KiB", device="cpu")
    needed = refused.value.needed
    model = assert_same_training(one, torch.float32, policy=policy, device_memory=needed, device="cpu")
    usage = {t.tier: t for t in forebay.report(model).timeline.tiers}
    assert 0.9 * needed < usage[Tier.DEVICE].peak <= needed
    forebay.close(model)
