"""Optimizers beside the prepared one: what they write would never reach a parameter whose bytes are elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from forebay.errors import ParameterReleased
from forebay.optim.streamed import StreamedOptimizer
from forebay.runtime.standins import is_stand_in

__all__ = ["refuse_other_steps"]


def refuse_other_steps(names: Mapping[int, str], source: torch.optim.Optimizer) -> Callable[[], None]:
    """Has every optimizer but a prepared one raise ``ParameterReleased`` in place of a step over a parameter of
    ``names`` (by ``id``) that has a gradient, and whose bytes are not on the device. ``source``, which was given to
    prepare, refuses its steps by itself, with more to say (``refuse_steps``). Returns what ends that.

    Without it such a step ends in torch's words, of memory that several elements share. What has a prepared optimizer
    inside is left alone: it steps that.
    """
    given = weakref.ref(source)  # which has the parameters, and torch keeps this function for the whole process

    def refuse(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer is given():
            return
        if any(isinstance(one, StreamedOptimizer) for one in (optimizer, *vars(optimizer).values())):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or id(parameter) not in names or not is_stand_in(parameter):
                    continue
                raise ParameterReleased(
                    f"this {type(optimizer).__name__} would write parameter {names[id(parameter)]} of a prepared model "
                    f"while its bytes are not on the device; step the optimizer that forebay.prepare() returned (with "
                    f"all that is trained in groups of it), or forebay.close(model) first"
                )

    return register_optimizer_step_pre_hook(refuse).remove
