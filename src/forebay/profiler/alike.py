"""Ops on tensors without values: what comes out of one is known where the same op was seen on tensors alike.

A step runs the same ops on tensors of the same shapes once for every layer. ``FakeTensorMode`` has a cache for that;
to look there and to answer takes a third to two fifths of the time that a step takes to record (GPT-2, and a Llama of
16 layers, torch 2.13; docs/log.md). Here it is asked once; after that tensors like those that it has made are made in
its place.

What is made again is compared with what torch has made before it is believed, down to the dispatch keys. Ops whose
results follow from more than what their arguments look like are always torch's: those that have values to ask for,
those of other libraries, and any with a tensor among its arguments that is no plain fake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

__all__ = ["Alike", "blank", "stand_in"]

_ASKING: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
"""Tags of ops that ask for values, or change what a tensor looks like."""

_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""What else than tensors, and lists of these, an op may be given."""


@final
class _NotAlike(Exception):
    """An argument, or a result, of which its looks do not say everything."""


@final
@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an op has made, or a view: of the storage of the argument at the place ``source`` among those that
    are tensors (None: of one of its own)."""

    source: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def again(self, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> FakeTensor:
        """Another one."""
        # Asked while torch runs an op: nothing in here is an op of the step.
        with no_dispatch():
            if self.source is None:
                like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                storage = inputs[self.source].untyped_storage()
                like = torch.empty((0,), dtype=self.dtype, device="meta")
                like.set_(storage, self.offset, self.shape, self.stride)
            return FakeTensor(mode, like, self.device)


@final
@dataclass(frozen=True, slots=True)
class _Given:
    """The argument at the place ``source`` among those that are tensors, which an op in place returns."""

    source: int

    def again(self, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The one that was given this time."""
        return inputs[self.source]


@final
@dataclass(frozen=True, slots=True)
class _Number:
    """A number, or None."""

    value: int | float | bool | None

    def again(self, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> int | float | bool | None:
        """The same."""
        return self.value


@final
@dataclass(frozen=True, slots=True)
class _Result:
    """What an op returns: ``parts`` in a ``kind`` of sequence (None: one part by itself)."""

    mode: FakeTensorMode
    kind: type | None
    parts: tuple[_Made | _Given | _Number, ...]

    def again(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The same once more."""
        made = [part.again(self.mode, inputs) for part in self.parts]
        return made[0] if self.kind is None else self.kind(made)


@final
class Alike:
    """Runs ops under a ``FakeTensorMode``. What is known is that of one step."""

    def __init__(self) -> None:
        self._known: dict[Any, _Result | None] = {}
        self._follow: dict[Any, bool] = {}

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of ``func``, which torch would give."""
        follows = self._follow.get(func)
        if follows is None:
            follows = self._follow[func] = _follows(func)
        inputs = list[torch.Tensor]()
        try:
            looks = (_looks(args, inputs), _looks(kwargs.values(), inputs)) if follows else None
        except _NotAlike:
            looks = None
        if looks is None:
            return func(*args, **kwargs)
        key = func, looks, tuple(kwargs), torch.get_default_dtype()
        known = self._known.get(key)
        if known is not None:
            return known.again(inputs)
        before = [(_look(tensor), _storage(tensor)) for tensor in inputs]
        result = func(*args, **kwargs)
        if key not in self._known:
            # An op that makes its argument look otherwise (``out=`` of no elements) does more than return it.
            same = before == [(_look(tensor), _storage(tensor)) for tensor in inputs]
            learnt = self._known[key] = _learnt(result, inputs) if same else None
            if learnt is not None:
                # What torch has made it refers to weakly, by which ``module.to(dtype)`` in a forward is refused.
                return learnt.again(inputs)
        return result


def stand_in(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A tensor without values, and with a storage of its own, that looks like ``tensor``."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    if not plain or tensor.is_conj() or tensor.is_neg():
        return mode.from_tensor(tensor)
    # What torch looks at beside that, to make one that shares views and gradients too, takes seven times as long.
    return blank(mode, tensor, tensor.device)


def blank(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> FakeTensor:
    """A tensor without values on ``device``, of the shape, the strides and the dtype of ``like``. Nothing refers to it
    weakly, as torch from 2.15 on does to what ``torch.empty_strided`` makes: such a parameter cannot be cast in a
    forward."""
    return _Made(None, like.shape, like.stride(), 0, like.dtype, device).again(mode, ())


def _follows(func: Any) -> bool:
    """Whether the result of ``func`` follows from what its arguments look like."""
    return isinstance(func, OpOverload) and func.namespace == "aten" and not _ASKING & set(func.tags)


def _looks(values: Any, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """What ``values`` look like; the tensors among them are added to ``inputs``. Raises ``_NotAlike``."""
    found = list[Any]()
    for value in values:
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            found.append(_look(value))
        elif type(value) in _PLAIN:
            found.append((type(value), value))
        elif isinstance(value, tuple | list):
            found.append(_looks(value, inputs))
        else:
            raise _NotAlike
    return tuple(found)


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What ``tensor`` looks like, but for its storage. Raises ``_NotAlike``."""
    # A constant is known by more than this.
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or tensor.constant is not None:
        raise _NotAlike
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device, *bits


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """By what the storage of ``tensor`` is known as long as it is there, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def _learnt(result: Any, inputs: Sequence[torch.Tensor]) -> _Result | None:
    """How another one like ``result`` is made; None if that cannot be said."""
    kind = type(result) if type(result) in (tuple, list) else None
    values = result if kind is not None else (result,)
    try:
        parts = tuple([_part(value, inputs) for value in values])
    except _NotAlike:
        return None
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if not modes:
        return None
    learnt = _Result(modes[0], kind, parts)
    again = learnt.again(inputs)
    pairs = zip(values, again if kind is not None else (again,), strict=True)
    return learnt if all(_are_same(one, other) for one, other in pairs) else None


def _part(value: Any, inputs: Sequence[torch.Tensor]) -> _Made | _Given | _Number:
    """How ``value`` came about. Raises ``_NotAlike`` where that cannot be said."""
    if value is None or type(value) in (bool, int, float):
        return _Number(value)
    if not isinstance(value, FakeTensor):
        raise _NotAlike
    given = next((place for place, tensor in enumerate(inputs) if tensor is value), None)
    if given is not None:
        return _Given(given)
    shape, stride, offset, dtype, device, *_ = _look(value)
    source = next((place for place, tensor in enumerate(inputs) if _storage(tensor) == _storage(value)), None)
    return _Made(source, tuple(shape), stride, offset, dtype, device)


def _are_same(one: Any, other: Any) -> bool:
    """Whether ``other``, made again, is what ``one`` is."""
    if not isinstance(one, FakeTensor):
        return one is other
    keys = [torch._C._dispatch_key_set(tensor) for tensor in (one, other)]
    looks = [(*_look(tensor), tensor.untyped_storage().nbytes(), tensor.requires_grad) for tensor in (one, other)]
    return keys[0] == keys[1] and looks[0] == looks[1]
