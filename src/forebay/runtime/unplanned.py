"""What a pass is that its plan was not made for: said where the device has no room for it.

A plan is for one forward of one batch before each backward. A run may do something else, and mostly that fits; where it
does not, what is to be changed is seldom the batch: a plan for it may keep to the budget.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path

from forebay.runtime.passes import argument_name

__all__ = ["DIFFERENTIATED", "Unplanned"]

MOST: Final = 2
"""Arguments that are named."""

LONGEST: Final = 40
"""Characters of a value that is shown."""


IN_EVALUATION: Final = (
    "the plan was made for training mode, and the model is in evaluation mode, in which its loss is of all logits at "
    "once and other things may be kept: call model.train() before forward, or run it under torch.no_grad()"
)

BESIDE: Final = (
    "the plan has room for this forward and its backward; where the loop keeps or makes something on the device beside "
    "them (another model, copies of gradients, what a backward with retain_graph=True leaves), leave room for it with "
    "device_reserve"
)


DIFFERENTIATED: Final = (
    "backward with create_graph=True keeps what it makes for a second derivative, which a plan counts where prepare() "
    "is given a loss_fn that makes both"
)


BY_LOSS: Final = (
    "the plan has room for what loss_fn made of the batch that prepare() was given, and its backward: give prepare() "
    "the batch that takes the most and a loss_fn that does what the loop does, or leave room for what it does beside "
    "that with device_reserve"
)


@final
class Unplanned:
    """Knows what the plan was made for: ``forward`` called with ``args`` and ``kwargs``, of which it knows the
    ``activations`` or not; or, ``by_loss``, whatever a loss function made of them."""

    def __init__(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        *,
        activations: bool = True,
        by_loss: bool = False,
    ) -> None:
        self._activations = activations
        self._by_loss = by_loss
        self._places = tuple(_places(forward))
        given = dict(self._given(args, kwargs))
        self._planned = {name: _described(value) for name, value in given.items()}
        # Where a mask says that nothing is padded models do without, and one that they need takes memory.
        self._unpadded = {name for name, value in given.items() if _leaves_out(value) is False}

    def remark(self, args: Any, kwargs: Mapping[str, Any], waiting: int, *, evaluates: bool) -> str:
        """What a forward that is called with ``args`` and ``kwargs`` asks for that was not planned, and what to change;
        ``waiting`` forwards before it have no backward yet, and ``evaluates`` says that it has gradients and the model
        is in evaluation mode. If it is no more than was planned, what else there may be; nothing where the plan does
        not know."""
        if self._by_loss and (waiting or not self._is_of_the_batch(args, kwargs)):
            return BY_LOSS
        if waiting:
            return (
                f"the plan was made for one forward before each backward, and this is number {waiting + 1}: give "
                f"prepare() a loss_fn that makes all of them, or leave room for the others with device_reserve"
            )
        found = list(islice(self._beyond(args, kwargs), MOST))
        if not found:
            if evaluates:
                return IN_EVALUATION
            return BESIDE if self._activations else ""
        now, then = (", ".join(said) for said in zip(*found, strict=True))
        return f"this forward has {now}, and the plan was made for {then}: give prepare() the batch that takes the most"

    def _is_of_the_batch(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether a forward is called with what is in the batch, by its names."""
        return all(name in self._planned for name, _ in self._given(args, kwargs))

    def _beyond(self, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """What a forward is called with that may take more memory than what was planned, and what that was."""
        for name, value in self._given(args, kwargs):
            now, then = _described(value), self._planned.get(name)
            if _is_more(then, now):
                yield f"{name} {_shown(now)}", f"no {name}" if then is None else f"{name} {_shown(then)}"
            elif name in self._unpadded and _leaves_out(value):
                yield f"{name} with padding", f"{name} without"

    def _given(self, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What a forward is called with, by name where it has one, else by place."""
        beyond = map(str, range(len(self._places), len(args)))
        named = dict(zip((*self._places, *beyond), args, strict=False)) | dict(kwargs)
        for path, leaf in tree_flatten_with_path(((), named))[0]:
            yield argument_name(path), leaf


def _places(forward: Callable[..., Any]) -> Iterator[str]:
    """The names of what ``forward`` takes by place."""
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return
        yield parameter.name


def _described(value: Any) -> Any:
    """The shape of a tensor, and other values as they are shown."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)


def _leaves_out(value: Any) -> bool | None:
    """Whether ``value`` is a mask that leaves something out. None: it is no mask, or nobody knows, as of one on another
    device, which would be waited for."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel():
        return None
    if value.is_floating_point() or value.is_complex():
        return None
    # No op of the user's step: counted as one, it could itself be what there is no room for.
    with _disable_current_modes():
        if value.dtype is torch.bool:
            return bool(value.any()) and not bool(value.all())
        ones = value == 1
        if bool(ones.all()):
            return False
        return True if bool((ones | (value == 0)).all()) else None


def _is_more(then: Any, now: Any) -> bool:
    """Whether ``now`` may take more memory than ``then`` (None: it was not there)."""
    if isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        return any(more > planned for more, planned in zip(now, then, strict=True))
    return bool(now != then)


def _shown(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."
