"""Which update rule a user's optimizer stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from forebay.errors import OptimizerError
from forebay.optim.factored import CameRule, TorchAdafactorRule, TransformersAdafactorRule
from forebay.optim.orthogonal import MuonRule
from forebay.optim.plain import PlainRule, rmsprop_rule
from forebay.optim.rules import AdamRule, SgdRule, UpdateRule

__all__ = ["RuledOptimizer", "name_of", "read_optimizer"]

_Reader = Callable[[torch.optim.Optimizer], UpdateRule]


def _adam(optimizer: torch.optim.Optimizer) -> AdamRule:
    # As torch's AdamW has it, which reads the states of an Adam, too.
    restored = {"decoupled_weight_decay": True} if type(optimizer) is torch.optim.AdamW else {}
    return AdamRule(decoupled=None, amsgrad=_any_asks(AdamRule, "max_exp_avg_sq", optimizer), restored=restored)


def _any_asks(rule: type[UpdateRule], state: str, optimizer: torch.optim.Optimizer) -> bool:
    return any(rule.asks(state, group) for group in optimizer.param_groups)


_OF_TORCH: Final[Mapping[type[torch.optim.Optimizer], _Reader]] = MappingProxyType(
    {
        torch.optim.AdamW: _adam,
        torch.optim.Adam: _adam,
        torch.optim.SGD: lambda made: SgdRule(momentum=_any_asks(SgdRule, "momentum_buffer", made)),
        torch.optim.RMSprop: lambda made: rmsprop_rule(made.param_groups),
        # torch gives all states this value when it is made, whatever a group says.
        torch.optim.Adagrad: lambda made: PlainRule("adagrad", begins=made.defaults["initial_accumulator_value"]),
        torch.optim.Adadelta: lambda made: PlainRule("adadelta"),
        torch.optim.Adamax: lambda made: PlainRule("adamax"),
        torch.optim.Adafactor: lambda made: TorchAdafactorRule(),
        torch.optim.Muon: lambda made: MuonRule(id(p) for group in made.param_groups for p in group["params"]),
    }
)
"""By its class, no subclasses: these may compute something else."""

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
    """The rule of one of torch's optimizers (``_OF_TORCH``), of ``transformers.Adafactor``, of ``came_pytorch.CAME``,
    or of an optimizer of ``forebay.optim``.

    Raises ``OptimizerError`` for any other class (a subclass may compute something else) and for options that
    forebay does not run.
    """
    groups, kind = optimizer.param_groups, type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not (isinstance(optimizer, RuledOptimizer) or kind in _OF_TORCH or name in (_OF_TRANSFORMERS, _CAME)):
        *most, last = (one.__name__ for one in _OF_TORCH)
        raise OptimizerError(
            f"{name} is not an optimizer that forebay runs; use {', '.join(most)} or {last} of torch.optim, AdamW, "
            f"Lion, Adafactor or Muon of forebay.optim, Adafactor of transformers, or CAME of came_pytorch"
        )
    # Adagrad makes its states before it takes a step.
    if any(state.get("step", 1) > 0 for state in optimizer.state.values()):
        raise OptimizerError(
            "the optimizer has taken steps already; prepare it before the first step, or load its state_dict() into "
            "the prepared optimizer"
        )
    if isinstance(optimizer, RuledOptimizer):
        return optimizer.rule
    if name == _OF_TRANSFORMERS:
        return TransformersAdafactorRule(momentum=_any_asks(TransformersAdafactorRule, "exp_avg", optimizer))
    if name == _CAME:
        return CameRule()
    if any(group.get("differentiable") for group in groups):
        raise OptimizerError("differentiable=True keeps the whole history of the parameters; set it to False")
    return _OF_TORCH[kind](optimizer)
