"""What a pass is that its plan was not made for: said where the device has no room for it.

A plan is for one forward of one batch before each backward. A run may do something else, and mostly that fits; where it
does not, what is to be changed is seldom the batch: a plan for it may keep to the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, final

import torch
from torch.utils._pytree import tree_flatten_with_path

from forebay.runtime.passes import argument_name

__all__ = ["Unplanned"]

MOST: Final = 2
"""Arguments that are named."""

LONGEST: Final = 40
"""Characters of a value that is shown."""


IN_EVALUATION: Final = (
    "the plan was made for training mode, and the model is in evaluation mode, in which its loss is of all logits at "
    "once and other things may be kept: call model.train() before forward, or run it under torch.no_grad()"
)


@final
class Unplanned:
    """Knows what the plan was made for: a forward called with ``args`` and ``kwargs``."""

    def __init__(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._planned = _described(args, kwargs)

    def remark(self, args: Any, kwargs: Mapping[str, Any], waiting: int, *, evaluates: bool) -> str:
        """What a forward that is called with ``args`` and ``kwargs`` asks for that was not planned, and what to change;
        ``waiting`` forwards before it have no backward yet, and ``evaluates`` says that it has gradients and the model
        is in evaluation mode. Nothing if it is no more than was planned."""
        if waiting:
            return (
                f"the plan was made for one forward before each backward, and this is number {waiting + 1}: prepare a "
                f"module whose forward is all of them"
            )
        found = {name: now for name, now in _described(args, kwargs).items() if _is_more(self._planned.get(name), now)}
        if not found:
            return IN_EVALUATION if evaluates else ""
        now = ", ".join(f"{name} {_shown(value)}" for name, value in islice(found.items(), MOST))
        then = ", ".join(
            f"{name} {_shown(self._planned[name])}" if name in self._planned else f"no {name}"
            for name in islice(found, MOST)
        )
        return f"this forward has {now}, and the plan was made for {then}: give prepare() the batch that takes the most"


def _described(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of tensors, and other values as they are, by name or place."""
    found: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path((args, dict(kwargs)))[0]:
        found[argument_name(path)] = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf)
    return found


def _is_more(then: Any, now: Any) -> bool:
    """Whether ``now`` may take more memory than ``then`` (None: it was not there)."""
    if isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        return any(more > planned for more, planned in zip(now, then, strict=True))
    return bool(now != then)


def _shown(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."
