"""A model as it is in training, where nobody has said so yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from forebay.runtime.pretrained import is_pretrained

__all__ = ["as_trained"]


@contextmanager
def as_trained(model: nn.Module) -> Iterator[None]:
    """Inside, gradients are on, ``model`` is in training mode, and so is what it was built around that
    ``from_pretrained`` of transformers leaves in evaluation mode (by adapters, or a class of the user's); after it
    every module is in the mode in which it was. Other parts of a model in training mode that are not (a frozen batch
    norm, say) stay as they are.

    ``model.train()`` comes before the plan or after it, and what dropout keeps has to be in the plan.
    """
    left = list(_left_in_evaluation(model))
    modes = [(module, module.training) for one in left for module in one.modules()]
    try:
        for one in left:
            one.train()
        # Around the loop they are on, whatever they are around ``prepare`` (a function under ``torch.no_grad()``, say).
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _left_in_evaluation(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` itself, or the outermost models of transformers in it, where they are in evaluation mode."""
    if not module.training:
        yield module
        return
    yield from _pretrained(module)


def _pretrained(module: nn.Module) -> Iterator[nn.Module]:
    if is_pretrained(module):
        if not module.training:
            yield module
        return
    for child in module.children():
        yield from _pretrained(child)
