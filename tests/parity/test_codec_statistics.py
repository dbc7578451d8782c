"""Stochastic rounding keeps the mean and its variance is that of ActNN (Chen et al., ICML 2021, section 4.1).

Every bound is Hoeffding's: the mean of N independent numbers, each in an interval of length w, is off by
w sqrt(ln(2 / p) / (2 N)) or more with a probability of at most p. p is 1e-9, shared out among all means that a test
looks at.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from forebay.compression import CODE_BITS, Compression
from forebay.runtime.codec import DTYPES, Encoded, decode, encode

BITS = pytest.mark.parametrize("bits", CODE_BITS)
FRACTIONS = pytest.mark.parametrize("fraction", [1 / 64, 0.25, 0.5, 0.875])
ROWS, GROUP = 2000, 256


def hoeffding(count: int, means: int = 1) -> float:
    """How far the mean of ``count`` numbers in an interval of length 1 may be off, of ``means`` such means at once."""
    return math.sqrt(math.log(2 * means / 1e-9) / (2 * count))


def pinned(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``values`` (rows, 256) with a minimum of 0 and a maximum of 2^b - 1 in each row: steps of 1."""
    values[:, 0], values[:, 1] = 0, 2**bits - 1
    return values


def errors(tensor: torch.Tensor, bits: int, policy: Compression | None = None) -> torch.Tensor:
    """What the elements that are not pinned are off by, in steps of 1."""
    generator = torch.Generator().manual_seed(bits)
    return (decode(encode(tensor, bits, generator, policy or Compression())) - tensor)[:, 2:].flatten().double()


@BITS
@FRACTIONS
def test_mean_and_variance_are_those_of_a_coin(bits: int, fraction: float) -> None:
    """An element a fraction f above a level becomes the next one with probability f: the error is 1 - f or -f, its
    mean 0, its square (1 - f)^2 or f^2, |1 - 2 f| apart, with mean f (1 - f), which is 1/4 at most."""
    values = torch.randint(0, 2**bits - 1, (ROWS, GROUP), generator=torch.Generator().manual_seed(0)) + fraction
    off = errors(pinned(values, bits), bits)
    assert abs(float(off.mean())) <= hoeffding(off.numel())
    variance = fraction * (1 - fraction)
    # For f = 1/2 the interval has no length: every single error is one half.
    assert abs(float(off.square().mean()) - variance) <= abs(1 - 2 * fraction) * hoeffding(off.numel())


@BITS
def test_the_variance_is_a_sixth_of_a_step_squared_on_average(bits: int) -> None:
    """For elements spread evenly over the range R of a group of G, the mean of f (1 - f) is 1/6: a variance of
    G R^2 / (6 B^2) a group, B = 2^b - 1, as ActNN estimates it. Squares of errors are between 0 and 1. Elements lie
    on a grid of 2^-16 steps or finer, which moves the mean of f (1 - f), of slope 1 at most, by no more than that."""
    values = torch.rand(ROWS, GROUP, generator=torch.Generator().manual_seed(0)) * (2**bits - 1)
    off = errors(pinned(values, bits), bits)
    assert abs(float(off.square().mean()) - 1 / 6) <= hoeffding(off.numel()) + 2.0**-16


@BITS
def test_pieces_draw_numbers_of_their_own(bits: int) -> None:
    """Errors of one half either way, in two pieces: their products, 1/4 or -1/4, have mean 0."""
    values = torch.randint(0, 2**bits - 1, (2 * ROWS, GROUP), generator=torch.Generator().manual_seed(0)) + 0.5
    policy = Compression(GROUP, workspace=ROWS * GROUP * 24)
    assert policy.piece == ROWS * GROUP
    first, second = errors(pinned(values, bits), bits, policy).chunk(2)
    assert abs(float((first * second).mean())) <= hoeffding(first.numel()) / 2


@BITS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_keeps_its_mean(bits: int, dtype: torch.dtype) -> None:
    """Over 400 encodings each error lies between two levels, a step apart. fp32 arithmetic shifts the mean by
    2^-20 of the largest element at most, one rounding to the dtype by half an ulp of it."""
    tensor = torch.randn(4, GROUP, generator=torch.Generator().manual_seed(1)).to(dtype)
    generator, count = torch.Generator().manual_seed(2), 400
    total = torch.zeros(4, GROUP, dtype=torch.float64)
    for _ in range(count):
        total += decode(encode(tensor, bits, generator)).double()
    exact = tensor.double()
    step = (exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)) / (2**bits - 1)
    ulp = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    shift = (2.0**-20 + 1.01 * ulp / 2) * float(exact.abs().max())
    # Rounding to the dtype widens the interval by an ulp.
    width = step + 1.01 * ulp * float(exact.abs().max())
    assert bool(((total / count - exact).abs() <= width * hoeffding(count, tensor.numel()) + shift).all())


@BITS
def test_gradients_keep_their_mean(bits: int) -> None:
    """ActNN's unbiased gradient, for one layer. That of a weight, the sum over rows of g_r x_r, is linear in what is
    saved: it is off by the sum of g_r e_r, each in an interval of g_r steps. Hoeffding for sums takes
    w^2 = sum of (g_r s_r)^2."""
    generator, count = torch.Generator().manual_seed(3), 300
    x = torch.randn(64, 32, generator=generator)
    weight = torch.randn(8, 32, generator=generator, requires_grad=True)
    upstream = torch.randn(64, 8, generator=generator)

    def gradient(pack: Callable[[torch.Tensor], Encoded | torch.Tensor]) -> torch.Tensor:
        def unpack(packed: Encoded | torch.Tensor) -> torch.Tensor:
            return decode(packed) if isinstance(packed, Encoded) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = torch.nn.functional.linear(x, weight)
        return torch.autograd.grad(y, weight, upstream)[0].double()

    expected = gradient(lambda tensor: tensor)
    total = torch.zeros_like(expected)
    for _ in range(count):
        total += gradient(lambda t: encode(t, bits, generator) if t.shape == x.shape else t)
    off = (total / count - expected).abs()
    assert float(off.max()) > 0  # x was encoded
    groups = x.view(-1, GROUP)  # eight rows of x
    step = ((groups.amax(1) - groups.amin(1)) / (2**bits - 1)).repeat_interleave(GROUP // 32).unsqueeze(1)
    width = (upstream.double() * step).square().sum(0).sqrt().unsqueeze(1)
    rounding = 2.0**-18 * float((upstream.abs().t() @ x.abs()).max())  # of fp32 sums over 64 rows
    assert bool((off <= width * hoeffding(count, expected.numel()) + rounding).all())
