"""What a run of a model under fake tensors leaves in its modules' attributes, taken back.

A forward may do more than compute: count its calls, append a loss to a list, keep a mask that it has made for the next
time. Under fake tensors the counts would be wrong from then on, and the lists and masks have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from forebay.runtime.inside import Content, attributes_of, look_inside

__all__ = ["Attributes", "Held", "attributes_put_back"]


@final
class Attributes:
    """The attributes of all modules of a model as they are now, with what is ``inside`` of them."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        # Torch's own among them: hooks are put on meanwhile, and parameters are others.
        own = (
            values for m in modules for values in (m.__dict__, *m.__dict__.values()) if isinstance(values, dict | set)
        )
        # A recording runs backward too. A block that runs again does not, so ``attributes_of`` leaves its hooks out.
        met = (value for m in modules for value in (*attributes_of(m), *_hooks_of_backward(m)))
        inside = look_inside(met).containers
        self._contents = [Content.of(one) for one in {id(one): one for one in (*own, *inside)}.values()]

    def are_changed(self) -> bool:
        """Whether one of them is another object."""
        return any(content.is_changed() for content in self._contents)

    def put_back(self) -> None:
        """All are the same objects as before. What did not change is not touched."""
        for content in self._contents:
            if content.is_changed():
                content.put_back()


def _hooks_of_backward(module: nn.Module) -> Iterator[Any]:
    yield from module._backward_pre_hooks.values()
    yield from module._backward_hooks.values()


@final
class Held:
    """The tensors that a module and those in it have now, as attributes or buffers; no parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._by_place = [
            (values, name, value)
            for one in module.modules()
            for values in (one.__dict__, one._buffers)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        ]

    def replaced(self) -> Iterator[torch.Tensor]:
        """Those in whose place something else is."""
        return (value for values, name, value in self._by_place if values.get(name) is not value)


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the ``Attributes`` of ``model`` are afterwards what they were."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.put_back()
