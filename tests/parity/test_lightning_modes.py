"""What Lightning's loops and callbacks do to a module beside training it, under a memory plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader

import forebay
from forebay.errors import ConfigError
from forebay.integrations.lightning import ForebayStrategy, Memory
from tests.parity.small_lightning import Keeping, quiet, trainer

__all__ = ["quiet"]

WIDTH = 16


class Net(Keeping):
    """Keeps the modes of what was prepared when steps begin."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        self.modes: list[tuple[str, bool]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._note("training")
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self._note("validation")
        self.net(batch)

    def _note(self, step: str) -> None:
        if self._trainer is not None:  # else it is looked at for a plan
            self.modes.append((step, self.trainer.model.training))


def loader(rows: int = 16) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=8)


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


class Unfreezing(callbacks.BaseFinetuning):
    """The first layer trains from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (callbacks.StochasticWeightAveraging(1e-2), "StochasticWeightAveraging, .* as docs/averages.md has it"),
        (callbacks.EMAWeightAveraging(), "EMAWeightAveraging, .* as docs/averages.md has it"),
        (Unfreezing(), "Unfreezing, which forebay does not serve: freeze parameters in the module"),
        (
            callbacks.ModelPruning("l1_unstructured", amount=0.5),
            "ModelPruning, .*: prune the module behind forebay.close",
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_callbacks_that_change_weights_are_refused_before_the_first_step(
    strategy: ForebayStrategy, tmp_path: Path, callback: Callback, words: str
) -> None:
    net = Net()
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, strategy, callbacks=[callback]).fit(net, loader())
    assert not net.losses and strategy.model is net


Weights = Mapping[str, torch.Tensor]


class Averaging(Callback):
    """Of what ``read`` finds in a Trainer after every step, as docs/averages.md has it."""

    def __init__(self, read: Callable[[Trainer], Weights]) -> None:
        self.read = read
        self.average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        for name, value in self.read(trainer).items():
            self.average.setdefault(name, value.detach().clone()).lerp_(value.detach(), 0.1)


def test_an_average_of_the_weights_is_made_by_a_callback(strategy: ForebayStrategy, tmp_path: Path) -> None:
    own = Averaging(lambda trainer: forebay.parameters(trainer.strategy.model))
    theirs = Averaging(lambda trainer: dict(trainer.strategy.model.named_parameters(prefix="module")))
    for how, averaging in ((strategy, own), ("auto", theirs)):
        torch.manual_seed(7)
        trainer(tmp_path, how, callbacks=[averaging]).fit(Net(), loader())
    assert own.average.keys() == theirs.average.keys()
    assert all(torch.equal(value, theirs.average[name]) for name, value in own.average.items())
