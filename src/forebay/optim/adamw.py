"""AdamW with moments in as few bytes as are asked for."""

from __future__ import annotations

from typing import Any, final

from forebay.errors import OptimizerError
from forebay.optim.lean import LeanOptimizer
from forebay.optim.rules import AdamRule
from forebay.states import MOMENTS, Moments

__all__ = ["AdamW"]


@final
class AdamW(LeanOptimizer):
    """Loshchilov and Hutter (2019), algorithm 2, as ``torch.optim.AdamW``.

    ``moments``: ``float32`` (8 bytes an element), the bits of torch's fused kernel on x86-64; ``bfloat16`` (4), rounded
    up or down by chance; ``8bit`` (2.03; Dettmers et al., 2022) and ``4bit`` (1.03; Li et al., 2023), in codes with a
    scale for every 256 elements. Moments that are not fp32 change the numbers.

    ``stochastic_rounding``: parameters in bf16 have no fp32 master, and a step rounds them up or down by chance (Gupta
    et al., 2015), 4 bytes an element less. That changes the numbers.

    Raises ``OptimizerError`` for hyperparameters out of range and for other moments.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Moments = "float32",
        maximize: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        if moments not in MOMENTS:
            raise OptimizerError(f"moments are kept as {', '.join(MOMENTS)}, not {moments!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "maximize": maximize,
            "amsgrad": False,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults)

    @property
    def rule(self) -> AdamRule:
        masters = not self._same_in_all("stochastic_rounding")
        if any(group["amsgrad"] for group in self.param_groups):
            raise OptimizerError(
                "amsgrad is on in a parameter group, and this AdamW keeps no largest moments; use that of torch.optim"
            )
        return AdamRule(decoupled=True, amsgrad=False, moments=self._same_in_all("moments"), masters=masters)
