"""Activations as fewer bits: per-group codes with stochastic rounding, and exact 1-bit masks.

Codes (ActNN, Chen et al., ICML 2021, section 4.1; GACT, Liu et al., ICML 2022). A group of elements with minimum m and
maximum M becomes codes c = floor(t) or floor(t) + 1 with t = (x - m) / s and s = (M - m) / (2^b - 1), the upper one
with probability t - floor(t). Decoded is m + c s. In real numbers

- the mean of what is decoded is x: gradients that are linear in it keep their mean (those that take an exponential of
  it do not: queries, keys and logarithms that a fused attention saves, log-probabilities);
- it is off by less than s, and its variance is at most s^2 / 4, s^2 / 6 on average over t (ActNN's estimate);
- an element on one of the 2^b levels, m above all, is decoded as it was: so a group of equal elements, and the zeros
  of a ReLU.

The arithmetic is fp32 for all dtypes and adds at most 2^-20 max(|m|, |M|) to the error, and to the mean 2^-24 s for the
random number. The result is rounded once to the tensor's dtype. Ranges below 2^-141 vanish in fp32's last bits.

A group with a NaN, an infinity or a range beyond fp32 decodes to NaN in all its elements. To refuse it instead, every
encoding would have to wait for the device; a NaN is passed on to the gradients, where loss scaling and users look.

Masks. ``encode_mask`` keeps which elements are not 0. What a ReLU saves, its output, may be replaced by
``decode_mask(mask, 1.0)`` where no one but the ReLU's own backward reads it (``aten.threshold_backward``, which asks
only whether it is above 0; a NaN is not 0 and passes its gradient on, in both). The output of a ReLU is often saved by
the next op too, with its values, for the gradient of a weight: both saves are of one tensor, and the mask then saves
nothing. Dropout on CUDA saves a bool mask; on ``cpu`` a tensor of 0 and 1 / (1 - p), which is ``value``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from forebay.compression import CODE_BITS, CODE_DTYPES, DEFAULT, MASK_BITS, Compression, encoded_nbytes, groups_of
from forebay.errors import ConfigError

__all__ = ["DTYPES", "Encoded", "Mask", "decode", "decode_mask", "encode", "encode_mask"]

DTYPES = tuple(getattr(torch, name) for name in CODE_DTYPES)
"""What can be made into codes."""


@final
@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor as codes. ``data``, 1-D uint8 and all the bytes there are (``encoded_nbytes``): the minima of the groups
    in ``dtype``, their maxima, the codes, the first one in the lowest bits of its byte.

    ``data`` may be moved to another place and back (``dataclasses.replace``); it must start on a multiple of the
    itemsize. ``shape`` and ``stride`` are those of what is decoded, ``policy`` what it was encoded with.
    """

    data: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    bits: int
    policy: Compression


@final
@dataclass(frozen=True, slots=True)
class Mask:
    """Which elements of a tensor are not 0: ``data``, 1-D uint8, the first element in the lowest bit of its byte."""

    data: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    policy: Compression


def encode(tensor: torch.Tensor, bits: int, generator: torch.Generator, policy: Compression = DEFAULT) -> Encoded:
    """``tensor`` (fp32, bf16 or fp16, any shape) as codes of 8, 4 or 2 bits an element.

    ``generator`` is on the tensor's device and not the one that the model draws from; it alone moves on. Elements are
    grouped in their order of memory. Temporaries take ``policy.workspace_nbytes`` at most. Nothing waits for the
    device.

    The strides of a tensor without gaps come back, those of an expanded one too, of which each element is encoded
    once. One with gaps or with elements that share memory (a slice, an unfolded tensor) comes back without them, in
    the order of its dimensions in memory.

    Raises ``ConfigError`` for other bits, another dtype or layout, and a generator of another device.
    """
    if bits not in CODE_BITS:
        raise ConfigError(f"codes have 8, 4 or 2 bits, got {bits}")
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise ConfigError(f"codes are made of dense fp32, bf16 and fp16 tensors, got {tensor.dtype}, {tensor.layout}")
    if generator.device.type != tensor.device.type:
        raise ConfigError(f"the generator is on {generator.device} and the tensor on {tensor.device}; make one there")
    with torch.no_grad():
        source = _ordered(tensor)
        numel, itemsize = source.numel(), tensor.element_size()
        nbytes = encoded_nbytes(numel, itemsize, bits, policy.group)
        data = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        low, high, codes = _parts(data, tensor.dtype, numel, policy.group)
        for start, stop in _pieces(numel, policy):
            groups = slice(start // policy.group, groups_of(stop, policy.group))
            values = _padded(_elements(source, start, stop), policy.group)
            least, most = torch.aminmax(values, dim=1)
            low[groups], high[groups] = least, most
            _quantise(values, least, _step(least, most, bits), bits, generator)
            codes[start * bits // 8 : -(-stop * bits // 8)] = _pack(values.view(-1), bits, stop - start)
    return Encoded(data, tensor.dtype, tuple(tensor.shape), _strides(tensor, source), bits, policy)


def decode(encoded: Encoded, *, into: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that ``encoded`` stands for, on the device of its ``data``, at most a step of its group off; written
    to ``into`` where that is given, of its dtype, shape and strides."""
    bits, group = encoded.bits, encoded.policy.group
    with torch.no_grad():
        made, elements = _made(encoded, into)
        low, high, codes = _parts(encoded.data, encoded.dtype, elements.numel(), group)
        for start, stop in _pieces(elements.numel(), encoded.policy):
            groups = slice(start // group, groups_of(stop, group))
            least = low[groups].float()
            step = _step(least, high[groups].float(), bits)
            values = torch.empty(least.numel() * group, dtype=torch.float32, device=made.device)
            _unpack(codes[start * bits // 8 : -(-stop * bits // 8)], bits, values)
            rows = values.view(-1, group)
            rows.mul_(step.unsqueeze(1)).add_(least.unsqueeze(1))
            elements[start:stop] = values[: stop - start]
    return made


def encode_mask(tensor: torch.Tensor, policy: Compression = DEFAULT) -> Mask:
    """Which elements of ``tensor`` (bool or numbers, any shape) are not 0, in 1 bit each.

    ``decode_mask`` gives the same tensor again, to the bit, if it is bool or holds 0 and one other value only. Strides
    and temporaries are as for ``encode``.

    Raises ``ConfigError`` for a tensor that is not dense, or of complex numbers.
    """
    if tensor.layout is not torch.strided or tensor.dtype.is_complex:
        raise ConfigError(f"masks are made of dense bool or real tensors, got {tensor.dtype}, {tensor.layout}")
    with torch.no_grad():
        source = _ordered(tensor)
        nbytes = encoded_nbytes(source.numel(), tensor.element_size(), MASK_BITS, policy.group)
        data = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        for start, stop in _pieces(source.numel(), policy):
            marks = _padded(_elements(source, start, stop).ne(0), policy.group)
            data[start // 8 : -(-stop // 8)] = _pack(marks.view(-1), MASK_BITS, stop - start)
    return Mask(data, tensor.dtype, tuple(tensor.shape), _strides(tensor, source), policy)


def decode_mask(mask: Mask, value: float = 1.0, *, into: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of the dtype, shape and strides that were encoded: ``value`` where the mask is set, 0 elsewhere; written
    to ``into`` where that is given, which is like it.

    Raises ``ConfigError`` for a ``value`` that is not finite, and for one but 1 where the dtype is not floating point.
    """
    if not math.isfinite(value) or (value != 1.0 and not mask.dtype.is_floating_point):
        raise ConfigError(f"a mask of {mask.dtype} cannot stand for 0 and {value}; give 1, or keep the tensor as it is")
    with torch.no_grad():
        made, elements = _made(mask, into)
        for start, stop in _pieces(elements.numel(), mask.policy):
            marks = torch.empty(groups_of(stop - start, 8) * 8, dtype=torch.float32, device=made.device)
            _unpack(mask.data[start // 8 : -(-stop // 8)], MASK_BITS, marks)
            elements[start:stop] = marks[: stop - start]
            if value != 1.0:
                elements[start:stop].mul_(value)  # 1 times it is exact, 0 times it is 0
    return made


# Groups and codes


def _step(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Distance between two levels of each group, fp32; NaN where that is not finite. Encoding and decoding must come
    to the same number, so both ask here."""
    step = (high - low).div_(2**bits - 1)
    return step.add_(step - step)  # an infinity less itself is NaN


def _quantise(
    values: torch.Tensor, low: torch.Tensor, step: torch.Tensor, bits: int, generator: torch.Generator
) -> None:
    """Replaces the fp32 ``values`` (groups, elements) by their codes."""
    values.sub_(low.unsqueeze(1)).div_(step.unsqueeze(1))
    fraction = values.clone()
    values.floor_()
    fraction.sub_(values)
    # Drawn is 0 or more and below the fraction with the probability that the fraction is: a fraction of 0 never is up.
    drawn = torch.empty_like(values).uniform_(generator=generator)
    values.add_(drawn.lt_(fraction))
    # Rounding may lift t over the highest level. A step of 0 (equal elements) or NaN gives NaN, which no byte holds; it
    # becomes the highest code, and any code times that step is right.
    highest = torch.tensor(2.0**bits - 1.0, dtype=values.dtype, device="cpu")  # a number for the kernel: no copy
    torch.fmin(values, highest, out=values)


def _pack(codes: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first ``count`` of the 1-D ``codes`` (whole numbers of any dtype, whole groups), packed."""
    whole = codes.to(torch.uint8)
    if bits == 8:
        return whole[:count]
    columns = whole.view(-1, 8 // bits)
    packed = columns[:, 0].clone()
    for place in range(1, 8 // bits):
        packed.add_(columns[:, place], alpha=1 << place * bits)
    return packed[: -(-count * bits // 8)]


def _unpack(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Writes the codes of ``packed`` to the beginning of the 1-D ``out``."""
    if bits == 8:
        out[: packed.numel()] = packed
        return
    per_byte = 8 // bits
    columns = out[: packed.numel() * per_byte].view(-1, per_byte)
    for place in range(per_byte):
        columns[:, place] = (packed >> (place * bits)).bitwise_and_((1 << bits) - 1)


def _parts(
    data: torch.Tensor, dtype: torch.dtype, numel: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of minima, maxima and codes in an encoded tensor's bytes."""
    bounds = groups_of(numel, group) * dtype.itemsize
    return data[:bounds].view(dtype), data[bounds : 2 * bounds].view(dtype), data[2 * bounds :]


# Elements in their order


def _pieces(numel: int, policy: Compression) -> Iterator[tuple[int, int]]:
    """First and last (excluded) element of each piece; all but the last piece are whole groups."""
    return ((start, min(start + policy.piece, numel)) for start in range(0, numel, policy.piece))


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` with its dimensions in their order of memory, and one element of each expanded one."""
    kept = tensor[tuple(slice(None, 1) if step == 0 else slice(None) for step in tensor.stride())]
    return kept.permute(_order(kept))


def _order(tensor: torch.Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest; of equal ones, which only sizes of 1 and overlaps give, the
    larger size comes first."""
    strides, sizes = tensor.stride(), tensor.shape
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))


def _strides(tensor: torch.Tensor, ordered: torch.Tensor) -> tuple[int, ...]:
    """Strides with which the elements of ``ordered``, one after the other, are ``tensor`` again."""
    if ordered.is_contiguous():
        return tuple(tensor.stride())
    strides, reach = [0] * tensor.dim(), 1
    for dim in reversed(_order(tensor)):
        if tensor.stride()[dim]:
            strides[dim] = reach
            reach *= tensor.size(dim)
    return tuple(strides)


def _elements(ordered: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of ``_ordered``'s tensor, 1-D: a view if it has no gaps."""
    if ordered.is_contiguous():
        return ordered.view(-1)[start:stop]
    # ``take`` counts through a tensor with gaps; ``reshape`` would copy the whole of it.
    return ordered.take(torch.arange(start, stop, device=ordered.device))


def _padded(values: torch.Tensor, group: int) -> torch.Tensor:
    """A copy of the 1-D ``values`` as rows of ``group``; the last value fills up the last row. fp32 but for bool."""
    count = values.numel()
    dtype = torch.bool if values.dtype == torch.bool else torch.float32
    rows = torch.empty(groups_of(count, group) * group, dtype=dtype, device=values.device)
    rows[:count] = values
    rows[count:] = rows[count - 1]
    return rows.view(-1, group)


def _made(encoded: Encoded | Mask, into: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``into``, or a new tensor for what is decoded, and its elements one after the other."""
    made = into
    if made is None:
        made = torch.empty_strided(encoded.shape, encoded.stride, dtype=encoded.dtype, device=encoded.data.device)
    numel = 1
    for size, step in zip(encoded.shape, encoded.stride, strict=True):
        numel *= size if step or not size else 1
    return made, made.as_strided((numel,), (1,))
