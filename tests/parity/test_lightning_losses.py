"""The loss of a language model in pieces under Lightning, where its output stays in ``training_step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("transformers")

from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.errors import ModelError
from forebay.integrations.lightning import ForebayStrategy, Memory
from forebay.loss import Loss
from tests.parity.small_lightning import Keeping, quiet, trainer

__all__ = ["quiet"]

WORDS = 1031


class Speaker(Keeping):
    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **shape))
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch).loss


class Measured(Speaker):
    """Gives the logits to a metric."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = self.net(**batch)
        self.seen(made.logits.detach())
        return made.loss


def losses(folder: Path, made: Speaker, strategy: Any = "auto") -> list[float]:
    rows = torch.randint(0, WORDS, (4, 40), generator=torch.Generator().manual_seed(1))
    data = DataLoader([{"input_ids": ids, "labels": ids} for ids in rows], batch_size=2)
    trainer(folder, strategy, max_epochs=1).fit(made, data)
    return made.losses


def test_pieces_have_the_losses_of_lightning(tmp_path: Path) -> None:
    strategy = ForebayStrategy(Memory("2MiB", policy="stream", loss="chunked"))
    assert losses(tmp_path, Speaker(), strategy) == losses(tmp_path, Speaker())
    assert forebay.report(strategy.model).plan.loss_piece == 32 << 10
    forebay.close(strategy.model)


def test_logits_that_a_metric_reads_are_there(tmp_path: Path) -> None:
    """``auto``, which takes pieces without it, is told beforehand of what a metric will be told."""

    def under(loss: Loss) -> ForebayStrategy:
        return ForebayStrategy(Memory("3MiB", device_reserve="1MiB", loss=loss))  # for what the metric computes

    pieces = []
    for made in (Speaker, Measured):
        strategy = under("auto")
        assert losses(tmp_path, made(), strategy) == losses(tmp_path, made())
        pieces.append(forebay.report(strategy.model).plan.loss_piece)
        forebay.close(strategy.model)
    assert pieces[0] and not pieces[1]
    with pytest.raises(ModelError, match="the logits of the model are read"):
        losses(tmp_path, Measured(), under("chunked"))
