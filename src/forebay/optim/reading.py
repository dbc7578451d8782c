"""Which update rule a user's optimizer stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch

from forebay.errors import OptimizerError
from forebay.optim.factored import CameRule, TorchAdafactorRule, TransformersAdafactorRule
from forebay.optim.orthogonal import MuonRule
from forebay.optim.rules import AdamRule, SgdRule, UpdateRule

__all__ = ["RuledOptimizer", "name_of", "read_optimizer"]

_OF_TORCH: Final = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor, torch.optim.Muon)

_OF_TRANSFORMERS: Final = "transformers.optimization.Adafactor"
_CAME: Final = "came_pytorch.CAME.CAME"
"""By their names: what has them is not imported for it."""


class RuledOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of forebay's own, which steps by a rule wherever it is."""

    @property
    @abstractmethod
    def rule(self) -> UpdateRule:
        """What a step does. Raises ``OptimizerError`` where groups ask for what no rule does."""


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """What a trace calls it: its class, and of Adafactor, of which there are several, whose it is if not forebay's."""
    kind = type(optimizer)
    name, package = kind.__name__.lower(), kind.__module__.partition(".")[0]
    return f"{name}-{package}" if name == "adafactor" and package != "forebay" else name


def read_optimizer(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """The rule of an ordinary ``torch.optim.AdamW``, ``Adam``, ``SGD``, ``Adafactor`` or ``Muon``, of
    ``transformers.Adafactor``, of ``came_pytorch.CAME``, or of an optimizer of ``forebay.optim``.

    Raises ``OptimizerError`` for any other class (a subclass may compute something else) and for options that
    forebay does not run.
    """
    groups, kind = optimizer.param_groups, type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not (isinstance(optimizer, RuledOptimizer) or kind in _OF_TORCH or name in (_OF_TRANSFORMERS, _CAME)):
        raise OptimizerError(
            f"{name} is not an optimizer that forebay runs; use AdamW, Adam, SGD, Adafactor or Muon of torch.optim, "
            f"AdamW, Lion, Adafactor or Muon of forebay.optim, Adafactor of transformers, or CAME of came_pytorch"
        )
    if optimizer.state:
        raise OptimizerError(
            "the optimizer has taken steps already; prepare it before the first step, or load its state_dict() into "
            "the prepared optimizer"
        )
    if isinstance(optimizer, RuledOptimizer):
        return optimizer.rule
    if name == _OF_TRANSFORMERS:
        return TransformersAdafactorRule(momentum=any(group["beta1"] is not None for group in groups))
    if name == _CAME:
        return CameRule()
    if any(group.get("differentiable") for group in groups):
        raise OptimizerError("differentiable=True keeps the whole history of the parameters; set it to False")
    if kind is torch.optim.Adafactor:
        return TorchAdafactorRule()
    if kind is torch.optim.Muon:
        return MuonRule(id(p) for group in groups for p in group["params"])
    if kind is torch.optim.SGD:
        return SgdRule(momentum=any(group["momentum"] != 0 for group in groups))
    decoupled = {bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)) for group in groups}
    if len(decoupled) > 1:
        raise OptimizerError("decoupled_weight_decay differs between parameter groups; make it the same in all")
    return AdamRule(decoupled=decoupled.pop(), amsgrad=any(group["amsgrad"] for group in groups))
