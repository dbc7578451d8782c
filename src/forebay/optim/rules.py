"""Update rules: what one optimizer step does to some elements, on whatever device they are.

A rule is read from the user's optimizer (``reading``) and applied to parameters or pieces of them. The arithmetic is
that of torch's fused kernels (``aten/src/ATen/native/cpu/FusedAdamKernel.cpp`` and its siblings), which optimizers of
``torch.optim`` call with ``fused=True``. ``arithmetic`` puts forebay's own kernels in their place on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch

from forebay.errors import OptimizerError
from forebay.states import Moments, moment_states, plain_name
from forebay.workspaces import PIECE

__all__ = [
    "AdamRule",
    "ElementRule",
    "Keeping",
    "LionRule",
    "SgdRule",
    "Switch",
    "UpdateRule",
    "WholeRule",
    "for_torch",
]

States = Mapping[str, Sequence[torch.Tensor]]


def for_torch(given: Any) -> Any:
    """A hyperparameter for torch's ops: a float, or a tensor without a dimension where it was one in fp32 (``given`` is
    a number of numpy's then, ``streamed.frozen_group``), which rounds what is made of it to fp32."""
    if isinstance(given, np.float32):
        return torch.tensor(given.item(), dtype=torch.float32, device="cpu")
    return float(given)


@final
@dataclass(frozen=True)
class Keeping:
    """How an optimizer keeps parameters. ``masters``: of those in bf16 fp32 copies are kept; else what a step makes of
    them is rounded up or down by chance. ``orthogonal``: those whose updates it makes orthogonal, by ``id``."""

    masters: bool = True
    orthogonal: frozenset[int] = frozenset()


@final
@dataclass(frozen=True)
class Switch:
    """What asks for a state that not every group has: an ``option`` of the group, by the values that ``on`` is true of.
    ``begins``: an option with which, if it is not 0, the first step so asked makes the state as no later one does."""

    option: str
    on: Callable[[Any], bool] = bool
    begins: str = ""


class UpdateRule(ABC):
    """One optimizer's arithmetic. ``state_names`` are its states, in torch's own names, and how they lie
    (``forebay.states``), of parameters kept as ``keeping`` says. They are those that any group asks for; ``switches``,
    by plain name, are what asks for those that another group may do without. ``settled`` are options of all groups by
    which states are made; ``chooses`` is the one by which a group has its updates made orthogonal. ``restored`` are
    options that have these values when a state dict was loaded, whatever it says."""

    state_names: tuple[str, ...]
    keeping: Keeping = Keeping()
    switches: Mapping[str, Switch] = MappingProxyType({})
    settled: Mapping[str, object] = MappingProxyType({})
    chooses: str = ""
    restored: Mapping[str, object] = MappingProxyType({})

    @final
    @classmethod
    def asks(cls, state: str, group: Mapping[str, Any]) -> bool:
        """Whether a step with the hyperparameters ``group`` reads and writes ``state``."""
        switch = cls.switches.get(plain_name(state))
        return switch is None or switch.on(group.get(switch.option))

    @final
    def missing(self, group: Mapping[str, Any], began: Mapping[str, Any]) -> str:
        """Which option of ``group`` asks for a state that is not there, in words; ``""`` for none. ``began`` are the
        hyperparameters that the group had when it got its states."""
        kept = set(map(plain_name, self.state_names))
        for state, switch in self.switches.items():
            if not self.asks(state, group):
                continue
            found = f"{switch.option} is {group[switch.option]} in a parameter group"
            if state not in kept:
                return f"{found}, and there is no {state} for it"
            if group.get(switch.begins) and not self.asks(state, began):
                return f"{found} that began without it, and with {switch.begins} it cannot begin later"
        return ""

    @final
    def unlike(self, group: Mapping[str, Any]) -> str:
        """Which option of ``group`` is not the one by which the states of its parameters were made, in words; ``""``
        for none."""
        for option, made in self.settled.items():
            if group.get(option, made) != made:
                return f"{option} is {group[option]!r} in a parameter group whose states are made for {made!r}"
        asked = bool(group.get(self.chooses, True))
        if self.chooses and any((id(p) in self.keeping.orthogonal) != asked for p in group["params"]):
            return f"{self.chooses} is {asked} in a parameter group whose states are made for {not asked}"
        return ""

    @final
    def loaded(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """``group`` with the options ``saved`` in a state dict. Its states stay made as they are, and are those of its
        own parameters."""
        return {**group, **{k: v for k, v in saved.items() if k != "params" and k not in self.settled}, **self.restored}


class ElementRule(UpdateRule):
    """Looks at each element, or block of elements, by itself."""

    @abstractmethod
    def update(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: States,
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        """Updates ``parameters`` and ``states`` in place.

        All lists run in parallel and hold tensors of the same dtype. ``states`` are fp32, by plain name. ``step``
        counts from 1; ``group`` are the hyperparameters of the parameter group at the time of the step.
        """


class WholeRule(UpdateRule):
    """Looks at a whole parameter before it changes an element."""

    @abstractmethod
    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
        room: Callable[[int], torch.Tensor],
    ) -> None:
        """Updates ``parameter`` (of its shape, with one element or more) and its ``states`` in place, all of them fp32.

        ``states`` are those that it has, by plain name. ``room`` gives memory for so many fp32 values, one after the
        other: for as many as ``parameter`` has, and for one for each of its rows and columns.
        """


@final
class AdamRule(ElementRule):
    """Adam (Kingma and Ba, 2015, algorithm 1) and AdamW (Loshchilov and Hutter, 2019, algorithm 2). ``decoupled`` says
    that it is the latter; None: each group does, at each step, as in ``torch.optim``.

    Raises ``OptimizerError`` for amsgrad with moments of few bits: their largest would be that of their roundings.
    """

    switches = MappingProxyType({"max_exp_avg_sq": Switch("amsgrad")})

    def __init__(
        self,
        *,
        decoupled: bool | None,
        amsgrad: bool,
        moments: Moments = "float32",
        masters: bool = True,
        restored: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        if amsgrad and moments in ("8bit", "4bit"):
            raise OptimizerError(f"amsgrad keeps no moments as {moments}; set amsgrad=False, or moments='bfloat16'")
        self.moments = moments
        self.keeping = Keeping(masters=masters)
        self.settled = {"moments": moments, "stochastic_rounding": not masters}
        self.restored = restored
        self._decoupled = decoupled
        self._amsgrad = amsgrad
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        self.state_names = moment_states(names, moments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _adam_rule, (self._decoupled, self._amsgrad, self.moments, self.keeping.masters)

    def decouples(self, group: Mapping[str, Any]) -> bool:
        """Whether a step with the hyperparameters ``group`` is AdamW's."""
        return bool(group["decoupled_weight_decay"]) if self._decoupled is None else self._decoupled

    def update(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: States,
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        amsgrad = bool(group["amsgrad"])
        device = parameters[0].device
        kernel = torch._fused_adamw_ if self.decouples(group) else torch._fused_adam_
        kernel(
            list(parameters),
            list(gradients),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            list(states["max_exp_avg_sq"]) if amsgrad else [],
            # One tensor for all: the kernel only reads it, and on a GPU each one would be a copy of its own.
            [torch.full((), float(step), dtype=torch.float32, device=device)] * len(parameters),
            amsgrad=amsgrad,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
        )


def _adam_rule(decoupled: bool | None, amsgrad: bool, moments: Moments, masters: bool) -> AdamRule:
    return AdamRule(decoupled=decoupled, amsgrad=amsgrad, moments=moments, masters=masters)


@final
class SgdRule(ElementRule):
    """SGD with momentum as in ``torch.optim.SGD``."""

    # torch begins the momentum as the gradient, without dampening, when a step first asks for it; here step 1 does.
    switches = MappingProxyType({"momentum_buffer": Switch("momentum", begins="dampening")})

    def __init__(self, *, momentum: bool) -> None:
        self.state_names = ("momentum_buffer",) if momentum else ()

    def update(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: States,
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        momentum = float(group["momentum"])
        torch._fused_sgd_(
            list(parameters),
            list(gradients),
            list(states["momentum_buffer"]) if momentum != 0 else [],
            weight_decay=float(group["weight_decay"]),
            momentum=momentum,
            lr=float(group["lr"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            is_first_step=step == 1 and momentum != 0,
        )


@final
class LionRule(ElementRule):
    """Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms", algorithm 2), each operation rounded by
    itself in the order of the paper; a piece of ``PIECE`` elements at a time, in new memory for two numbers of each."""

    state_names = ("exp_avg",)

    def __init__(self, *, masters: bool = True) -> None:
        self.keeping = Keeping(masters=masters)
        self.settled = {"stochastic_rounding": not masters}

    def update(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: States,
        step: int,
        group: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        for whole in zip(parameters, gradients, states["exp_avg"], strict=True):
            for parameter, gradient, average in zip(*(tensor.split(PIECE) for tensor in whole), strict=True):
                direction, other = average * beta1, gradient * (1 - beta1)
                torch.sign(direction.add_(other), out=other)
                # torch's sign of NaN is 0: what is added says so.
                parameter.mul_(1 - lr * decay).sub_(other.mul_(lr).add_(direction.mul_(0)))
                average.mul_(beta2).add_(torch.mul(gradient, 1 - beta2, out=other))
                del direction, other  # before those of the next piece are made
