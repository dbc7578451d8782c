"""Which kernel does what a rule says, and with which numbers. Imports numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from forebay.kernels import adam, adam_low, lion, sgd
from forebay.kernels.native import Apart, Form, Kept
from forebay.optim.rules import AdamRule, LionRule, SgdRule
from forebay.states import plain_name

__all__ = ["FORMS", "Alike", "Choose", "Launch", "chooser_of", "left_alone"]


class Alike(NamedTuple):
    """What the rows of one call have in common: the forms of parameters and gradients, what is written apart, and how
    what becomes of a parameter is kept."""

    parameter: Form
    gradient: Form
    apart: Apart
    kept: Kept


Launch = Callable[[Any, int, int], float]
"""A kernel for given hyperparameters: called with rows, the counter from which it takes shares, and their number. A
counter of 0 and 1 share: all of it."""

Choose = Callable[[Alike, int, Mapping[str, Any]], Launch]
"""The kernel for what its rows have in common, a step and a group."""


FORMS: Final = MappingProxyType({torch.float32: Form.FP32, torch.bfloat16: Form.BF16, torch.float16: Form.FP16})
"""How values of a dtype lie, for those that kernels read."""


def chooser_of(rule: AdamRule | LionRule | SgdRule) -> tuple[Choose, tuple[str, ...]]:
    """What chooses the kernels of ``rule``, and the columns of their rows."""
    if isinstance(rule, SgdRule):
        return _choose_sgd, sgd.COLUMNS
    if isinstance(rule, LionRule):
        return _choose_lion, lion.COLUMNS
    if rule.moments in ("8bit", "4bit"):
        return _adam_low_chooser(rule), adam_low.COLUMNS
    return _adam_chooser(rule), adam.COLUMNS


def left_alone(rule: AdamRule | LionRule | SgdRule, group: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Which of the rule's states a step with the hyperparameters ``group`` neither reads nor writes: those that only
    other groups of the optimizer ask for. None: which there are for any group."""
    states = enumerate(rule.state_names)
    if group is None:
        return tuple(number for number, state in states if plain_name(state) in rule.switches)
    return tuple(number for number, state in states if not rule.asks(state, group))


def _adam_numbers(rule: AdamRule, step: int, group: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether the decay is part of the gradient, and the scalars of a step."""
    decay = float(group["weight_decay"])
    coupled = not rule.decouples(group) and decay != 0
    beta1, beta2 = group["betas"]
    scalars = adam.adam_scalars(
        step,
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        decay,
        coupled=coupled,
        maximize=bool(group["maximize"]),
    )
    return coupled, scalars


def _adam_chooser(rule: AdamRule) -> Choose:
    state = Form.BF16 if rule.moments == "bfloat16" else Form.FP32

    def choose(alike: Alike, step: int, group: Mapping[str, Any]) -> Launch:
        coupled, scalars = _adam_numbers(rule, step, group)
        kernel = adam.adam_kernel(
            alike.parameter,
            alike.gradient,
            coupled=coupled,
            amsgrad=bool(group["amsgrad"]),
            state=state,
            apart=alike.apart,
            kept=alike.kept,
        )
        # The step is the seed: where numbers are rounded by chance, every step draws anew.
        return lambda rows, counter, shares: kernel(rows, 0, shares, counter, scalars, step)

    return choose


def _adam_low_chooser(rule: AdamRule) -> Choose:
    bits = 8 if rule.moments == "8bit" else 4
    book = adam_low.codebook(bits)

    def choose(alike: Alike, step: int, group: Mapping[str, Any]) -> Launch:
        coupled, scalars = _adam_numbers(rule, step, group)
        forms = alike.parameter, alike.gradient, bits
        kernel = adam_low.adam_low_kernel(*forms, coupled=coupled, apart=alike.apart, kept=alike.kept)
        return lambda rows, counter, shares: kernel(rows, 0, shares, counter, scalars, book, step)

    return choose


def _choose_lion(alike: Alike, step: int, group: Mapping[str, Any]) -> Launch:
    beta1, beta2 = group["betas"]
    kernel = lion.lion_kernel(alike.parameter, alike.gradient, apart=alike.apart, kept=alike.kept)
    scalars = lion.lion_scalars(float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"]))
    return lambda rows, counter, shares: kernel(rows, 0, shares, counter, scalars, step)


def _choose_sgd(alike: Alike, step: int, group: Mapping[str, Any]) -> Launch:
    decay, momentum = float(group["weight_decay"]), float(group["momentum"])
    kernel = sgd.sgd_kernel(
        alike.parameter,
        alike.gradient,
        decay=decay != 0,
        momentum=momentum != 0,
        nesterov=bool(group["nesterov"]),
        apart=alike.apart,
    )
    scalars = sgd.sgd_scalars(
        float(group["lr"]),
        momentum,
        float(group["dampening"]),
        decay,
        first=step == 1,
        maximize=bool(group["maximize"]),
    )
    return lambda rows, counter, shares: kernel(rows, 0, shares, counter, scalars)
