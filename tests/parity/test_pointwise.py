"""Convolutions over one pixel of transposed activations: the gradient has other strides than the weight, in dimensions
of one element, and lies as it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.runtime.blocks import find_blocks
from forebay.runtime.tensors import flat
from tests.parity.compare import assert_same_training
from tests.parity.models import Case

WIDTH, WIDE, SIDE = 64, 1024, 2


class Decoder(nn.Module):
    """Tokens to an image, as those do that fill in what was masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.pixels = nn.Conv2d(WIDTH, WIDE, kernel_size=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": self.pixels(x.transpose(1, 2).reshape(-1, WIDTH, SIDE, SIDE)).square().mean()}


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, SIDE * SIDE, WIDTH, generator=torch.Generator().manual_seed(number))}


def test_its_gradient_is_not_copied() -> None:
    blocks = find_blocks(Decoder()).model.blocks
    (spec,) = [p for block in blocks for p in block.parameters if p.name == "pixels.weight"]
    values = torch.arange(float(spec.numel))
    made = values.as_strided(spec.shape, (WIDTH, 1, WIDTH, WIDTH))
    assert made.stride() != spec.stride
    assert flat(made, spec).data_ptr() == made.data_ptr()
    assert torch.equal(flat(made, spec), values)
    turned = values.as_strided(spec.shape, (1, WIDE, 1, 1))
    assert torch.equal(flat(turned, spec).view(spec.shape), turned)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """oneDNN, which makes such gradients on the host, is not asked for so little by a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_it_trains_within_what_is_asked_for() -> None:
    case = Case(Decoder, batch, (torch.float32,))
    with pytest.raises(DoesNotFit) as refused:
        assert_same_training(case, torch.float32, device_memory="4KiB", device="cpu")
    needed = refused.value.needed
    model = assert_same_training(case, torch.float32, device_memory=needed, device="cpu")
    assert forebay.report(model).timeline.peaks[Tier.DEVICE] <= needed
    forebay.close(model)
