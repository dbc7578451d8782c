"""Moments, and parameters without a master, that are not fp32, in torch's ops: for a device that is not the host, and
where there is no numba.

The same codes as those of the kernels (``kernels.codes``), found by search in their values: a value that lies between
two codes by less than its own rounding may get the other one. Rounding to bf16 draws the same numbers. All of it is
done in given memory, ``workspaces.PIECE`` elements at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from forebay.kernels.chance_numbers import SPREAD, salt_of
from forebay.kernels.codes import dynamic_values, linear_values
from forebay.states import BLOCK, StateForm, form_of
from forebay.workspaces import PIECE

__all__ = ["Bf16Moment", "CodedMoment", "Moment", "Take", "WideMoment", "draw_parameter", "moments_of"]

States = Sequence[torch.Tensor]
"""The tensors of one moment's states."""

Take = Callable[[int], torch.Tensor]
"""Gives memory for so many fp32 values, one after the other."""


class Moment(ABC):
    """One moment in the tensors of its states; ``width`` of them. ``spare`` is fp32 for twice as many values as are
    read or written, whose contents are lost."""

    width: int = 1

    @abstractmethod
    def read(self, states: States, start: int, stop: int, take: Take, spare: torch.Tensor) -> torch.Tensor:
        """Elements ``start`` (the first of a block) to ``stop`` as fp32; memory for them, if it is needed, is
        ``take``'s."""

    @abstractmethod
    def write(
        self, states: States, start: int, value: torch.Tensor, seed: int, place: int, spare: torch.Tensor
    ) -> None:
        """Keeps ``value``, which is lost, from element ``start`` on. ``seed`` is the step, ``place`` that of element
        0."""


@final
class WideMoment(Moment):
    """fp32."""

    def read(self, states: States, start: int, stop: int, take: Take, spare: torch.Tensor) -> torch.Tensor:
        return states[0][start:stop]

    def write(
        self, states: States, start: int, value: torch.Tensor, seed: int, place: int, spare: torch.Tensor
    ) -> None:
        """Updated in place already."""


@final
class Bf16Moment(Moment):
    """bf16, rounded up or down by chance; ``number`` is that of the moment."""

    def __init__(self, number: int) -> None:
        self._number = number

    def read(self, states: States, start: int, stop: int, take: Take, spare: torch.Tensor) -> torch.Tensor:
        return take(stop - start).copy_(states[0][start:stop])

    def write(
        self, states: States, start: int, value: torch.Tensor, seed: int, place: int, spare: torch.Tensor
    ) -> None:
        spread = (seed * SPREAD) & (2**64 - 1)
        spread -= (spread >> 63) << 64  # signed, as the kernel's is
        salt = (spread, spread >> 32, spread >> 16)[self._number] + place
        _draw(states[0][start : start + value.numel()], value, salt + start, spare)


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
        self._nothing = int(torch.bucketize(0.0, self._middles))

    def read(self, states: States, start: int, stop: int, take: Take, spare: torch.Tensor) -> torch.Tensor:
        values, made = self._values.to(states[0].device), take(stop - start)
        for codes, scales, span in self._spans(states, start, stop):
            numbers = spare[: span.stop - span.start].view(torch.int32).view(len(scales), -1)
            self._unpack(codes, numbers)
            part = made[span]
            torch.index_select(values, 0, numbers.view(-1), out=part)
            part.view(len(scales), -1).mul_(scales[:, None])
        return made

    def write(
        self, states: States, start: int, value: torch.Tensor, seed: int, place: int, spare: torch.Tensor
    ) -> None:
        middles = self._middles.to(value.device)
        for codes, scales, span in self._spans(states, start, start + value.numel()):
            rows = value[span].view(len(scales), -1)
            torch.linalg.vector_norm(rows, torch.inf, dim=1, out=scales)
            # A block of zeros, or one so small that 1 over its scale is inf, becomes zeros.
            rows.mul_(scales.reciprocal().masked_fill_(scales < torch.finfo(torch.float32).tiny, 0)[:, None])
            numbers = spare[: rows.numel()].view(torch.int32).view(rows.shape)
            torch.bucketize(rows, middles, out_int32=True, out=numbers)
            self._pack(numbers, codes)

    def _spans(self, states: States, start: int, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Codes and scales of elements ``start`` to ``stop``: of whole blocks, and of one that is cut short; each with
        where its elements are behind ``start``."""
        whole, rest = divmod(stop - start, BLOCK)
        first = start // BLOCK
        for blocks, size, behind in ((whole, BLOCK, 0), (int(rest > 0), rest, whole)):
            if blocks:
                at, wide = (first + behind) * self._form.entries, self._form.count(size)
                scales = states[1][first + behind : first + behind + blocks]
                span = slice(behind * BLOCK, behind * BLOCK + blocks * size)
                yield states[0][at : at + blocks * wide].view(blocks, wide), scales, span

    def _unpack(self, codes: torch.Tensor, numbers: torch.Tensor) -> None:
        """Writes the number of each code (a row a block) to ``numbers``."""
        if not self._nibbles:
            numbers.copy_(codes)
            return
        lower, upper = numbers[:, : BLOCK // 2], numbers[:, BLOCK // 2 :]
        lower.copy_(codes)
        if upper.numel():
            upper.copy_(codes[:, : upper.shape[1]]).bitwise_right_shift_(4)
        lower.bitwise_and_(15)

    def _pack(self, numbers: torch.Tensor, codes: torch.Tensor) -> None:
        """The other way round; ``numbers`` are lost."""
        if self._nibbles:
            upper = numbers[:, BLOCK // 2 :]
            numbers = numbers[:, : BLOCK // 2]
            if upper.numel():
                numbers[:, : upper.shape[1]].bitwise_or_(upper.bitwise_left_shift_(4))
            # Where a block is cut short the kernels have the code of 0.
            numbers[:, upper.shape[1] :].bitwise_or_(self._nothing << 4)
        codes.copy_(numbers)


def draw_parameter(target: torch.Tensor, value: torch.Tensor, seed: int, place: int, spare: torch.Tensor) -> None:
    """Keeps ``value`` (fp32) in ``target`` (bf16, both 1-D), rounded up or down by chance. ``seed`` is the step,
    ``place`` that of the first element. ``spare`` is fp32 for twice as many values as are drawn at a time: ``PIECE``,
    or all if they are fewer."""
    for start in range(0, value.numel(), PIECE):
        part = slice(start, start + PIECE)
        _draw(target[part], value[part], salt_of(seed, place) + start, spare)


def _draw(target: torch.Tensor, value: torch.Tensor, salt: int, spare: torch.Tensor) -> None:
    """In place, since on a GPU each op goes over memory. What is drawn is what ``kernels.native.store_drawn`` draws."""
    count = value.numel()
    word, other = (spare[at : at + count].view(torch.int32) for at in (0, count))
    torch.arange(count, out=word, device=word.device)
    word.add_(_signed(salt))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        # There is no shift of int32 that brings in zeros.
        torch.bitwise_right_shift(word, shift, out=other)
        word.bitwise_xor_(other.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    # The last step of the hash, of which the upper half counts: its own lower half changes nothing there.
    word.bitwise_right_shift_(16).bitwise_and_(0xFFFF).add_(value.view(torch.int32))
    nothing = torch.ne(value, value, out=other.view(torch.bool)[:count])
    target.view(torch.int16).copy_(word.view(torch.int16)[1::2])  # the upper halves: memory begins with the lower one
    target.masked_fill_(nothing, torch.nan)


def _signed(word: int) -> int:
    """The int32 with the bits of the lower half of ``word``."""
    return ((word + 2**31) & 0xFFFFFFFF) - 2**31


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
