"""Adafactor and CAME as update rules, Adafactor that of forebay, of torch and of transformers: each looks at a whole
parameter before it changes an element.

All but forebay's do what those do, operation by operation, in memory that they are given: the last bits are those of
the optimizers that they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any, final

import torch

from forebay.kernels.adafactor_step import AdafactorStep
from forebay.optim.rules import Keeping, Switch, UpdateRule, WholeRule, for_torch
from forebay.states import FACTORED

__all__ = ["AdafactorRule", "CameRule", "TorchAdafactorRule", "TransformersAdafactorRule", "adafactor_step"]


@final
class AdafactorRule(UpdateRule):
    """Shazeer and Stern (2018), algorithms 4 and 5, as ``forebay.optim.Adafactor`` has them: sums in an order of its
    own, so that an update goes over a parameter part by part (``adafactor_parts``)."""

    state_names = FACTORED

    def __init__(self, *, masters: bool = True) -> None:
        self.keeping = Keeping(masters=masters)
        self.settled = {"stochastic_rounding": not masters}


@final
class TorchAdafactorRule(WholeRule):
    """``torch.optim.Adafactor``, on fp32 masters where parameters have 16 bits."""

    state_names = ("row_var:rows-torch", "col_var:columns-torch", "variance:vector-torch")

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
        room: Callable[[int], torch.Tensor],
    ) -> None:
        numbers, count = replace(adafactor_step(step, group), lr=for_torch(group["lr"])), parameter.numel()
        norm = parameter.norm(2).item()
        if numbers.weight_decay != 0:
            parameter.mul_(1 - numbers.lr * numbers.weight_decay)
        scratch = room(count)
        made = scratch.view(parameter.shape)
        if parameter.dim() > 1:
            row, column = states["row_var"], states["col_var"]
            for held, dim in ((row, -1), (column, -2)):
                # As many as there are rows or columns, where the second moment will be.
                mean = scratch[: held.numel()].view(held.shape)
                torch.norm(gradient, dim=dim, keepdim=True, out=mean)
                held.lerp_(mean.square_().div_(gradient.size(dim)), numbers.fresh)
            means = room(prod(row.shape[:-2])).view(*row.shape[:-2], 1, 1)
            torch.mean(row, dim=-2, keepdim=True, out=means)
            torch.matmul(row, column, out=made)
            made.div_(means.clamp_(min=numbers.eps1))
        else:
            torch.mul(gradient, gradient, out=made)
            made.copy_(states["variance"].lerp_(made, numbers.fresh))
        made.clamp_(min=numbers.eps1**2).rsqrt_().mul_(gradient)
        pace = numbers.pace(norm, made.norm(2).item(), count)
        parameter.add_(made, alpha=-pace if group.get("maximize") else pace)


@final
class TransformersAdafactorRule(WholeRule):
    """``transformers.Adafactor``, on fp32 masters where parameters have 16 bits. ``momentum``: there is a ``beta1``."""

    switches = MappingProxyType({"exp_avg": Switch("beta1", lambda beta: beta is not None)})

    def __init__(self, *, momentum: bool) -> None:
        factors = "exp_avg_sq_row:rows-flat", "exp_avg_sq_col:columns-flat", "exp_avg_sq:vector-torch"
        self.state_names = ("exp_avg", *factors) if momentum else factors

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
        room: Callable[[int], torch.Tensor],
    ) -> None:
        lr, fresh = _transformers_lr(parameter, step, group), math.pow(step, float(group["decay_rate"]))
        made = room(parameter.numel()).view(parameter.shape)
        _normalise(made, gradient, states, 1.0 - fresh, group, room)
        made.mul_(lr)
        if group["beta1"] is not None:
            made = states["exp_avg"].mul_(group["beta1"]).add_(made, alpha=1 - group["beta1"])
        if group["weight_decay"] != 0:
            parameter.add_(parameter, alpha=-group["weight_decay"] * lr)
        parameter.sub_(made)


@final
class CameRule(WholeRule):
    """``came_pytorch.CAME`` (Luo et al., ACL 2023, "CAME: confidence-guided adaptive memory efficient optimization",
    algorithm 2), on fp32 masters where parameters have 16 bits."""

    state_names = (
        *("exp_avg", "exp_avg_sq_row:rows-flat", "exp_avg_sq_col:columns-flat", "exp_avg_sq:vector-torch"),
        *("exp_avg_res_row:rows-flat", "exp_avg_res_col:columns-flat"),
    )

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        group: Mapping[str, Any],
        room: Callable[[int], torch.Tensor],
    ) -> None:
        (first, second, third), (_, least_unsure) = group["betas"], group["eps"]
        made, average = room(parameter.numel()).view(parameter.shape), states["exp_avg"]
        factors = _normalise(made, gradient, states, second, group, room)
        average.mul_(first).add_(made, alpha=1 - first)
        if factors is None:
            made.copy_(average)
        else:
            # How far the update is from its average says how little it is to be trusted.
            made.sub_(average)
            torch.mul(made, made, out=made).add_(least_unsure)
            unsure = factors.of(states["exp_avg_res_row"], states["exp_avg_res_col"])
            unsure.follow(made, third)
            unsure.approximate(made)
            made.mul_(average)
        if group["weight_decay"] != 0:
            parameter.add_(parameter, alpha=-group["weight_decay"] * group["lr"])
        parameter.sub_(made.mul_(group["lr"]))


def _normalise(
    made: torch.Tensor,
    gradient: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    kept: float,
    group: Mapping[str, Any],
    room: Callable[[int], torch.Tensor],
) -> _Factors | None:
    """Sets ``made`` to ``gradient`` over the root of its second moment, of which a share of ``kept`` stays, and clips
    it. Returns the factors of that moment; None where it is one of elements."""
    torch.mul(gradient, gradient, out=made).add_(group["eps"][0])
    factors = None
    if made.dim() >= 2:
        factors = _Factors(states["exp_avg_sq_row"], states["exp_avg_sq_col"], room)
        factors.follow(made, kept)
        factors.approximate(made)
    else:
        held = states["exp_avg_sq"]
        held.mul_(kept).add_(made, alpha=1.0 - kept)
        torch.rsqrt(held, out=made)
    made.mul_(gradient)
    made.div_((_root_mean_square(made) / group["clip_threshold"]).clamp_(min=1.0))
    return factors


@final
class _Factors:
    """A number for each ``row`` and each ``column`` of a parameter, averages of means along them, from which all of its
    elements are approximated; ``room`` gives memory for as many numbers more."""

    def __init__(self, row: torch.Tensor, column: torch.Tensor, room: Callable[[int], torch.Tensor]) -> None:
        self._row, self._column = row, column
        self._by_row, self._by_column = (room(held.numel()).view(held.shape) for held in (row, column))

    def of(self, row: torch.Tensor, column: torch.Tensor) -> _Factors:
        """Others of the same parameter, in the same memory."""
        memory = iter((self._by_row, self._by_column))
        return _Factors(row, column, lambda count: next(memory))

    def follow(self, values: torch.Tensor, kept: float) -> None:
        """Averages go on with the means of ``values``, and keep a share of ``kept`` of what they were."""
        for held, means, dim in ((self._row, self._by_row, -1), (self._column, self._by_column, -2)):
            torch.mean(values, dim=dim, out=means)
            held.mul_(kept).add_(means, alpha=1.0 - kept)

    def approximate(self, made: torch.Tensor) -> None:
        """Sets ``made`` to one over the square root of what the factors stand for."""
        row, by_row, by_column = self._row, self._by_row, self._by_column
        # Of each matrix one mean, where the column factor will be.
        mean = by_column.view(-1)[: prod(row.shape[:-1])].view(*row.shape[:-1], 1)
        torch.mean(row, dim=-1, keepdim=True, out=mean)
        torch.div(row, mean, out=by_row).rsqrt_()
        torch.rsqrt(self._column, out=by_column)
        torch.mul(by_row.unsqueeze(-1), by_column.unsqueeze(-2), out=made)


def _transformers_lr(parameter: torch.Tensor, step: int, group: Mapping[str, Any]) -> float | torch.Tensor:
    """What the update is multiplied by: a tensor without a dimension where it follows from the parameter."""
    lr: float = group["lr"]
    if group["relative_step"]:
        lr = min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
    if not group["scale_parameter"]:
        return lr
    scale: float | torch.Tensor = max(group["eps"][1], _root_mean_square(parameter))
    return scale * lr


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = values.norm(2) / (values.numel() ** 0.5)
    return found


def adafactor_step(step: int, group: Mapping[str, Any]) -> AdafactorStep:
    """The hyperparameters of a ``step``, counted from 1, of ``group``: of ``eps`` the first may be None, which is the
    machine epsilon of fp32."""
    least, scale = group["eps"]
    return AdafactorStep(
        step,
        lr=float(group["lr"]),
        beta2_decay=float(group["beta2_decay"]),
        eps1=torch.finfo(torch.float32).eps if least is None else float(least),
        eps2=float(scale),
        d=float(group["d"]),
        weight_decay=float(group["weight_decay"]),
    )
