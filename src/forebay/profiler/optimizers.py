"""What an optimizer keeps, given as one or by its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from forebay.arguments import expect
from forebay.errors import OptimizerError
from forebay.optim.muon import muon_groups
from forebay.optim.reading import name_of, read_optimizer
from forebay.optim.rules import Keeping
from forebay.states import DRAWN, MUON, OF_FOREBAY, Reach, reach_of

__all__ = ["STATES", "optimizer_kept"]

STATES: Mapping[str, tuple[str, ...]] = {
    **OF_FOREBAY,
    **{f"{name}{DRAWN}": states for name, states in OF_FOREBAY.items()},
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw-amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adam-amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
    "rmsprop": ("square_avg",),
    "rmsprop-momentum": ("square_avg", "momentum_buffer"),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "adamax": ("exp_avg", "exp_inf"),
    "muon": MUON,
}
"""The states of each optimizer that goes by name, in torch's own names (``optim/rules.py``) with how they
lie."""


def optimizer_kept(optimizer: str | torch.optim.Optimizer, model: nn.Module) -> tuple[str, tuple[str, ...], Keeping]:
    """Its name, its states, and how it keeps the parameters of ``model``."""
    if isinstance(optimizer, torch.optim.Optimizer):
        rule = read_optimizer(optimizer)
        return name_of(optimizer), rule.state_names, rule.keeping
    expect("optimizer", optimizer, str, "the name of one, such as 'adamw', or a torch.optim.Optimizer")
    name = optimizer.lower()
    if name not in STATES:
        raise OptimizerError(f"optimizer {optimizer!r} is not known; use one of {', '.join(STATES)}")
    matrices = muon_groups(model)[0]["params"] if reach_of(STATES[name]) is Reach.MATRICES else ()
    keeping = Keeping(masters=not name.endswith(DRAWN), orthogonal=frozenset(map(id, matrices)))
    return name.removesuffix(DRAWN), STATES[name], keeping
