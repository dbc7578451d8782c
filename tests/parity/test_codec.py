"""Codes and masks of activations: shapes, strides, sizes, levels, streams of random numbers, bad input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.compression import CODE_BITS, Compression, encoded_nbytes, groups_of
from forebay.errors import ConfigError
from forebay.runtime.codec import DTYPES, decode, decode_mask, encode, encode_mask

BITS = pytest.mark.parametrize("bits", CODE_BITS)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SMALL = Compression(group=16, workspace=16 * 24 * 3)
"""Pieces of three groups of 16 elements."""


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=stream(seed)).to(dtype)


def steps(tensor: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """(M - m) / (2^b - 1) of the group of each element of a contiguous tensor, in fp64."""
    flat = tensor.double().flatten()
    filled = torch.cat([flat, flat[-1:].expand(-flat.numel() % group)]).view(-1, group)
    step = (filled.amax(1) - filled.amin(1)) / (2**bits - 1)
    return step.repeat_interleave(group)[: flat.numel()].view(tensor.shape)


def assert_close(tensor: torch.Tensor, decoded: torch.Tensor, bits: int, group: int) -> None:
    """At most a step of the group off, but for fp32 arithmetic and one rounding to the dtype (to half an ulp)."""
    assert (decoded.dtype, decoded.shape, decoded.device) == (tensor.dtype, tensor.shape, tensor.device)
    if tensor.numel() == 0:
        return
    largest = float(tensor.double().abs().max())
    rounding = 2.0**-20 * largest
    if tensor.dtype != torch.float32:
        rounding += torch.finfo(tensor.dtype).eps / 2 * 1.01 * largest
    error = (decoded.double() - tensor.double()).abs()
    assert bool((error <= steps(tensor, bits, group) + rounding).all())


# What comes back


@BITS
@DTYPE
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (15,), (16,), (17,), (48,), (49,), (5, 7, 11), (1000,)])
def test_any_size_comes_back_within_a_step(shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> None:
    tensor = normal(*shape, dtype=dtype)
    encoded = encode(tensor, bits, stream(), SMALL)
    assert encoded.data.dtype == torch.uint8
    assert encoded.data.untyped_storage().nbytes() == encoded_nbytes(
        tensor.numel(), tensor.element_size(), bits, SMALL.group
    )
    decoded = decode(encoded)
    assert decoded.stride() == tensor.stride()
    assert_close(tensor, decoded, bits, SMALL.group)


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: normal(30, 40).t(),
    "permuted": lambda: normal(5, 6, 7).permute(2, 0, 1),
    "channels-last": lambda: normal(2, 3, 5, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: normal(4, 1, 9).expand(4, 6, 9),
    "expanded-and-permuted": lambda: normal(4, 1, 9).expand(4, 6, 9).permute(1, 2, 0),
    "expanded-number": lambda: normal().expand(3, 3),
    "part-of-a-storage": lambda: normal(100)[20:80],
    "one-row": lambda: normal(30, 40)[:, :1].t()[:, ::40],
}


@BITS
@pytest.mark.parametrize("name", STRIDED)
def test_strides_come_back(name: str, bits: int) -> None:
    tensor = STRIDED[name]()
    decoded = decode(encode(tensor, bits, stream(), SMALL))
    assert decoded.stride() == tensor.stride()
    # One group's range is at most that of the whole tensor.
    assert_close(tensor, decoded, bits, tensor.numel())


def test_an_expanded_tensor_is_encoded_once() -> None:
    tensor = normal(1, 64).expand(1000, 64)
    assert encode(tensor, 8, stream()).data.numel() == encoded_nbytes(64, 4, 8)
    assert encode_mask(tensor).data.numel() == encoded_nbytes(64, 4, 1)


GAPPED: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "split": (lambda: normal(4, 5, 30)[..., 10:20], (50, 10, 1)),
    "split-heads": (lambda: normal(4, 5, 3, 2, 6)[:, :, 1].transpose(1, 2), (60, 6, 12, 1)),
    "every-third": (lambda: normal(100)[::3], (1,)),
    "sliced-and-expanded": (lambda: normal(8, 1, 9)[::2, :, ::2].expand(4, 3, 5), (5, 0, 1)),
    "overlapping": (lambda: normal(40).unfold(0, 8, 4), (8, 1)),
}


@BITS
@pytest.mark.parametrize("name", GAPPED)
def test_gaps_do_not_come_back(name: str, bits: int) -> None:
    make, stride = GAPPED[name]
    decoded = decode(encode(make(), bits, stream(), SMALL))
    assert decoded.stride() == stride
    assert_close(make(), decoded, bits, make().numel())


def test_elements_are_grouped_in_their_order_of_memory() -> None:
    """Each row of 16 is constant, so its group is exact; the columns of the transposed tensor are not."""
    tensor = torch.arange(20.0).unsqueeze(1).repeat(1, 16).t()
    assert torch.equal(decode(encode(tensor, 2, stream(), SMALL)), tensor)


@BITS
@settings(max_examples=30)
@given(st.data())
def test_random_views(bits: int, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    tensor = normal(*shape).permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        tensor = tensor.narrow(dim, start := data.draw(st.integers(0, tensor.size(dim))), tensor.size(dim) - start)
    tensor = tensor.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *tensor.shape)
    assert_close(tensor, decode(encode(tensor, bits, stream(), SMALL)), bits, max(tensor.numel(), 1))
    mask = tensor > 0
    assert torch.equal(decode_mask(encode_mask(mask, SMALL)), mask)


# Levels


@BITS
@DTYPE
def test_elements_on_a_level_are_exact(dtype: torch.dtype, bits: int) -> None:
    """Minimum -8, maximum -8 + 2^-3 (2^b - 1): steps of 2^-3, exact in all dtypes, as all the arithmetic on them is."""
    levels = torch.arange(2**bits) / 8 - 8
    tensor = levels.repeat(1 + 512 // 2**bits).to(dtype)
    assert torch.equal(tensor.float(), levels.repeat(1 + 512 // 2**bits))
    assert torch.equal(decode(encode(tensor, bits, stream())), tensor)


@BITS
def test_the_error_is_below_a_step_where_arithmetic_is_exact(bits: int) -> None:
    """Whole multiples of 2^-6 of a step of 1 between 0 and 2^b - 1: no rounding anywhere, so no allowance for it."""
    top = 2**bits - 1
    tensor = torch.randint(0, 64 * top + 1, (64, 256), generator=stream()) / 64
    tensor[:, 0], tensor[:, 1] = 0, top
    decoded = decode(encode(tensor, bits, stream(3)))
    assert bool(((decoded - tensor).abs() < 1).all())
    assert torch.equal(decoded, decoded.round())
    assert bool(((decoded == tensor.floor()) | (decoded == tensor.ceil())).all())
    assert bool((decoded != tensor.round()).any())  # it is not rounding to the nearest


@BITS
@DTYPE
@pytest.mark.parametrize("value", [0.0, -3.14159, 6e4, 2.0**-24])
def test_constant_groups_are_exact(value: float, dtype: torch.dtype, bits: int) -> None:
    tensor = torch.full((300,), value, dtype=dtype)
    assert torch.equal(decode(encode(tensor, bits, stream())), tensor)


def test_a_maximum_that_rounding_lifts_over_the_highest_level_stays() -> None:
    """In fp32 the maximum of a group can come to 255 + 2^-16, whose next code would be 256: that is 0 in a byte. 2^-16
    of the maxima here are rounded up, some tens."""
    low = normal(20000, seed=1)
    span = normal(20000, seed=2).abs() + 0.1
    tensor = low.unsqueeze(1).repeat(1, 256)
    tensor[:, 1:] = (low + span).unsqueeze(1)
    span = tensor[:, 1] - tensor[:, 0]
    lifted = span / (span / 255) > 255
    assert int(lifted.sum()) > 1000
    tensor = tensor[lifted]
    assert_close(tensor, decode(encode(tensor, 8, stream())), 8, 256)


@BITS
def test_zeros_of_a_relu_stay_zeros(bits: int) -> None:
    tensor = normal(4096).relu()
    decoded = decode(encode(tensor, bits, stream()))
    assert bool((decoded[tensor == 0] == 0).all())


@BITS
@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-140, 2.0**-126, 2.0**126])
def test_ranges_at_the_ends_of_fp32(scale: float, bits: int) -> None:
    tensor = normal(300).clamp(-2, 1.9) * scale
    decoded = decode(encode(tensor, bits, stream()))
    allowed = steps(tensor, bits, 256) + 2.0**-20 * float(tensor.double().abs().max()) + 2.0**-141
    assert bool(((decoded.double() - tensor.double()).abs() <= allowed).all())


@BITS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_is_nan_and_no_other(value: float, bits: int) -> None:
    tensor = normal(16 * 7 + 5)
    for place in (40, 16 * 7 + 4):
        tensor[place] = value
    bad = torch.zeros(tensor.numel(), dtype=torch.bool)
    bad[32:48] = bad[16 * 7 :] = True
    decoded = decode(encode(tensor, bits, stream(), SMALL))
    assert torch.equal(decoded.isnan(), bad)
    assert_close(tensor[:32], decoded[:32], bits, SMALL.group)


def test_a_range_beyond_fp32_is_not_finite() -> None:
    tensor = torch.tensor([-3e38, 1.0, 3e38])
    assert bool(decode(encode(tensor, 8, stream())).isnan().all())


# Streams, graphs, bytes


def test_the_models_stream_is_untouched_and_our_own_moves_on() -> None:
    own, before = stream(), torch.get_rng_state()
    tensor = normal(1000)
    first, second = (decode(encode(tensor, 4, own)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert torch.equal(first, decode(encode(tensor, 4, stream())))


def test_no_graph_is_made_and_the_input_stays_as_it_was() -> None:
    tensor = normal(1000).requires_grad_()
    copy, version = tensor.detach().clone(), tensor._version
    decoded = decode(encode(tensor, 8, stream()))
    assert decoded.grad_fn is None and not decoded.requires_grad
    assert torch.equal(tensor, copy) and tensor._version == version


@BITS
@DTYPE
def test_bytes_can_move(dtype: torch.dtype, bits: int) -> None:
    """To an arena and back: at an offset that is a multiple of the itemsize."""
    encoded = encode(normal(1000, dtype=dtype), bits, stream())
    arena = torch.full((encoded.data.numel() + 64,), 255, dtype=torch.uint8)
    arena[64:] = encoded.data
    assert torch.equal(decode(replace(encoded, data=arena[64:])), decode(encoded))


def test_bounds_are_kept_as_they_are() -> None:
    tensor = normal(300, dtype=torch.bfloat16)
    data = encode(tensor, 2, stream()).data
    bounds = data[: 2 * groups_of(300) * 2].view(torch.bfloat16)
    expected = [part.min() for part in tensor.split(256)] + [part.max() for part in tensor.split(256)]
    assert torch.equal(bounds, torch.stack(expected))


@pytest.mark.parametrize("bits", [0, 1, 3, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"8, 4 or 2 bits, got {bits}"):
        encode(normal(10), bits, stream())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"got {dtype}"):
        encode(torch.zeros(10, dtype=dtype), 8, stream())


def test_sparse_tensors_and_generators_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="sparse"):
        encode(normal(10).to_sparse(), 8, stream())
    with pytest.raises(ConfigError, match="sparse"):
        encode_mask(normal(10).to_sparse())
    with pytest.raises(ConfigError, match="the generator is on cpu and the tensor on meta"):
        encode(normal(10).to("meta"), 8, stream())
