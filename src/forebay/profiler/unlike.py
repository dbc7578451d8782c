"""Ops whose fake results have other bytes than those that they make, or lie otherwise.

oneDNN's LSTM leaves a workspace to its backward, some 16 times its output, of which a fake result has no byte, and its
backward makes a gradient for each of two biases, which are one tensor under fake tensors. The statistics that a batch
norm keeps of 16-bit activations (autocast) have the dtype of its weight. What a batch norm makes on the host lies as
its input's memory format says, channels last or in order; a fake result lies as the input does, transposed as it may
be, and what reads it next may be taken to copy, or not to. Some losses are computed element by element where their
result will be, and then summed up there: the one number that is left keeps the bytes of all (``ATen/native/Loss.cpp``).
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

__all__ = ["TrueResults"]

aten = torch.ops.aten

_WORKSPACES: Final = {aten.mkldnn_rnn_layer.default: 3}
"""By op, which of its results is a workspace whose bytes only the op itself knows."""

_APART: Final = frozenset({aten.mkldnn_rnn_layer_backward.default})
"""Ops whose results share no bytes, whatever the fake ones do."""

_NORMS: Final = frozenset({aten.native_batch_norm.default})
"""Ops whose results are those of an input, and statistics of it in the dtype of the weight, the second argument."""

_IN_FORMAT: Final = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}
"""By op, which argument is the input whose memory format its first result has on the host."""


_SUMMED: Final = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
"""By op, which argument says whether the losses of all elements are summed up (0: they are not; else they are, which is
the default)."""


@final
class TrueResults:
    """Results as the op would have made them. The bytes of a workspace are found by running the op once for each kind
    of arguments, on zeros."""

    def __init__(self) -> None:
        self._found: dict[Any, int] = {}

    def of(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """``result`` of ``func`` under fake tensors, with all the bytes that the op would have made."""
        if func in _APART:
            first = {id(one): place for place, one in reversed(list(enumerate(result)))}
            return tuple(one if first[id(one)] == at else torch.empty_like(one) for at, one in enumerate(result))
        if func in _IN_FORMAT and isinstance(result[0], torch.Tensor):
            result = (_in_format(result[0], args[_IN_FORMAT[func]]), *result[1:])
        if func in _NORMS and args[1] is not None:
            output, *statistics = result
            return (output, *(one.to(args[1].dtype) for one in statistics))
        if func in _WORKSPACES and torch.is_grad_enabled():  # else the op leaves nothing to a backward
            place = _WORKSPACES[func]
            nbytes = self._nbytes(func, place, args, kwargs)
            whole = torch.empty(nbytes, dtype=torch.uint8, device=result[place].device)
            return (*result[:place], whole, *result[place + 1 :])
        if func in _SUMMED and _argument(_SUMMED[func], "reduction", args, kwargs):
            return _in_the_bytes_of_all(result, *args[:2])
        return result

    def _nbytes(self, func: Any, place: int, args: Any, kwargs: Any) -> int:
        key = repr(tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), (func, args, kwargs)))
        if key not in self._found:
            with _disable_current_modes():
                given, named = tree_map_only(torch.Tensor, _zeros, (args, kwargs))
                self._found[key] = func(*given, **named)[place].nbytes
        return self._found[key]


def _argument(place: int, name: str, args: Any, kwargs: Any, default: int = 1) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)


def _in_the_bytes_of_all(result: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``result``, a single number, where the losses of all elements were."""
    elements = torch.broadcast_shapes(one.shape, other.shape).numel()
    return result.new_empty(max(elements, 1)).as_strided((), ())


def _in_format(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """``made`` as it lies on the host, where it lies as ``given``'s memory format says."""
    if made.device.type != "cpu":
        return made
    return torch.empty_like(made, memory_format=suggest_memory_format(given))


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
