"""What is prepared of a LightningModule: a module whose forward is one of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from forebay.integrations import missing

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from torchmetrics import Metric
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["Step", "Steps", "first_step", "mark", "steps_of", "unattached"]


@final
class Step:
    """Which step of the module is asked for, and with what beside the batch: nothing that a plan depends on."""

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs or {}

    def __repr__(self) -> str:
        return self.name  # by which batches of one shape are known: their numbers make no difference


@final
class Steps(nn.Module):
    """What is prepared: a module whose forward is a step of the LightningModule."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    @property
    def training(self) -> bool:
        """Whether the module is in training mode: behind a validation Lightning restores only that of its modules."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: whoever sets the mode of all modules sets that of the module, too."""

    def forward(self, batch: Any, step: Step) -> Any:
        """The module's method of this name."""
        return getattr(self.module, step.name)(batch, *step.args, **step.kwargs)


@final
class _Prepared:
    """A hook that does nothing: how what was prepared is found again from its module."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Lets the forward begin."""


def mark(steps: Steps) -> Callable[[], None]:
    """Marks the module of ``steps``, so that ``steps_of`` finds them. Returns what takes the mark off."""
    return steps.module.register_forward_pre_hook(_Prepared(steps)).remove


def steps_of(module: LightningModule) -> Steps | None:
    """What was prepared of ``module``; None where nothing was."""
    hooks = module._forward_pre_hooks.values()
    return next((hook.steps for hook in hooks if isinstance(hook, _Prepared)), None)


def first_step(module: LightningModule, batch: Any) -> tuple[Any, Step]:
    """What ``Steps`` is called with for the first ``batch``, whose tensors are of any shapes that the module takes."""
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return batch, Step("training_step", (0,) if numbered else ())


@contextmanager
def unattached(module: LightningModule) -> Iterator[None]:
    """Has ``module`` without its Trainer, as in its own tests: ``self.log`` does nothing then. Metrics are told
    nothing: a plan is made without values, which they look at and keep."""
    trainer, module.trainer = module.trainer, None
    metrics = [(metric, dict(vars(metric))) for metric in module.modules() if isinstance(metric, Metric)]
    try:
        for metric, _ in metrics:
            vars(metric).update(forward=_no_metric, update=_no_metric)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are trying to `self.log")
            yield
    finally:
        for metric, before in metrics:
            vars(metric).clear()
            vars(metric).update(before)
        module.trainer = trainer


def _no_metric(*args: Any, **kwargs: Any) -> torch.Tensor:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not leaf.numel():
            leaf.sum()  # refused where these are the logits of a loss in pieces, which no metric could be told
    return torch.zeros(())
