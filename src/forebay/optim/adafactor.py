"""Adafactor: a second moment of a matrix in one number for each row and each column."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, final

import torch

from forebay.errors import OptimizerError
from forebay.kernels.team import Team, cores
from forebay.layout import MASTER
from forebay.optim.lean import LeanOptimizer, in_order
from forebay.optim.rules import UpdateRule

__all__ = ["Adafactor"]


@final
class Adafactor(LeanOptimizer):
    """Shazeer and Stern (2018), "Adafactor: adaptive learning rates with sublinear memory cost", algorithms 4 and 5, as
    ``torch.optim.Adafactor``, up to the rounding of sums; its states stay fp32 where parameters have 16 bits.

    ``eps`` is torch's: the least second moment (None: the machine epsilon of fp32) and the least scale of a parameter.
    Not for ``forebay.prepare``: a step needs the sums of a whole parameter before it changes an element. Raises
    ``OptimizerError`` for hyperparameters out of range.
    """

    _team: Team | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if beta2_decay > 0 or d < 1 or any(e is not None and e < 0 for e in eps):
            raise OptimizerError(f"beta2_decay is 0 or less, d 1 or more, eps 0 or more: got {beta2_decay}, {d}, {eps}")
        super().__init__(
            params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        )

    @property
    def rule(self) -> UpdateRule:
        raise OptimizerError(
            "forebay.optim.Adafactor steps over whole parameters, and a prepared model over chunks of them; prepare "
            "with forebay.optim.AdamW(moments='8bit') or '4bit', or use Adafactor without forebay.prepare"
        )

    def _new_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(shape, device=parameter.device) for name, shape in _shapes(parameter.shape).items()}

    def _check_saved(self, name: str, parameter: torch.Tensor, saved: Mapping[str, Any]) -> None:
        for key, shape in _shapes(parameter.shape).items():
            value = saved.get(key)
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                found = "not there" if value is None else f"of shape {tuple(value.shape)}"
                raise OptimizerError(f"the saved {key} of {name} is {found}, and its parameter has {tuple(shape)}")

    def _step_group(self, parameters: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> None:
        for parameter in parameters:
            state, gradient = self.state[parameter], parameter.grad
            if gradient is None:
                raise OptimizerError("a parameter without a gradient has no step")
            fast = parameter.device.type == "cpu" and parameter.dim() in (1, 2) and parameter.is_contiguous()
            if fast and parameter.numel() and find_spec("numba") is not None:
                if self._team is None:
                    self._team = Team(cores())
                    weakref.finalize(self, self._team.close)
                _by_kernel(self._team, parameter, in_order(gradient, parameter), state, numbers)
            elif parameter.numel():
                wide = state.get(MASTER, parameter)
                _by_torch(wide, gradient.float(), state, numbers)
                if MASTER in state:
                    parameter.copy_(wide)


def _shapes(shape: torch.Size) -> dict[str, torch.Size]:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": torch.Size((*shape[:-1], 1)), "col_var": torch.Size((*shape[:-2], 1, shape[-1]))}


def _epsilons(numbers: Mapping[str, Any]) -> tuple[float, float]:
    least, scale = numbers["eps"]
    return (torch.finfo(torch.float32).eps if least is None else float(least)), float(scale)


def _by_kernel(
    team: Team, parameter: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any], numbers: Mapping[str, Any]
) -> None:
    # numba takes a third of a second to import: not before there is something to update.
    from forebay.kernels.adafactor import AdafactorStep, Matrix, update_matrix, update_vector
    from forebay.optim.launching import FORMS

    eps1, eps2 = _epsilons(numbers)
    others = {name: float(numbers[name]) for name in ("lr", "beta2_decay", "d", "weight_decay")}
    step = AdafactorStep(int(state["step"]), eps1=eps1, eps2=eps2, **others)
    rows = parameter.shape[0] if parameter.dim() == 2 else 1
    wide = state.get(MASTER, parameter)
    matrix = Matrix(
        rows,
        parameter.numel() // rows,
        gradient.data_ptr(),
        FORMS[gradient.dtype],
        parameter.data_ptr(),
        FORMS[parameter.dtype],
        wide.data_ptr(),
    )
    if parameter.dim() == 2:
        update_matrix(team, matrix, state["row_var"].view(-1).numpy(), state["col_var"].view(-1).numpy(), step)
    else:
        update_vector(team, matrix, state["variance"].numpy(), step)


def _by_torch(wide: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    step, (eps1, eps2) = float(state["step"]), _epsilons(numbers)
    fresh, lr = step ** float(numbers["beta2_decay"]), float(numbers["lr"])
    pace = max(eps2, float(wide.norm()) / wide.numel() ** 0.5) * min(lr, step**-0.5)
    wide.mul_(1 - lr * float(numbers["weight_decay"]))
    if gradient.dim() > 1:
        row, column = state["row_var"], state["col_var"]
        row.lerp_(gradient.square().mean(-1, keepdim=True), fresh)
        column.lerp_(gradient.square().mean(-2, keepdim=True), fresh)
        variance = (row / row.mean(-2, keepdim=True).clamp_(min=eps1)) * column
    else:
        variance = state["variance"].lerp_(gradient.square(), fresh)
    update = gradient / variance.clamp(min=eps1**2).sqrt()
    wide.sub_(update, alpha=pace / max(1.0, float(update.norm()) / update.numel() ** 0.5 / float(numbers["d"])))
