"""Activation checkpointing that a model of transformers was told to do by itself (``gradient_checkpointing_enable``).

A plan says what runs again, block by block and op by op. Under a plan that knows the activations the model leaves that
to it: the numbers are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from forebay.plans import Plan
from forebay.runtime.pretrained import is_pretrained

__all__ = ["LEFT_TO_THE_PLAN", "as_planned", "leave_to_plan", "left_to"]

LEFT_TO_THE_PLAN = "the model's own activation checkpointing is off: the plan says what runs again"


def leave_to_plan(model: nn.Module) -> Callable[[], None] | None:
    """Switches it off in all of ``model``. Returns what switches it on again where it was on, None where it was not."""
    own: list[Any] = [module for module in model.modules() if is_pretrained(module)]
    found = {m for whole in own for m in whole.modules() if vars(m).get("gradient_checkpointing") is True}
    if not found:
        return None

    def switch(on: bool) -> None:
        for module in found:
            module.gradient_checkpointing = on

    switch(False)
    return lambda: switch(True)


@contextlib.contextmanager
def as_planned(model: nn.Module) -> Iterator[None]:
    """``model`` as it runs under a plan, which is how a step is captured that a plan is made for; as it was at the
    end."""
    switch_on = leave_to_plan(model)
    try:
        yield
    finally:
        if switch_on is not None:
            switch_on()


def left_to(plan: Plan, switch_on: Callable[[], None]) -> Plan:
    """``plan`` for a model whose own checkpointing ``switch_on`` brings back: at once, where the plan does not know the
    activations."""
    if plan.fingerprint:
        return replace(plan, reasons=(*plan.reasons, LEFT_TO_THE_PLAN))
    switch_on()
    return plan
