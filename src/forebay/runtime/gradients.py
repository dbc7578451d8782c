"""Landed gradients: gradients whose bytes are on the host while ``param.grad`` stands for them on the device.

A gradient leaves the device as soon as autograd has made it. ``param.grad`` becomes a ``LandedGradient``, a tensor
without storage that has the parameter's shape, dtype and device. What users and autograd do with gradients lands in
its dispatch: ``add_`` (the next micro-batch), the norm and ``mul_`` of clipping, ``zero_``, ``.to()``. Anything else
runs on a copy on the device. (design.md, mechanism 4.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, SupportsIndex, final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from forebay.device.schema import written_by
from forebay.errors import ParameterReleased, UsageError
from forebay.optim.scaling import SCALABLE
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.spent import SpentGradient
from forebay.runtime.standins import is_stand_in

__all__ = ["LandedGradient", "host_copy", "is_gone"]


aten = torch.ops.aten
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_MULTIPLIES = frozenset({aten.mul_.Tensor, aten.mul_.Scalar})
_LISTS = "aten::_foreach_"
"""Begins the names of ops that do the same to each place of their lists."""


@final
class LandedGradient(torch.Tensor):
    """``param.grad`` of a parameter whose gradient has landed, or a view of one; see the module's docstring.

    ``piece`` is the view of the landed bytes, on the host, that this tensor stands for.
    """

    buffer: GradientBuffer
    piece: torch.Tensor
    is_whole: bool
    generation: int
    # What ``data`` was last set to, with its version then: its values were copied, and it must not change any more.
    _source: tuple[weakref.ref[torch.Tensor], int] | None

    @staticmethod
    def __new__(cls, buffer: GradientBuffer, device: torch.device, piece: torch.Tensor | None = None) -> LandedGradient:
        """A wrapper for all of ``buffer``, or for ``piece``, a view of its bytes."""
        is_whole = piece is None
        if piece is None:
            piece = buffer.whole
        made: LandedGradient = torch.Tensor._make_wrapper_subclass(
            cls, piece.shape, strides=piece.stride(), dtype=piece.dtype, device=device, requires_grad=False
        )
        made.buffer, made.piece, made.is_whole, made.generation = buffer, piece, is_whole, buffer.generation
        made._source = None
        return made

    def __init__(self, buffer: GradientBuffer, device: torch.device, piece: torch.Tensor | None = None) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LandedGradient({self.buffer.parameter.name}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A tensor of its own, on the device."""
        made = memo[id(self)] = self.value().to(self.device, copy=True)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def stands_for(self, buffer: GradientBuffer) -> bool:
        """Whether this is what has landed in ``buffer``, all of it, element for element."""
        if self.buffer is not buffer or self.generation != buffer.generation:
            return False
        if self.is_whole:
            return True
        spec, piece = buffer.parameter, self.piece
        same_place = piece.data_ptr() == buffer.host.data_ptr()
        return same_place and tuple(piece.shape) == spec.shape and piece.stride() == spec.stride

    def value(self) -> torch.Tensor:
        """The landed bytes themselves (host), all of them there.

        Raises ``ForebayError`` when another gradient has landed since: the bytes are no longer this one's.
        """
        self.expect_current()
        self.buffer.settle()
        return self.piece

    def writable(self) -> torch.Tensor:
        """Like ``value``, for a caller that is going to change it."""
        self.expect_current()
        self.buffer.settle_for_write()
        return self.piece

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor. What it is set to lands: torch would exchange what is behind this tensor, and leave the
        landed bytes, which the update reads, as they were.

        Setting raises ``UsageError`` for another shape, dtype or device.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        wanted, given = ((tuple(t.shape), t.dtype, t.device) for t in (self, value))
        if wanted != given:
            raise UsageError(
                f"grad.data of {self.buffer.parameter.name} is set to a tensor of {given}, and the gradient is one of "
                f"{wanted}; give it that shape, dtype and device"
            )
        source = value if value._base is None else value._base  # a view has the version of what it is a view of
        self.copy_(value)
        # What stands for the same bytes changes with them.
        is_own = isinstance(value, LandedGradient) and value.buffer is self.buffer
        self._source = None if is_own else (weakref.ref(source), source._version)

    def expect_same_source(self) -> None:
        """Raises ``UsageError`` where what ``data`` was set to has changed since. In torch the two are one tensor."""
        source = None if self._source is None else self._source[0]()
        if source is not None and self._source is not None and source._version != self._source[1]:
            raise UsageError(
                f"what grad.data of {self.buffer.parameter.name} was set to has changed since, and the gradient on the "
                f"host is a copy of it; set grad.data again behind the last change, or set grad itself"
            )

    @property
    def is_gone(self) -> bool:
        """Whether it was used up by an update in backward."""
        return self.buffer.passes and self.generation != self.buffer.generation

    def was_used_up(self, buffer: GradientBuffer) -> bool:
        """Whether this is the gradient that ``buffer`` had last, which was used up."""
        return self.buffer is buffer and self.generation == buffer.generation - 1

    def expect_current(self) -> None:
        """Raises ``ForebayError`` where another gradient has landed since."""
        if self.generation != self.buffer.generation:
            raise self.buffer.gone()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LandedGradient):
            own = _OWN.get(func)
            if own is not None:
                return own(func, first, args[1:], kwargs)
            if func.is_view:
                return _view(func, first, args[1:], kwargs)
        elif func is _UNSCALE or func._schema.name.startswith(_LISTS):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, LandedGradient):
                    leaf.expect_current()  # before any of them changes
            return _unscale(*args) if func is _UNSCALE else _one_by_one(func, args, kwargs)
        return _on_device(func, args, kwargs)


def host_copy(gradient: torch.Tensor) -> torch.Tensor:
    """A copy on the host of what any ``param.grad`` stands for."""
    if isinstance(gradient, LandedGradient):
        return gradient.value().clone()
    return gradient.detach().to("cpu", copy=True)


def is_gone(gradient: torch.Tensor) -> bool:
    """Whether ``gradient`` was used up by an update in backward, wherever it was."""
    return isinstance(gradient, LandedGradient | SpentGradient) and gradient.is_gone


def _view(func: Any, gradient: LandedGradient, args: Any, kwargs: Any) -> Any:
    """A view of a landed gradient stands for a view of the landed bytes: what is written to it must land too."""

    def wrap(piece: torch.Tensor) -> LandedGradient:
        return LandedGradient(gradient.buffer, gradient.device, piece)

    gradient.expect_current()
    return tree_map_only(torch.Tensor, wrap, func(gradient.piece, *args, **kwargs))


def _add(func: Any, gradient: LandedGradient, args: Any, kwargs: Any) -> Any:
    """Adds in place: what autograd adds on the host, anything else on the device."""
    if kwargs or not _can_accumulate(gradient, args[0]):
        return _on_device(func, (gradient, *args), kwargs)
    gradient.buffer.accumulate(args[0])
    return gradient


def _zero(func: Any, gradient: LandedGradient, args: Any, kwargs: Any) -> LandedGradient:
    gradient.writable().zero_()
    if gradient.stands_for(gradient.buffer):
        gradient.buffer.landings = 0
    return gradient


def _norm(func: Any, gradient: LandedGradient, args: Any, kwargs: Any) -> torch.Tensor:
    if not kwargs and gradient.stands_for(gradient.buffer):
        return gradient.buffer.norm(func, args).to(gradient.device)
    made: torch.Tensor = func(gradient.value(), *args, **kwargs)
    return made.to(gradient.device)


def _norm_of(gradient: torch.Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return norm


def _can_accumulate(gradient: LandedGradient, value: Any) -> bool:
    """Whether ``value`` is what autograd adds to a whole gradient: the same shape and dtype, on the device."""
    return (
        gradient.stands_for(gradient.buffer)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, LandedGradient)
        and value.shape == gradient.shape
        and value.dtype == gradient.dtype
    )


def _scale(func: Any, gradient: LandedGradient, args: Any, kwargs: Any) -> LandedGradient:
    """Multiplies or divides in place. By exactly 1, which clipping does where there is nothing to clip, changes no bit
    of a real number: then nothing is written, and an update that has read the gradient has read the right one."""
    factor = args[0]
    number = _number_of(factor)
    if gradient.is_floating_point() and number == 1:
        gradient.expect_current()  # one that is out of date is refused all the same
    elif func in _MULTIPLIES and _is_plain(number) and _can_wait(gradient):
        gradient.buffer.scale(float(number))
    else:
        func(gradient.writable(), factor.cpu() if isinstance(factor, torch.Tensor) else factor)
    return gradient


def _number_of(factor: Any) -> Any:
    """The number that all elements are multiplied by; None where each has its own."""
    if isinstance(factor, torch.Tensor):
        return factor.item() if factor.dim() == 0 else None
    return factor


def _is_plain(number: Any) -> bool:
    """Whether it is real, finite and not 0: what clipping makes of gradients that are finite. Of others torch makes NaN
    in several ways, by where an element lies, and those are its own."""
    return isinstance(number, int | float) and number != 0 and isfinite(number)


def _can_wait(gradient: LandedGradient) -> bool:
    """Whether the update can multiply it: all that has landed, of a dtype that it knows how to."""
    return gradient.dtype in SCALABLE and gradient.stands_for(gradient.buffer)


def _one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """An op on lists, one place of them after the other, so that no two gradients are on the device at once. Those of
    clipping and ``zero_grad`` are done on the host."""
    alone = _ALONE.get(func)
    if alone is not None and not kwargs:
        made = [alone(gradient, *args[1:]) for gradient in args[0]]
        return made if func._schema.returns else None
    if len(func._schema.returns) > 1:
        return _on_device(func, args, kwargs)
    names = [argument.name for argument in func._schema.arguments]
    count = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, list | tuple))

    def at(place: int, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [value[place]]
        return value[place : place + 1] if name == "scalars" and isinstance(value, torch.Tensor) else value

    results: list[torch.Tensor] = []
    for place in range(count):
        own = [at(place, name, value) for name, value in zip(names, args, strict=False)]
        named = {name: at(place, name, value) for name, value in kwargs.items()}
        results += _on_device(func, own, named) or ()
    return results if func._schema.returns else None


def _unscale(gradients: Any, found: torch.Tensor, inverse: torch.Tensor) -> None:
    """That of ``GradScaler``, on the host with what has landed. By exactly 1 nothing is written, as in ``_scale``.

    Raises ``UsageError`` for the sum of gradients of several steps.
    """
    factor = inverse.cpu()
    is_one, there = factor.item() == 1, torch.zeros_like(found, device="cpu")
    for gradient in gradients:
        if isinstance(gradient, LandedGradient) and gradient.buffer.adds_up and not is_one:
            raise UsageError(
                f"this plan updates blocks in turns: the gradient of {gradient.buffer.parameter.name} is a sum with "
                f"that of steps before, which a GradScaler has unscaled already; train in bfloat16, or without a "
                f"scaler, or take policy angel-ptm"
            )
    for gradient in gradients:
        if not isinstance(gradient, LandedGradient):
            _UNSCALE([gradient], found, inverse)
        elif not is_one:
            _UNSCALE([gradient.writable()], there, factor)
        elif gradient.numel() and not isfinite(torch.linalg.vector_norm(gradient.value(), float("inf")).item()):
            there.fill_(1)
    if there.item():
        found.fill_(1)


def _on_device(func: Any, args: Any, kwargs: Any) -> Any:
    """Any other op: runs on copies on the device, and lands again what the op changed in place. Raises
    ``ParameterReleased`` for one that writes a parameter that is away, as an optimizer does that is not forebay's."""
    _expect_there(func, args, kwargs)
    copies: list[tuple[LandedGradient, torch.Tensor]] = []

    def materialise(gradient: LandedGradient) -> torch.Tensor:
        for known, copy in copies:
            if known is gradient:
                return copy
        value = gradient.value()
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=gradient.device)
        copies.append((gradient, copy.copy_(value)))
        return copy

    plain_args, plain_kwargs = tree_map_only(LandedGradient, materialise, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    changed = _changed(func, args, kwargs)
    for gradient, copy in copies:
        if id(gradient) in changed:
            gradient.writable().copy_(copy)
    # An op that returns what it was given returns the gradient itself, not the copy.
    return tree_map_only(torch.Tensor, lambda t: next((g for g, c in copies if c is t), t), result)


def _expect_there(func: Any, args: Any, kwargs: Any) -> None:
    # torch's fused optimizers write as many elements as a tensor has, whatever is behind them: of one that is expanded,
    # as what stands for a parameter that is away, there is one, and what else they wrote would be somebody else's.
    for value in written_by(func, args, kwargs):
        if isinstance(value, LandedGradient) or not isinstance(value, torch.Tensor):
            continue
        if is_stand_in(value):
            raise ParameterReleased(
                f"{func} would write a parameter while its bytes are not on the device; step the optimizer that "
                f"forebay.prepare() returned, or forebay.close(model) first"
            )


def _changed(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The ``id`` of every landed gradient that ``func`` writes to; one that is only read has not changed."""
    return {id(value) for value in written_by(func, args, kwargs) if isinstance(value, LandedGradient)}


_OWN: Mapping[Any, Callable[[Any, LandedGradient, Any, Any], Any]] = {
    aten.add_.Tensor: _add,
    aten.zero_.default: _zero,
    **dict.fromkeys((*_MULTIPLIES, aten.div_.Tensor, aten.div_.Scalar), _scale),
    **dict.fromkeys((aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim), _norm),
}
"""What is done on the host with the landed bytes themselves: of each op, given as (op, gradient, the other arguments,
keywords), which are those of the op."""

_ALONE: Mapping[Any, Callable[..., Any]] = {
    aten._foreach_zero_.default: torch.Tensor.zero_,
    aten._foreach_mul_.Tensor: torch.Tensor.mul_,
    aten._foreach_mul_.Scalar: torch.Tensor.mul_,
    aten._foreach_norm.Scalar: _norm_of,
}
"""Of ops on lists what they do to each place, where that is done on the host."""
