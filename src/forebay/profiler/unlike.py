"""Ops whose fake results have other bytes than those that they make, or lie otherwise.

oneDNN's LSTM leaves a workspace to its backward, some 16 times its output, of which a fake result has no byte, and its
backward makes a gradient for each of two biases, which are one tensor under fake tensors. The statistics that norms
keep of 16-bit activations (autocast) have the dtype of their parameters on the host
(``ATen/native/cpu/mixed_data_type.h``), and the gradient of a group norm's input has that of the input, on which fake
results have no say. What a batch norm makes on the host lies as its input's memory format says, channels last or in
order; a fake result lies as the input does, transposed as it may be, and what reads it next may be taken to copy, or
not to.

Some results keep a larger storage than they show: that in which they were made. Some losses are computed element by
element where their result will be, and then summed up there: the one number that is left keeps the bytes of all
(``ATen/native/Loss.cpp``). Folding and unfolding begin with a result as large as the input (``Col2Im.cpp``,
``Im2Col.cpp`` and their twins for a card), bags of embeddings on the host with a place more (``EmbeddingBag.cpp``).
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

_STATISTICS: Final = {
    aten.native_batch_norm.default: slice(1, 5),
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_group_norm.default: slice(1, 3),
}
"""By norm, which arguments are its parameters. All its results but the first are statistics; on the host they have the
dtype of the first parameter that is there."""

_IN_DTYPE: Final = {aten.native_group_norm_backward.default: 1}
"""By op, which argument is the input whose dtype its first result has."""

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

_FOLDS: Final = frozenset({aten.col2im.default, aten.im2col.default})
"""Ops whose result keeps at least as many elements as the input, the first argument, has."""

_BAGS: Final = frozenset({aten._embedding_bag.default, aten._embedding_bag_forward_only.default})
"""Ops that are given indices and offsets, and say of each index which bag it is in (result 1, on the host one element
more) and of each bag how large it is (result 2, one for each offset, of which the last may begin no bag)."""

_SUMS: Final = 0
"""The mode of bags that are summed up, which is the default."""


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
        if func in _IN_DTYPE and result[0] is not None:
            return (result[0].to(args[_IN_DTYPE[func]].dtype), *result[1:])
        if func in _STATISTICS and result[0].device.type == "cpu":
            output, *statistics = result
            dtype = next((one.dtype for one in args[_STATISTICS[func]] if one is not None), output.dtype)
            return (output, *(one.to(dtype) for one in statistics))
        if func in _WORKSPACES and torch.is_grad_enabled():  # else the op leaves nothing to a backward
            place = _WORKSPACES[func]
            nbytes = self._nbytes(func, place, args, kwargs)
            whole = torch.empty(nbytes, dtype=torch.uint8, device=result[place].device)
            return (*result[:place], whole, *result[place + 1 :])
        if func in _SUMMED and _argument(_SUMMED[func], "reduction", args, kwargs):
            return _in_room_for(torch.broadcast_shapes(args[0].shape, args[1].shape).numel(), result)
        if func in _FOLDS:
            return _in_room_for(args[0].numel(), result)
        if func in _BAGS and result[0].device.type == "cpu":
            output, bags, sizes, largest = result
            bags = _in_room_for(args[1].numel() + 1, bags) if bags.numel() else bags  # sums do without where they can
            if func is aten._embedding_bag_forward_only.default and _argument(4, "mode", args, kwargs, _SUMS) == _SUMS:
                largest = _in_room_for(args[2].numel(), largest)  # which has the shape of sizes that nobody cuts
            return output, bags, _in_room_for(args[2].numel(), sizes), largest
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


def _in_room_for(elements: int, made: torch.Tensor) -> torch.Tensor:
    """``made`` in a storage for so many ``elements``, unless its own has that room: it has, if ``made`` is real."""
    if elements * made.element_size() <= made.untyped_storage().nbytes():
        return made
    return made.new_empty(elements).as_strided(made.shape, made.stride())


def _in_format(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """``made`` as it lies on the host, where it lies as ``given``'s memory format says."""
    if made.device.type != "cpu":
        return made
    return torch.empty_like(made, memory_format=suggest_memory_format(given))


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
