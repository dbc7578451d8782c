"""What Lightning's loops and callbacks do to a module beside training it, under a memory plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import forebay
from forebay.integrations.lightning import ForebayStrategy, Memory

WIDTH = 16


class Net(LightningModule):
    """Always with the same values; keeps its losses, and the modes of what was prepared when steps begin."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        self.losses: list[float] = []
        self.modes: list[tuple[str, bool]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._note("training")
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._note("validation")
        self.net(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def _note(self, step: str) -> None:
        if self._trainer is not None:  # else it is looked at for a plan
            self.modes.append((step, self.trainer.model.training))


def loader(rows: int = 16) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=8)


def trainer(folder: Path, strategy: Any = "auto", **more: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    usual = {"max_epochs": 2, "enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": str(folder)}
    return Trainer(strategy=strategy, **{**usual, **quiet, **more})


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Lightning says much that is not about what is tested."""
    log = logging.getLogger("lightning.pytorch")
    before, log.level = log.level, logging.ERROR
    yield
    log.setLevel(before)


@pytest.fixture
def strategy() -> Iterator[ForebayStrategy]:
    made = ForebayStrategy(Memory("1MiB", policy="stream"))
    yield made
    if made.model is not None:
        forebay.close(made.model)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_it_trains_in_training_mode_behind_a_validation(strategy: ForebayStrategy, tmp_path: Path) -> None:
    """One before the first step, and one behind each epoch."""
    net = Net()
    trainer(tmp_path, strategy).fit(net, loader(), loader(8))
    assert net.modes == [("validation", False), *[("training", True), ("training", True), ("validation", False)] * 2]
    assert strategy.model.training and net.training
    net.eval()
    assert not strategy.model.training
