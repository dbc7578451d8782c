"""What stands in a model's output for logits that nobody has computed."""

from __future__ import annotations

from typing import Any, Final, final

import torch

from forebay.errors import ModelError

__all__ = ["NO_LOGITS", "REMEDY", "NoLogits"]

REMEDY: Final = "use loss='plain' (--loss plain)"

NO_LOGITS: Final = (
    f"the logits of the model are read, and where its loss is computed in pieces there are none; {REMEDY}"
)
"""Of whoever takes more of the model's output than its loss."""

_HARMLESS: Final = frozenset(
    {
        *("__get__", "__hash__", "__len__", "__repr__", "data_ptr", "detach", "dim", "element_size", "get_device"),
        *("is_contiguous", "is_floating_point", "numel", "size", "storage_offset", "stride", "untyped_storage"),
        *("cpu", "cuda", "double", "float", "half", "bfloat16", "to"),
    }
)
"""What frameworks do to any output, by name: they ask what it is, and bring it elsewhere or to another dtype."""


@final
class NoLogits(torch.Tensor):
    """Logits of no tokens. Whoever computes with them is told so: a mean of them would be NaN, and others nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _HARMLESS:
            raise ModelError(NO_LOGITS)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
