"""Adafactor: a second moment of a matrix in one number for each row and each column."""

from __future__ import annotations

from typing import Any, final

from forebay.errors import OptimizerError
from forebay.optim.factored import AdafactorRule
from forebay.optim.lean import LeanOptimizer

__all__ = ["Adafactor"]


@final
class Adafactor(LeanOptimizer):
    """Shazeer and Stern (2018), "Adafactor: adaptive learning rates with sublinear memory cost", algorithms 4 and 5, as
    ``torch.optim.Adafactor``, up to the rounding of sums; its states stay fp32 where parameters have 16 bits.

    ``eps`` is torch's: the least second moment (None: the machine epsilon of fp32) and the least scale of a parameter.
    ``stochastic_rounding``: parameters in bf16 have no fp32 master, and a step rounds them up or down by chance (Gupta
    et al., 2015), 4 bytes an element less. That changes the numbers.

    Raises ``OptimizerError`` for hyperparameters out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        stochastic_rounding: bool = False,
    ) -> None:
        if beta2_decay > 0 or d < 1 or any(e is not None and e < 0 for e in eps):
            raise OptimizerError(f"beta2_decay is 0 or less, d 1 or more, eps 0 or more: got {beta2_decay}, {d}, {eps}")
        numbers = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "stochastic_rounding": stochastic_rounding})

    @property
    def rule(self) -> AdafactorRule:
        return AdafactorRule(masters=not self._same_in_all("stochastic_rounding"))
