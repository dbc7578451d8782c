"""What an op costs, whatever the machine: FLOPs, bytes touched, and a signature by which equal ops are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, final

import torch
from torch.utils.flop_counter import flop_registry

from forebay.device.schema import is_mutable, written_aside
from forebay.trace import Work

__all__ = ["Call", "TensorSpec", "Works", "is_view", "made_by", "tensors_in"]

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is not there: shape and stride in elements, dtype by name.

    ``high`` bounds the values of an integer tensor from above (exclusive; they start at 0), where the op reads them
    as indices; None: any value will do. ``ascending`` values are offsets: each is the end of a group, the last one is
    ``high`` - 1. ``true`` is how many elements of a mask are True, where other arguments must match that; None: any.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    high: int | None = None
    ascending: bool = False
    true: int | None = None


@final
@dataclass(frozen=True)
class Call:
    """An op with its arguments, every tensor replaced by its ``TensorSpec``: what it takes to run and time it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The strided tensors among an op's arguments or results, in order: tensors, and lists or tuples of them."""
    found: list[torch.Tensor] = []
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(tensors_in(value))
    return found


def made_by(func: Any, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """The strided tensors that hold something new behind ``func``, which returned ``result``: those of its results, and
    of what it writes to and does not return (the noise of ``rrelu``, what ``_foreach`` ops are given)."""
    aside = tensors_in(written_aside(func, args, kwargs)) if is_mutable(func) else []
    return [*tensors_in(result), *aside]


# Ops that return a storage of their input although their schema does not say so.
_SILENT_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default})


def is_view(func: Any) -> bool:
    """Whether ``func`` only makes another tensor over the storage of its input."""
    return bool(func.is_view) or func in _SILENT_VIEWS


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _key(value: Any) -> Any:
    """``value`` as a part of a hashable key that is equal for equal costs."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return ("sparse", value.dtype, tuple(value.shape))
        return (value.dtype, tuple(value.shape), value.stride())
    if isinstance(value, tuple | list):
        return tuple([_key(v) for v in value])
    if isinstance(value, torch.Generator):
        return None
    return (type(value), value)


def _written(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        strides = ",".join(map(str, value.stride())) if value.layout is torch.strided else "sparse"
        return f"{_name(value.dtype)}[{shape};{strides}]"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_written(v) for v in value) + ")"
    return "None" if isinstance(value, torch.Generator) else str(value)


@final
class Works:
    """The distinct costs of a step, and an example call of each."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.calls: dict[str, Call] = {}
        self._known: dict[Any, int] = {}

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The index of the cost of ``func(*args, **kwargs)``, which returned ``result``."""
        key: tuple[Any, ...] = (func, _key(args), tuple((k, _key(v)) for k, v in kwargs.items()) if kwargs else ())
        if torch.Tag.dynamic_output_shape in func.tags:
            key = (*key, _key(result))
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.works)
            self.works.append(_measure(func, args, kwargs, result))
            self.calls[self.works[index].signature] = _call(func, args, kwargs)
        return index


def _measure(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    given = [_written(a) for a in args] + [f"{k}={_written(v)}" for k, v in (kwargs or {}).items()]
    signature = f"{func}({', '.join(given)})"
    if torch.Tag.dynamic_output_shape in func.tags:
        signature += f" -> {_written(result)}"
    inputs = tensors_in(args) + tensors_in(list((kwargs or {}).values()))
    outputs = made_by(func, args, kwargs or {}, result)
    seen = [*inputs, *outputs]
    arithmetic = next((t for t in seen if t.is_floating_point()), seen[0] if seen else None)
    flops = 0 if is_view(func) else _flops(func, args, kwargs, result)
    nbytes = 0 if is_view(func) else _touched(func, inputs, outputs, args)
    return Work(str(func), signature, "" if arithmetic is None else _name(arithmetic.dtype), flops, nbytes)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func.overloadpacket
    if packet in _OWN_FLOPS:
        return _OWN_FLOPS[packet](args)
    counted = flop_registry.get(packet)
    return 0 if counted is None else int(counted(*args, **(kwargs or {}), out_val=result))


def _attention(args: Any) -> int:
    # Scores, and their product with the values. Torch's own formula refuses fewer heads of keys than of queries up to
    # its release 2.11.
    query, key, value = (arg.shape for arg in args[:3])
    return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _attention_backward(args: Any) -> int:
    # The scores again and their gradient, and the gradients of queries, keys and values.
    query, key, value = (arg.shape for arg in args[1:4])
    return int(2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1]))


def _grouped(args: Any) -> int:
    # (rows, k) by (groups, k, n): each row meets one group. (m, rows) by (rows, n): each row adds to one group.
    return 2 * int(prod(args[0].shape[-2:])) * int(args[1].shape[-1])


_OWN_FLOPS: Mapping[Any, Callable[[Any], int]] = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention: _attention,
        aten._scaled_dot_product_efficient_attention: _attention,
        aten._scaled_dot_product_cudnn_attention: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._scaled_dot_product_flash_attention_backward: _attention_backward,
        aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
        aten._grouped_mm: _grouped,
    }
)
"""FLOPs of ops that torch's own registry (``torch.utils.flop_counter``) leaves out, or of some shapes of which some
releases know nothing."""

_WRITE_ONLY = frozenset(
    {"zero_", "fill_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "copy_"}
)
_NOTHING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach"})
# Ops that read, of their first argument, only as many elements as they return.
_ROWS = frozenset({"embedding", "index", "index_select", "gather"})
# Ops that write, of their first argument, only as many elements as the source brings.
_INTO_ROWS = frozenset({"index_put_", "_index_put_impl_", "index_add_", "scatter_", "scatter_add_", "index_copy_"})


def _extent(tensor: torch.Tensor) -> int:
    """Bytes that are there to be read: an expanded dimension is one."""
    elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return elements * tensor.element_size()


def _touched(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: Any) -> int:
    """Bytes read and written at least."""
    name = func.overloadpacket.__name__
    written = sum(map(_extent, outputs))
    if name in _NOTHING:
        return 0
    if name in _WRITE_ONLY:
        return written + (_extent(inputs[1]) if name == "copy_" and len(inputs) > 1 else 0)
    if name in _ROWS:
        return 2 * written + sum(map(_extent, inputs[1:]))
    if name in _INTO_ROWS and len(inputs) > 1:
        values = max(map(_extent, inputs[1:]))
        return sum(map(_extent, inputs[1:])) + 2 * values  # the rows are read, added to and written
    return sum(map(_extent, inputs)) + written


def _call(func: Any, args: Any, kwargs: Any) -> Call:
    name = func.overloadpacket.__name__
    highs, ascending = _highs(name, args), name in _OFFSETS
    specs = []
    for place, value in enumerate(args):
        if isinstance(value, list | tuple) and place == 1 and name in _ADVANCED:
            sizes = args[0].shape
            places = [_spec(v, int(sizes[d]) if d < len(sizes) else None, ascending) for d, v in enumerate(value)]
            specs.append([_as_many_as_values(place, args) for place in places])
        else:
            specs.append(_spec(value, highs.get(place), ascending))
    named = {k: _spec(v, None, ascending) for k, v in (kwargs or {}).items()}
    return Call(func, tuple(specs), MappingProxyType(named))


def _spec(value: Any, high: int | None, ascending: bool) -> Any:
    """What a measurement makes an argument like ``value`` from; its integers are below ``high``, and ``ascending``."""
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.layout is torch.strided else ()
        bound = 2 if value.dtype is torch.bool else high
        bounded = bound if not (value.is_floating_point() or value.is_complex()) else None
        return TensorSpec(
            tuple(value.shape), tuple(stride), _name(value.dtype), bounded, ascending and bounded is not None
        )
    if isinstance(value, list | tuple):
        return type(value)(_spec(v, high, ascending) for v in value) if type(value) in (list, tuple) else value
    return None if isinstance(value, torch.Generator) else value


def _as_many_as_values(place: Any, args: Any) -> Any:
    """The spec of an index; of a mask, with as many True as there are values to be put where it is."""
    values = args[2] if len(args) > 2 else None
    is_mask = isinstance(place, TensorSpec) and place.dtype == "bool" and len(args[1]) == 1
    if not is_mask or not isinstance(values, torch.Tensor):
        return place
    rows = values.dim() == args[0].dim() - len(place.shape) + 1 and values.shape[0] > 1
    return replace(place, true=int(values.shape[0])) if rows else place


_ADVANCED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
# Ops whose integers are the ends of groups of rows.
_OFFSETS = frozenset({"_grouped_mm"})


def _highs(name: str, args: Any) -> dict[int, int]:
    """For each integer argument that is read as an index: its place, and the number of what it indexes."""
    match name:
        case "embedding" | "_embedding_bag" | "_embedding_bag_forward_only":
            return {1: int(args[0].shape[0])}
        case "embedding_dense_backward":
            return {1: int(args[2])}
        case "nll_loss_forward" | "nll_loss2d_forward":
            return {1: int(args[0].shape[1 if args[0].dim() > 1 else 0])}
        case "nll_loss_backward" | "nll_loss2d_backward":
            return {2: int(args[1].shape[1 if args[1].dim() > 1 else 0])}
        case "gather" | "index_select" | "scatter" | "scatter_" | "scatter_add" | "scatter_add_":
            return {2: _size(args[0], args[1])}
        case "scatter_reduce" | "scatter_reduce_" | "index_reduce" | "index_reduce_":
            return {2: _size(args[0], args[1])}
        case "index_add" | "index_add_" | "index_copy" | "index_copy_" | "index_fill" | "index_fill_":
            return {2: _size(args[0], args[1])}
        case "value_selecting_reduction_backward":
            return {2: int(args[3][args[1]]) if args[3] else 1}
        case "take" | "put" | "put_":
            return {1: int(args[0].numel())}
        case "max_pool2d_with_indices_backward":
            return {7: int(prod(args[1].shape[-2:]))}
        case "_grouped_mm":
            # What is divided among the groups: rows of the first, columns of the second, or what they have in common.
            shared = args[1].shape[-1] if args[0].dim() == 3 else args[0].shape[-1 if args[1].dim() == 2 else 0]
            return {2: int(shared) + 1}
    return {}


def _size(tensor: torch.Tensor, dim: int) -> int:
    return int(tensor.shape[dim]) if tensor.dim() else 1
