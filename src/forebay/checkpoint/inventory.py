"""What a checkpoint holds of a model: tensors by name, dtype and shape, whatever plan the model is under. No torch.

``parameter.NAME``  a parameter in full precision: its fp32 master if it has one, else its own value
``STATE.NAME``      one of its optimizer states (``exp_avg.NAME``), as it lies at home: fp32, bf16, codes or scales
``upper.NAME``      instead of ``parameter.NAME``, of one in bf16 whose states are named where they lie: the parameter,
``lower.NAME``      and the lower half of its master (int16); ``forebay.states.Masters`` says how they are one number
``residual.NAME``   what of its gradients no update has had, fp32: where these do not go whole
``buffer.NAME``     a buffer that belongs to the state dict

A parameter whose elements do not lie in the order of their indices (channels last) is kept in the order of memory, its
dimensions in that order too, and says so in its name (``parameter.conv.weight@0,2,3,1``): bytes are never put in
another order, and whoever has another order does not find the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forebay.errors import ModelError
from forebay.layout import LOWER, MASTER, has_stream, in_order, needs_master, with_masters
from forebay.model import Block, Parameter
from forebay.states import Masters, form_of, plain_name

__all__ = [
    "BUFFER",
    "UPPER",
    "VALUE",
    "Entry",
    "checkpoint_nbytes",
    "dtype_name",
    "entries_of",
    "entry_name",
    "entry_of",
    "value_of",
]

VALUE = "parameter"
"""First part of the names of parameters."""

UPPER = "upper"
"""First part of the names of parameters that are the upper halves of masters."""

BUFFER = "buffer"
"""First part of the names of buffers."""

_KINDS = {MASTER: VALUE, LOWER: "lower"}
"""First parts of names that are not those of the streams."""

_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
_ITEMSIZES = dict(_DTYPES.values())


def dtype_name(dtype: str) -> str:
    """What safetensors calls the torch dtype ``dtype``. Raises ``ModelError`` for one that it does not have."""
    if dtype not in _DTYPES:
        raise ModelError(f"a checkpoint cannot hold tensors of {dtype}; it holds {', '.join(_DTYPES)}")
    return _DTYPES[dtype][0]


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: its name, what safetensors calls its dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 0 for a dtype that no checkpoint has."""
        return _ITEMSIZES.get(self.dtype, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        nbytes = self.itemsize
        for size in self.shape:
            nbytes *= size
        return nbytes


def entry_name(state: str, parameter: Parameter) -> str:
    """The name of one stream of ``parameter``: of a state, or of its value, which is its master's if there is one."""
    kind = _KINDS.get(state) or plain_name(state)
    if in_order(parameter):
        return f"{kind}.{parameter.name}"
    return f"{kind}.{parameter.name}@{','.join(map(str, _memory_order(parameter)))}"


def entry_of(state: str, parameter: Parameter) -> Entry:
    """The tensor that one stream of ``parameter`` becomes."""
    name = entry_name(state, parameter)
    shape = tuple(parameter.shape[dimension] for dimension in _memory_order(parameter))
    if state in (VALUE, UPPER):
        return Entry(name, dtype_name(parameter.dtype), shape)
    form = form_of(state)
    own = form.shape_for(parameter)
    if own is None:
        raise ModelError(f"{parameter.name} has no {plain_name(state)}")
    return Entry(name, dtype_name(form.dtype), shape if form.is_elementwise else own)


def value_of(parameter: Parameter, masters: Masters) -> str | None:
    """What of ``parameter`` is kept from where it is itself: its value, or the upper half of its master where the
    halves are kept (``masters``); None of one that is made from its master."""
    if not needs_master(parameter):
        return VALUE
    return UPPER if masters is Masters.LOWER else None


def entries_of(block: Block, state_names: Iterable[str], masters: Masters = Masters.WHOLE) -> Iterator[Entry]:
    """The tensors of ``block`` under an optimizer that keeps ``state_names``, masters whole or as their halves."""
    names = tuple(state_names)
    for parameter in block.parameters:
        value = value_of(parameter, masters)
        if value is not None:
            yield entry_of(value, parameter)
        for state in with_masters(names, masters) if parameter.trainable else ():
            if has_stream(state, parameter):
                yield entry_of(state, parameter)


def checkpoint_nbytes(blocks: Iterable[Block], state_names: tuple[str, ...], buffers: int) -> int:
    """Bytes of the tensors of a checkpoint of a model with ``buffers`` bytes of buffers; a little more is written, for
    names and the manifest."""
    return buffers + sum(entry.nbytes for block in blocks for entry in entries_of(block, state_names))


def _memory_order(parameter: Parameter) -> list[int]:
    """The dimensions, that of the longest stride first."""
    dimensions = range(len(parameter.shape))
    if in_order(parameter):
        return list(dimensions)
    return sorted(dimensions, key=lambda d: (-parameter.stride[d], d))
