"""Muon for the matrices of hidden layers, and AdamW for everything else, in one optimizer."""

from __future__ import annotations

from typing import Any, Final, final

from torch import nn

from forebay.errors import OptimizerError
from forebay.optim.lean import LeanOptimizer
from forebay.optim.orthogonal import MuonRule

__all__ = ["Muon", "muon_groups"]

_ADJUSTMENTS: Final = (None, "original", "match_rms_adamw")

_MOST_STEPS: Final = 99


@final
class Muon(LeanOptimizer):
    """Jordan et al. (2024) with the hyperparameters, defaults and numbers of ``torch.optim.Muon``; and, in groups with
    ``use_muon=False``, Loshchilov and Hutter (2019), algorithm 2, with those of ``torch.optim.AdamW(fused=True)``.

    A group says which of the two it is by ``use_muon`` (True where it does not say), and has its own ``lr``,
    ``weight_decay`` and ``eps`` (1e-7 for Muon, 1e-8 for AdamW); ``betas`` are AdamW's. ``muon_groups`` makes the usual
    two of a model. States: one in fp32 of a matrix of Muon, two of any other parameter, and the master copies of
    parameters in 16 bits.

    Raises ``OptimizerError`` for hyperparameters out of range and for what is no matrix in a group of Muon.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. Raises ``OptimizerError`` for hyperparameters out of range, and for what is no matrix in a
        group of Muon."""
        if not param_group.get("use_muon", True):
            param_group.setdefault("eps", 1e-8)
        _check(numbers := {**self.defaults, **param_group})
        super().add_param_group(param_group)
        if numbers["use_muon"]:
            for parameter in param_group["params"]:
                if parameter.ndim != 2:
                    self.param_groups.pop()
                    raise OptimizerError(
                        f"Muon updates matrices, and a parameter has the shape {tuple(parameter.shape)}; put it in a "
                        f"group with use_muon=False, as muon_groups(model) does"
                    )

    @property
    def rule(self) -> MuonRule:
        return MuonRule(id(p) for group in self.param_groups if group["use_muon"] for p in group["params"])


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of the trained parameters of ``model``: the matrices of its layers (what is in a ``ModuleList``, or in
    a ``Sequential`` of which two or more are alike), embeddings left out, for Muon; and the others, for AdamW, as
    Jordan et al. (2024) advise.

    Raises ``OptimizerError`` where there is no such matrix.
    """
    hidden, embeddings = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.update(module.parameters())
        kinds = [type(child) for child in module.children()]
        alike = isinstance(module, nn.Sequential) and len(set(kinds)) < len(kinds)
        if alike or isinstance(module, nn.ModuleList):
            hidden.update(p for p in module.parameters() if p.ndim == 2)
    hidden -= embeddings
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p in hidden) is chosen] for chosen in (True, False))
    if not matrices:
        raise OptimizerError(
            "the model has no layers in a list with matrices that are trained; give Muon groups of your own, with "
            "use_muon=True and use_muon=False"
        )
    return [{"params": matrices, "use_muon": True}, *([{"params": others, "use_muon": False}] if others else [])]


def _check(numbers: dict[str, Any]) -> None:
    """Raises ``OptimizerError`` for hyperparameters that Muon does not have."""
    if not float(numbers["momentum"]) >= 0:
        raise OptimizerError(f"momentum must be 0 or more, got {numbers['momentum']}")
    if not 1 <= numbers["ns_steps"] <= _MOST_STEPS:
        raise OptimizerError(f"ns_steps must be 1 to {_MOST_STEPS}, got {numbers['ns_steps']}")
    if len(numbers["ns_coefficients"]) != 3:
        raise OptimizerError(f"ns_coefficients are three numbers, got {numbers['ns_coefficients']}")
    if numbers["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise OptimizerError(
            f"adjust_lr_fn is one of {', '.join(map(repr, _ADJUSTMENTS))}, got {numbers['adjust_lr_fn']!r}"
        )
