"""Cross entropy in pieces has the bits of torch's own, and what is in memory at a time is a few pieces."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from forebay.device.ledger import StorageLedger
from forebay.errors import ModelError
from forebay.loss import ITEMSIZE, TOKENS, VOCABULARY
from forebay.memory import Ledger, Tier
from forebay.runtime.cross_entropy import is_exact, picked_log_probabilities

SHAPES = [(50, 32, 131), (96, 48, 523), (333, 64, 1000)]
DTYPES = [torch.float32, torch.bfloat16]


def operands(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype, *, bias: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden state, weight and, with ``bias``, bias; and the index of an entry for each token."""
    torch.manual_seed(tokens)
    leaves = [torch.randn(tokens, width), torch.randn(vocabulary, width) / 4]
    leaves += [torch.randn(vocabulary)] if bias else []
    index = torch.randint(0, vocabulary, (tokens, 1))
    return [leaf.to(dtype).requires_grad_() for leaf in leaves], index


def whole(leaves: list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(F.linear(*leaves).float(), 1).gather(1, index)


def in_pieces(leaves: list[torch.Tensor], index: torch.Tensor, piece: int) -> torch.Tensor:
    return picked_log_probabilities(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, index, piece)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_whole(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    leaves, index = operands(*shape, dtype, bias=bias)
    upstream = torch.randn(shape[0], 1)
    upstream[::7] = 0.0  # tokens that do not count
    expected = whole(leaves, index)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    for piece in (ITEMSIZE, 40 * shape[2] * ITEMSIZE, 2**30):
        made = in_pieces(leaves, index, piece)
        assert torch.equal(made, expected)
        for name, one, other in zip("hwb", torch.autograd.grad(made, leaves, upstream), gradients, strict=False):
            assert torch.equal(one, other), (name, piece)


def test_infinite_and_missing_numbers_are_as_in_torch() -> None:
    leaves, index = operands(40, 16, 200, torch.float32)
    with torch.no_grad():
        leaves[0][3, 0], leaves[0][20, 1], leaves[0][21] = float("inf"), float("nan"), 1e4
    expected = whole(leaves, index)
    made = in_pieces(leaves, index, ITEMSIZE)
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(made.nan_to_num(), expected.nan_to_num())
    rows = torch.ones(40, 1)
    rows[[3, 20]] = 0.0
    pairs = zip(torch.autograd.grad(made, leaves, rows), torch.autograd.grad(expected, leaves, rows), strict=True)
    for one, other in pairs:
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_what_is_frozen_gets_no_gradient() -> None:
    leaves, index = operands(50, 32, 131, torch.float32)
    for frozen in (0, 1):
        leaves[frozen].requires_grad_(False)
        rest = leaves[1 - frozen]
        one, other = (
            torch.autograd.grad(f.sum(), rest)[0] for f in (in_pieces(leaves, index, 4), whole(leaves, index))
        )
        assert torch.equal(one, other)
        leaves[frozen].requires_grad_(True)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_memory_is_some_pieces_and_the_gradients(dtype: torch.dtype) -> None:
    """The most bytes at a time, by the account of the device, of tokens x vocabulary = 320 x 6400 in pieces of 16 x
    6400 and 320 x 320 logits (all at once: 8.2 MB each time):

    forward     logits and their log-softmax, fp32
    backward    a log-softmax, the gradient that arrives at it and the one that leaves, fp32; beside them the gradients
                of the hidden state and of the weight
    """
    tokens, width, vocabulary = 320, 8, 6400
    (hidden, weight), index = operands(tokens, width, vocabulary, dtype)
    piece = 16 * vocabulary * ITEMSIZE
    ledger = Ledger(Tier.DEVICE, 2**40)
    watch = StorageLedger(ledger)
    for leaf in (hidden, weight, index):
        watch.adopt(leaf.untyped_storage())
    watch.install()
    watch.activate(True)
    try:
        made = in_pieces([hidden, weight], index, piece)
        forward = ledger.usage().peak
        kept = 3 * tokens * ITEMSIZE  # per token: what was picked, the shift and the scale
        assert 2 * piece <= forward <= 2 * piece + kept + 16 * 64
        upstream = torch.ones_like(made)
        first, second = torch.autograd.grad(made, (hidden, weight), upstream)
        gradients = first.nbytes + second.nbytes
        small = kept + 64 * tokens  # masks, places and columns: some bytes per token
        assert 3 * piece + gradients <= ledger.usage().peak <= 3 * piece + gradients + small
    finally:
        watch.uninstall()
    del made, first, second, upstream
    gc.collect()
    assert ledger.live == 0


def test_a_second_derivative_is_refused() -> None:
    leaves, index = operands(50, 32, 131, torch.float32)
    made = in_pieces(leaves, index, 4)
    with pytest.raises(ModelError, match=r"no second derivative.*loss='plain'"):
        torch.autograd.grad(made.sum(), leaves, create_graph=True)


def test_backward_twice_over_a_retained_graph() -> None:
    leaves, index = operands(50, 32, 131, torch.float32)
    made = in_pieces(leaves, index, 4).sum()
    first = torch.autograd.grad(made, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(made, leaves), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_this_cpu_gives_pieces_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    assert is_exact(48, dtype, torch.device("cpu"), bias=True)


def test_a_device_that_rounds_pieces_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library that takes another kernel for few rows would."""
    linear = F.linear

    def coarse(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = linear(rows, weight, bias)
        return made + made.abs() * 2**-22 if len(rows) < 2 * TOKENS and len(weight) > VOCABULARY else made

    monkeypatch.setattr(F, "linear", coarse)
    assert not is_exact(48, torch.float32, torch.device("cpu"), bias=False)
