"""Storages as codes: what ``codec`` makes of a tensor, for all the bytes that an op has made, or the first of them.

Codes are made of a storage from its beginning, in the order of memory, so that every view of it can be given again.
They are 1-D uint8 wherever they are; what else is needed to read them is their *form*.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, final

import torch

from forebay.compression import DEFAULT, MASK_BITS, encoded_nbytes
from forebay.runtime.codec import DTYPES, Encoded, Mask, decode, decode_mask, encode, encode_mask

__all__ = ["Coder", "Form", "decoded", "is_codable"]

Form: TypeAlias = Encoded | Mask
"""How to read codes; its own ``data`` is empty."""


def is_codable(tensor: torch.Tensor, bits: int, *, signs: bool) -> bool:
    """Whether the storage of ``tensor`` can be codes of ``bits`` bits: floating-point numbers of 8, 4 or 2 bits; of 1
    what is true or false, or numbers of which only whether they are 0 will be asked (``signs``).

    Not where the storage has bytes that are none of the tensor's: nobody knows what they are as numbers.
    """
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return False
    return tensor.dtype is torch.bool or signs if bits == MASK_BITS else tensor.dtype in DTYPES


@final
class Coder:
    """Makes codes. Random numbers for the rounding come from a generator of its own, so that the model draws what it
    draws in plain PyTorch; its seed is ``torch.initial_seed()`` when the first codes are made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator: torch.Generator | None = None

    @property
    def state(self) -> torch.Tensor | None:
        """The state of its generator; None before the first codes."""
        return None if self._generator is None else self._generator.get_state()

    @state.setter
    def state(self, state: torch.Tensor | None) -> None:
        self._generator = None
        if state is not None:
            self._generator = torch.Generator(self._device)
            self._generator.set_state(state)

    def nbytes(self, tensor: torch.Tensor, nbytes: int, bits: int) -> int:
        """Bytes of the codes of the first ``nbytes`` of the storage of ``tensor``."""
        itemsize = tensor.element_size()
        return encoded_nbytes(nbytes // itemsize, itemsize, bits)

    def encode(self, tensor: torch.Tensor, nbytes: int, bits: int) -> tuple[torch.Tensor, Form]:
        """The codes of the first ``nbytes`` of the storage of ``tensor`` (``is_codable``), on the device, and how to
        read them.

        Beside the storage this takes the bytes of the codes and ``DEFAULT.workspace_nbytes`` of those elements.
        """
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(tensor.untyped_storage(), 0, (nbytes // tensor.element_size(),), (1,))
        made = encode_mask(flat, DEFAULT) if bits == MASK_BITS else encode(flat, bits, self._drawn(), DEFAULT)
        return made.data, replace(made, data=made.data.new_empty(0))

    def _drawn(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(self._device).manual_seed(torch.initial_seed())
        return self._generator


def decoded(codes: torch.Tensor, form: Form, rest: torch.Tensor | None) -> torch.Tensor:
    """The bytes of the storage again, 1-D uint8, in a fresh storage of the same size: exact for what was true or false,
    1 for every number that was not 0 where only that was kept, and else as near as the bits allow. ``rest`` are those
    behind them that were not made into codes."""
    coded, beside = form.shape[0] * form.dtype.itemsize, 0 if rest is None else rest.numel()
    made = torch.empty(coded + beside, dtype=torch.uint8, device=codes.device)
    whole, numbers = replace(form, data=codes), made[:coded].view(form.dtype)
    if isinstance(whole, Mask):
        decode_mask(whole, into=numbers)
    else:
        decode(whole, into=numbers)
    if rest is not None:
        made[coded:] = rest
    return made
