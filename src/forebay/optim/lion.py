"""Lion: one moment, and a step of the same size for every element."""

from __future__ import annotations

from typing import Any, final

from forebay.optim.lean import LeanOptimizer
from forebay.optim.rules import LionRule

__all__ = ["Lion"]


@final
class Lion(LeanOptimizer):
    """Chen et al. (2023), "Symbolic discovery of optimization algorithms", algorithm 2: 4 bytes of state an element.

    The paper takes a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by as much.

    ``stochastic_rounding``: parameters in bf16 have no fp32 master, and a step rounds them up or down by chance (Gupta
    et al., 2015), 4 bytes an element less. That changes the numbers.

    Raises ``OptimizerError`` for hyperparameters out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        stochastic_rounding: bool = False,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "stochastic_rounding": stochastic_rounding})

    @property
    def rule(self) -> LionRule:
        return LionRule(masters=not self._same_in_all("stochastic_rounding"))
