"""A small module that the Trainer of transformers trains in a moment, with a memory plan or without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import forebay
from forebay.integrations.transformers import ForebayMixin, Memory

__all__ = ["BUDGET", "Noting", "Planned", "Regression", "arguments", "same", "streams"]

BUDGET = "640KiB"
"""Of device memory: parameters, gradients and states of a ``Regression`` take 1.5 MiB."""

WIDTH = 128


class Regression(nn.Module):
    """Of ``x`` and ``labels``, which are targets, a list of mappings with one each, or a mapping with all. Always with
    the same values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 4))

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        made = self.net(x)
        if labels is None:
            return {"logits": made}
        if isinstance(labels, list):
            labels = torch.stack([row["target"] for row in labels])
        targets = labels if isinstance(labels, torch.Tensor) else labels["target"]
        return {"loss": (made - targets).abs().mean(), "logits": made}


class Noting(Trainer):
    """Keeps the loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Planned(ForebayMixin, Noting):
    def __init__(self, *args: Any, memory: Memory | None = None, **kwargs: Any) -> None:
        super().__init__(*args, memory=memory or Memory(BUDGET, policy="stream"), **kwargs)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    usual = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **{**usual, **quiet, **more})


def same(own: nn.Module, theirs: nn.Module) -> bool:
    """Whether two models have the same weights, bit for bit."""
    found, expected = own.state_dict(), theirs.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def streams(model: nn.Module) -> bool:
    return any(not placement.resident for placement in forebay.report(model).plan.placements)
