"""What ``param.data`` is while a parameter is not on the device.

One NaN (an integer is 0), expanded to the parameter's shape: some bytes, and nothing that reads it crashes, as an empty
storage would make torch's kernels follow a null pointer. torch refuses most writes to it, because all elements are one,
but not ``fill_`` and ``zero_``. What those put there would never reach the parameter, and would be read in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

import torch

from forebay.errors import ModelError
from forebay.model import Parameter
from forebay.runtime.tensors import dtype_of

__all__ = ["StandIns", "is_stand_in"]

APART: Final = 16
"""Bytes from one value to the next: the size of the largest dtype."""


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has fewer bytes behind it than it has elements for, as what is here stands for a parameter."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes


@final
class StandIns(Mapping[str, torch.Tensor]):
    """Those of ``parameters`` on ``device``, by name; the same tensors every time.

    All values are in one buffer, so that one op compares them with what they were. Each stand-in has a storage of its
    own over its value: by that a stray use is known for what it is.
    """

    def __init__(self, parameters: Sequence[Parameter], device: torch.device) -> None:
        self._values = torch.zeros(APART * len(parameters), dtype=torch.uint8, device=device)
        self._made: dict[str, torch.Tensor] = {}
        for place, parameter in enumerate(parameters):
            dtype = dtype_of(parameter)
            begin = APART * place
            own = self._values.untyped_storage()[begin : begin + dtype.itemsize]
            value = torch.empty(0, dtype=dtype, device=device).set_(own, 0, (1,), (1,))
            if dtype.is_floating_point:
                value.fill_(float("nan"))
            self._made[parameter.name] = value.as_strided(parameter.shape, (0,) * len(parameter.shape))
        self._unwritten = self._values.clone()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def expect_unwritten(self) -> None:
        """Raises ``ModelError`` naming the first that was written to, once: from then on all are what they were. Of
        integers a write of zeros is not told. Waits for the device."""
        if not self._made or torch.equal(self._values, self._unwritten):
            return
        at = int((self._values != self._unwritten).nonzero()[0])
        self._values.copy_(self._unwritten)
        raise ModelError(
            f"parameter {list(self._made)[at // APART]} was written to in place (fill_, zero_, ...) while its bytes "
            f"were elsewhere, and they are what they were; write parameters before prepare(), or with "
            f"model.load_state_dict(values, strict=False)"
        )
