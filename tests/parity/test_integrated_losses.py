"""Losses of several forwards under the Trainer and Accelerate: ``Memory(loss_fn=...)`` plans all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import forebay
from forebay.errors import ConfigError, DoesNotFit
from forebay.integrations.accelerate import ForebayAccelerator
from forebay.integrations.transformers import ForebayMixin, Memory
from forebay.memory import Tier

NUMBERS = 64
"""Bytes of what the frameworks make of a loss on the device, beside the step: scaled, summed up, a norm."""


@pytest.fixture(autouse=True)
def apart() -> None:
    """Accelerate keeps its settings for a whole process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def regularised(model: nn.Module, batch: Any) -> torch.Tensor:
    """Two forwards with dropout of their own, which are to agree (R-Drop)."""
    one, other = model(**batch), model(**batch)
    both = (F.log_softmax(made.logits, -1).flatten(0, 1) for made in (one, other))
    loss: torch.Tensor = one.loss + other.loss + F.kl_div(*both, log_target=True, reduction="batchmean")
    return loss


class Agreeing(Trainer):
    """Keeps the losses of its micro-batches."""

    losses: list[float]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = regularised(model, inputs)
        self.losses.append(loss.item())
        return loss


class Planned(ForebayMixin, Agreeing):
    pass


def trained(folder: Path, memory: Memory | None) -> tuple[list[float], int]:
    """Losses, and the peak of the device under a plan."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, use_cache=False, **shape))
    rows = torch.randint(0, 64, (16, 24), generator=torch.Generator().manual_seed(1))
    given = {
        "model": model,
        "args": TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            max_steps=3,
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        "train_dataset": [{"input_ids": ids, "labels": ids} for ids in rows],
    }
    made = Agreeing(**given) if memory is None else Planned(memory=memory, **given)
    made.losses = []
    made.train()
    if memory is None:
        return made.losses, 0
    (device,) = (usage for usage in forebay.report(model).timeline.tiers if usage.tier is Tier.DEVICE)
    forebay.close(model)
    return made.losses, device.peak


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream-recompute", "auto"])
def test_a_trainer_of_two_forwards(policy: str, tmp_path: Path) -> None:
    losses, _ = trained(tmp_path, None)
    with pytest.raises(DoesNotFit) as refused:
        trained(tmp_path, Memory(4096, policy=policy, loss_fn=regularised))
    needed = refused.value.needed + NUMBERS
    found, peak = trained(tmp_path, Memory(needed, policy=policy, loss_fn=regularised))
    assert found == losses and peak <= needed


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def contrastive(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    question, answer = (F.normalize(model(texts)) for texts in batch)
    return F.cross_entropy(10 * question @ answer.T, torch.arange(len(question)))


def looped(memory: Memory | None) -> list[float]:
    """Of pairs, which are no arguments of the model."""
    torch.manual_seed(3)
    model: Any = Encoder()
    accelerator = Accelerator(cpu=True) if memory is None else ForebayAccelerator(memory=memory, cpu=True)
    generator = torch.Generator().manual_seed(5)
    pairs = TensorDataset(*(torch.randn(24, 32, generator=generator) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(pairs, batch_size=8))
    losses = []
    for batch in loader:
        loss = contrastive(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if memory is not None:
        forebay.close(model)
    return losses


def test_a_loop_with_accelerate() -> None:
    losses = looped(None)
    with pytest.raises(DoesNotFit) as refused:
        looped(Memory(256, policy="stream-recompute", loss_fn=contrastive))
    needed = refused.value.needed + NUMBERS
    assert looped(Memory(needed, policy="stream-recompute", loss_fn=contrastive)) == losses
    with pytest.raises(ConfigError, match=r"of which nobody knows.* or a loss_fn that takes such a batch"):
        looped(Memory("1MiB"))
