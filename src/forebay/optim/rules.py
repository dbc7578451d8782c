"""Update rules: what one optimizer step does to some elements, on whatever device they are.

A rule is read from the user's optimizer, one of ``torch.optim`` or of forebay's own, and applied to pieces of
parameters. The arithmetic is that
of torch's fused kernels (``aten/src/ATen/native/cpu/FusedAdamKernel.cpp`` and its siblings), which the optimizers of
``torch.optim`` call with ``fused=True``. ``arithmetic`` puts forebay's own kernels in their place on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from forebay.errors import OptimizerError
from forebay.states import Moments, moment_states

__all__ = ["AdamRule", "LionRule", "RuledOptimizer", "SgdRule", "UpdateRule", "read_optimizer"]

States = Mapping[str, Sequence[torch.Tensor]]


class UpdateRule(ABC):
    """One optimizer's arithmetic. ``state_names`` are its states, in torch's own names, and how they lie
    (``forebay.states``)."""

    state_names: tuple[str, ...]

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


@final
class AdamRule(UpdateRule):
    """Adam (Kingma and Ba, 2015, algorithm 1) and AdamW (Loshchilov and Hutter, 2019, algorithm 2).

    Raises ``OptimizerError`` for amsgrad with moments of few bits: their largest would be that of their roundings.
    """

    def __init__(self, *, decoupled: bool, amsgrad: bool, moments: Moments = "float32") -> None:
        if amsgrad and moments in ("8bit", "4bit"):
            raise OptimizerError(f"amsgrad keeps no moments as {moments}; set amsgrad=False, or moments='bfloat16'")
        self.decoupled = decoupled
        self.moments = moments
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self._amsgrad = amsgrad
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        self.state_names = moment_states(names, moments)

    def __reduce__(self) -> tuple[Any, ...]:
        # The kernel is torch's and is found again by its name where the rule is needed.
        return _adam_rule, (self.decoupled, self._amsgrad, self.moments)

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
        self._kernel(
            list(parameters),
            list(gradients),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            list(states["max_exp_avg_sq"]) if amsgrad else [],
            # One tensor for all: the kernel only reads it, and on a GPU each one would be a copy of its own.
            [torch.full((), float(step), device=device)] * len(parameters),
            amsgrad=amsgrad,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
        )


def _adam_rule(decoupled: bool, amsgrad: bool, moments: Moments) -> AdamRule:
    return AdamRule(decoupled=decoupled, amsgrad=amsgrad, moments=moments)


@final
class SgdRule(UpdateRule):
    """SGD with momentum as in ``torch.optim.SGD``."""

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
class LionRule(UpdateRule):
    """Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms", algorithm 2), each operation rounded by
    itself in the order of the paper."""

    state_names = ("exp_avg",)

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
        for parameter, gradient, average in zip(parameters, gradients, states["exp_avg"], strict=True):
            direction = average * beta1 + gradient * (1 - beta1)
            # torch's sign of NaN is 0: what is added says so.
            parameter.mul_(1 - lr * decay).sub_(lr * direction.sign() + 0 * direction)
            average.mul_(beta2).add_(gradient * (1 - beta2))


class RuledOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of forebay's own, which steps by a rule wherever it is."""

    @property
    @abstractmethod
    def rule(self) -> UpdateRule:
        """What a step does. Raises ``OptimizerError`` where groups ask for what no rule does."""


def read_optimizer(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """The rule of an ordinary ``torch.optim.AdamW``, ``Adam`` or ``SGD``, or of an optimizer of ``forebay.optim``.

    Raises ``OptimizerError`` for any other class (a subclass may compute something else) and for options that
    forebay does not run.
    """
    groups, kind = optimizer.param_groups, type(optimizer)
    own = isinstance(optimizer, RuledOptimizer)
    if not own and kind not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise OptimizerError(
            f"{kind.__module__}.{kind.__qualname__} is not an optimizer that forebay runs; use torch.optim.AdamW, "
            f"torch.optim.Adam, torch.optim.SGD, forebay.optim.AdamW or forebay.optim.Lion"
        )
    if optimizer.state:
        raise OptimizerError(
            "the optimizer has taken steps already; prepare it before the first step, or load its state_dict() into "
            "the prepared optimizer"
        )
    if isinstance(optimizer, RuledOptimizer):
        return optimizer.rule
    if any(group.get("differentiable") for group in groups):
        raise OptimizerError("differentiable=True keeps the whole history of the parameters; set it to False")
    if kind is torch.optim.SGD:
        return SgdRule(momentum=any(group["momentum"] != 0 for group in groups))
    decoupled = {bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)) for group in groups}
    if len(decoupled) > 1:
        raise OptimizerError("decoupled_weight_decay differs between parameter groups; make it the same in all")
    return AdamRule(decoupled=decoupled.pop(), amsgrad=any(group["amsgrad"] for group in groups))
