"""A model as it is in training, where nobody has said so yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["as_trained"]


@contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in training mode; after it every module is in the mode in which it was. Where the model is
    in training mode already, modules of it that are not (a frozen batch norm, say) stay as they are.

    ``from_pretrained`` leaves models in evaluation mode, and ``model.train()`` comes before the plan or after it. What
    dropout keeps has to be in the plan.
    """
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        yield
    finally:
        for module, training in modes:
            module.training = training
