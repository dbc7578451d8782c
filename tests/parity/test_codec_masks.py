"""1-bit masks are exact, and what they may stand for: dropout, and a ReLU's own backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.compression import Compression, encoded_nbytes
from forebay.errors import ConfigError
from forebay.runtime.codec import DTYPES, decode_mask, encode_mask

SMALL = Compression(group=8, workspace=8 * 24 * 2)
"""Pieces of 16 elements."""


def marks(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5


@given(st.integers(0, 200))
def test_any_size_round_trips(numel: int) -> None:
    mask = marks(numel)
    kept = encode_mask(mask, SMALL)
    assert kept.data.untyped_storage().nbytes() == encoded_nbytes(numel, 1, 1) == (numel + 7) // 8
    assert torch.equal(decode_mask(kept), mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64, *DTYPES], ids=str)
def test_any_dtype_and_stride_round_trips(dtype: torch.dtype) -> None:
    for mask in (marks(5, 9).to(dtype).t(), marks(7, 1, 3).to(dtype).expand(7, 4, 3), marks().to(dtype)):
        decoded = decode_mask(encode_mask(mask, SMALL))
        assert (decoded.dtype, decoded.stride()) == (mask.dtype, mask.stride())
        assert torch.equal(decoded, mask)


def test_a_sliced_mask_comes_back_without_gaps() -> None:
    mask = marks(40, 40)[3:, ::2]
    decoded = decode_mask(encode_mask(mask, SMALL))
    assert decoded.is_contiguous() and torch.equal(decoded, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mask_of_a_dropout_is_exact(dtype: torch.dtype) -> None:
    """On ``cpu`` a dropout saves 0 and 1 / (1 - p), in the dtype; whoever encodes it knows that number."""
    noise = marks(1000).to(dtype).div_(1 - 0.3)
    value = float(torch.ones((), dtype=dtype).div_(1 - 0.3))
    assert torch.equal(decode_mask(encode_mask(noise), value), noise)


def relu_gradient(saved: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(gradient, saved, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_relus_backward_reads_no_more_than_its_mask(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    before = torch.randn(1000, generator=generator).to(dtype)
    before[:4] = torch.tensor([float("nan"), -0.0, 0.0, float("inf")])
    output, gradient = before.relu(), torch.randn(1000, generator=generator).to(dtype)
    mask = decode_mask(encode_mask(output), 1.0)
    assert torch.equal(relu_gradient(mask, gradient), relu_gradient(output, gradient))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_relu_between_layers_gives_the_same_gradients_by_its_mask(inplace: bool) -> None:
    """Only the ReLU's own save is replaced; what the next layer saves, the same tensor, is not."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(inplace), torch.nn.Linear(30, 5))
    x = torch.randn(8, 20)
    layers(x).square().sum().backward()
    expected = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    hidden = layers[0](x)
    with torch.autograd.graph.saved_tensors_hooks(encode_mask, decode_mask):
        hidden = layers[1](hidden)
    layers[2](hidden).square().sum().backward()
    actual = [p.grad for p in layers.parameters() if p.grad is not None]
    assert len(actual) == 4 and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_values_that_a_dtype_does_not_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.bool cannot stand for 0 and 2"):
        decode_mask(encode_mask(marks(10)), 2.0)
    with pytest.raises(ConfigError, match="0 and inf"):
        decode_mask(encode_mask(marks(10).float()), float("inf"))
    with pytest.raises(ConfigError, match="complex64"):
        encode_mask(torch.zeros(10, dtype=torch.complex64))
