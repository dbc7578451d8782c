"""Batch norms of transposed activations: what they make lies in order on the host, whatever a fake tensor says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay.memory import Tier
from forebay.profiler.capture import capture
from tests.parity.capture_rig import real_peak, traced_peak
from tests.parity.compare import adamw

WIDTH, TOKENS, LAYERS = 16, 32, 3


class Layer(nn.Module):
    """Normalises channels over tokens, as encoders of speech and of time series do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2)).tanh()
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))}


def test_a_trace_has_the_bytes_of_a_step() -> None:
    model = Encoder()
    assert traced_peak(capture(model, batch()).trace) == real_peak(model, batch())


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_what_is_promised_holds(policy: str) -> None:
    torch.manual_seed(0)
    model = Encoder()
    optimizer = adamw(list(model.parameters()))
    model, optimizer = forebay.prepare(model, optimizer, batch(), device_memory="1MiB", device="cpu", policy=policy)
    try:
        for _ in range(2):
            model(**batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        report = forebay.report(model)
        peak = report.timeline.peaks[Tier.DEVICE]
        assert peak <= report.plan.device
    finally:
        forebay.close(model)
