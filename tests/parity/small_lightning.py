"""What tests of Lightning have in common: a module that keeps its losses, a trainer, and quiet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

__all__ = ["Keeping", "quiet", "trainer"]


class Keeping(LightningModule):
    """Keeps its losses; made after it has seeded torch, a module always has the same values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def trainer(folder: Path, strategy: Any = "auto", **more: Any) -> Trainer:
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    usual = {"max_epochs": 2, "enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": str(folder)}
    return Trainer(strategy=strategy, **{**usual, **silent, **more})


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lightning says much that is not about what is tested."""
    log = logging.getLogger("lightning.pytorch")
    before, log.level = log.level, logging.ERROR
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
        yield
    log.setLevel(before)
