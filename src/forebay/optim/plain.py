"""Optimizers of torch that are one op after the other on a CPU: RMSprop, Adagrad, Adadelta, Adamax. An update calls
torch's own function (``foreach=False``, which is torch's default there; Adagrad fused, if it was made so) for a piece
of a parameter at a time, so that what the ops make in between is small, and on a CPU in its caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adamax import adamax
from torch.optim.rmsprop import rmsprop

from forebay.optim.rules import ElementRule, States, Switch, for_torch
from forebay.workspaces import PIECE

__all__ = ["PlainRule", "rmsprop_rule"]

CACHED: Final = 1 << 18
"""Elements of a piece on a CPU. So an update of 16M takes 2 to 4.3 times as long as AdamW's kernel, two threads of a
Xeon; all at once, and in pieces of 1M, 4.3 to 12 times (docs/log.md, 2026-11-30)."""


@final
@dataclass(frozen=True)
class _Function:
    """One of torch's: what it is called with behind parameters and gradients. ``states`` in its order, by their names
    in a ``state_dict``, then the hyperparameters ``numbers`` and ``flags``."""

    of_torch: Callable[..., None]
    states: tuple[str, ...]
    numbers: tuple[str, ...]
    flags: tuple[str, ...] = ("maximize",)


_FUNCTIONS: Final[Mapping[str, _Function]] = MappingProxyType(
    {
        "rmsprop": _Function(
            rmsprop,
            ("square_avg", "grad_avg", "momentum_buffer"),
            ("lr", "alpha", "eps", "weight_decay", "momentum"),
            ("centered", "maximize"),
        ),
        "adagrad": _Function(adagrad, ("sum",), ("lr", "lr_decay", "eps", "weight_decay"), ("maximize", "fused")),
        "adadelta": _Function(adadelta, ("square_avg", "acc_delta"), ("lr", "rho", "eps", "weight_decay")),
        "adamax": _Function(adamax, ("exp_avg", "exp_inf"), ("lr", "betas", "eps", "weight_decay")),
    }
)


@final
class PlainRule(ElementRule):
    """RMSprop (Hinton, "Neural networks for machine learning", lecture 6e), Adagrad (Duchi, Hazan and Singer, 2011,
    figure 1), Adadelta (Zeiler, 2012, algorithm 1) or Adamax (Kingma and Ba, 2015, algorithm 2), as in ``torch.optim``.

    ``name`` is which, in lower case; ``state_names`` are those of its states that there are (default: all). In front of
    the first step the first of them has the value ``begins`` everywhere, and all others are zeros.
    """

    # Of RMSprop alone: the others have no states of these names.
    switches = MappingProxyType({"grad_avg": Switch("centered"), "momentum_buffer": Switch("momentum")})

    def __init__(self, name: str, state_names: tuple[str, ...] = (), *, begins: float = 0.0) -> None:
        self._name = name
        self._begins = begins
        self.state_names = state_names or _FUNCTIONS[name].states

    def update(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: States,
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        function = _FUNCTIONS[self._name]
        options = _hyperparameters(function, group, parameters[0].device)
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            own = {name: states[name][number] for name in self.state_names}
            if step == 1 and self._begins:
                own[function.states[0]].fill_(self._begins)
            for given, made, *held in _pieces((parameter, gradient, *own.values())):
                lists = {name: [state] for name, state in zip(own, held, strict=True)}
                in_order = [lists.get(name, []) for name in function.states]
                # The function counts the step itself.
                before = torch.full((), float(step - 1), dtype=torch.float32, device="cpu")
                function.of_torch([given], [made], *in_order, [before], foreach=False, **options)


def rmsprop_rule(groups: Iterable[Mapping[str, Any]]) -> PlainRule:
    """RMSprop with the states that any of ``groups`` asks for."""
    groups, states = list(groups), _FUNCTIONS["rmsprop"].states
    return PlainRule("rmsprop", tuple(name for name in states if any(PlainRule.asks(name, group) for group in groups)))


def _hyperparameters(function: _Function, group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    numbers = {name: group[name] for name in function.numbers}
    for place, beta in enumerate(numbers.pop("betas", ())):
        numbers[f"beta{place + 1}"] = beta
    flags = {name: bool(group[name]) for name in function.flags}
    if "fused" in flags:  # of Adagrad, which torch fuses for a CPU only
        flags["fused"] &= device.type == "cpu"
    return {name: for_torch(value) for name, value in numbers.items()} | flags


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    size = CACHED if tensors[0].device.type == "cpu" else PIECE
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)
