"""Moments, and parameters without a master, that are not fp32, in torch's ops: for a device that is not the host, and
where there is no numba.

The same codes as those of the kernels (``kernels.codes``), found by search in their values: a value that lies between
two codes by less than its own rounding may get the other one. Rounding to bf16 draws the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, final

import torch

from forebay.kernels.chance_numbers import SPREAD, salt_of
from forebay.kernels.codes import dynamic_values, linear_values
from forebay.states import BLOCK, StateForm, form_of

__all__ = ["Bf16Moment", "CodedMoment", "Moment", "WideMoment", "draw_parameter", "moments_of"]

_WORD: Final = 0xFFFFFFFF

_PASSING: Final = 1 << 18
"""Elements that are rounded by chance at a time: each takes 24 bytes meanwhile."""


class Moment(ABC):
    """One moment in the tensors of its states; ``width`` of them."""

    width: int = 1

    @abstractmethod
    def read(self, states: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` (the first of a block) to ``stop`` as fp32."""

    @abstractmethod
    def write(self, states: Sequence[torch.Tensor], start: int, value: torch.Tensor, seed: int, place: int) -> None:
        """Keeps ``value`` from element ``start`` on. ``seed`` is the step, ``place`` that of element 0."""


@final
class WideMoment(Moment):
    """fp32."""

    def read(self, states: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return states[0][start:stop]

    def write(self, states: Sequence[torch.Tensor], start: int, value: torch.Tensor, seed: int, place: int) -> None:
        """Updated in place already."""


@final
class Bf16Moment(Moment):
    """bf16, rounded up or down by chance; ``number`` is that of the moment."""

    def __init__(self, number: int) -> None:
        self._number = number

    def read(self, states: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return states[0][start:stop].float()

    def write(self, states: Sequence[torch.Tensor], start: int, value: torch.Tensor, seed: int, place: int) -> None:
        spread = (seed * SPREAD) & (2**64 - 1)
        spread -= (spread >> 63) << 64  # signed, as the kernel's is
        salt = (spread, spread >> 32, spread >> 16)[self._number] + place
        _draw(states[0][start : start + value.numel()], value, salt + start)


@final
class CodedMoment(Moment):
    """Codes of 8 or 4 bits and a scale for each block; ``signed``: the first moment."""

    width = 2

    def __init__(self, form: StateForm, *, signed: bool) -> None:
        self._form = form
        self._nibbles = form.entries < BLOCK
        known = linear_values() if self._nibbles and not signed else dynamic_values(form_bits(form), signed=signed)
        self._values = torch.from_numpy(known)
        self._middles = ((self._values[1:].double() + self._values[:-1].double()) / 2).float()

    def read(self, states: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        codes, scales = self._spans(states, start, stop)
        values = self._values.to(codes.device)[self._unpacked(codes, len(scales)).int()]
        return (values * scales[:, None]).flatten()[: stop - start]

    def write(self, states: Sequence[torch.Tensor], start: int, value: torch.Tensor, seed: int, place: int) -> None:
        codes, scales = self._spans(states, start, start + value.numel())
        padded = torch.nn.functional.pad(value, (0, len(scales) * BLOCK - value.numel())).view(-1, BLOCK)
        scales.copy_(padded.abs().amax(1))
        usable = scales >= torch.finfo(torch.float32).tiny
        inverse = torch.where(usable, 1 / scales, torch.where(scales.isnan(), scales, 0.0))
        found = torch.bucketize(padded * inverse[:, None], self._middles.to(value.device), out_int32=True)
        found = found.to(torch.uint8)
        if self._nibbles:
            found = found[:, : BLOCK // 2] | found[:, BLOCK // 2 :] << 4
        codes.copy_(found.flatten()[: codes.numel()])

    def _spans(self, states: Sequence[torch.Tensor], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._form.count(start)
        codes = states[0][first : first + self._form.count(stop - start)]
        return codes, states[1][start // BLOCK : -(-stop // BLOCK)]

    def _unpacked(self, codes: torch.Tensor, blocks: int) -> torch.Tensor:
        width = self._form.entries
        rows = torch.nn.functional.pad(codes, (0, blocks * width - codes.numel())).view(-1, width)
        return torch.cat([rows & 15, rows >> 4], 1) if self._nibbles else rows


def draw_parameter(target: torch.Tensor, value: torch.Tensor, seed: int, place: int) -> None:
    """Keeps ``value`` (fp32) in ``target`` (bf16, both 1-D), rounded up or down by chance. ``seed`` is the step,
    ``place`` that of the first element."""
    for start in range(0, value.numel(), _PASSING):
        part = slice(start, start + _PASSING)
        _draw(target[part], value[part], salt_of(seed, place) + start)


def _draw(target: torch.Tensor, value: torch.Tensor, salt: int) -> None:
    word = (torch.arange(value.numel(), device=value.device) + (salt & _WORD)) & _WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = ((word ^ (word >> shift)) * factor) & _WORD
    word = ((word ^ (word >> 16)) >> 16).to(torch.int32)
    rounded = ((value.view(torch.int32) + word) >> 16).to(torch.int16).view(torch.bfloat16)
    target.copy_(torch.where(value.isnan(), torch.full_like(rounded, torch.nan), rounded))


def form_bits(form: StateForm) -> int:
    """Bits of a code."""
    return 8 * form.entries // BLOCK


def moments_of(state_names: Sequence[str]) -> list[Moment]:
    """What reads and writes the moments in ``state_names``; the first of them has a sign."""
    made: list[Moment] = []
    for state in state_names:
        form = form_of(state)
        if form.name == "float32":
            made.append(WideMoment())
        elif form.name == "bfloat16":
            made.append(Bf16Moment(len(made)))
        elif form.dtype == "uint8":
            made.append(CodedMoment(form, signed=not made))
    return made
