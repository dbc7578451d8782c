"""TRL's trainers beside ``SFTTrainer`` (test_adapters.py): preferences, rewards, and what a model itself generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("trl")

from datasets import Dataset
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

import forebay
from forebay.errors import ConfigError
from forebay.integrations.transformers import ForebayMixin, Memory
from forebay.memory import Tier
from forebay.units import MiB
from tests.parity.test_adapters import QUIET, llama, same, seen, tokenizer

FEW = {"per_device_train_batch_size": 2, "max_steps": 3, "save_strategy": "no", "bf16": False, **QUIET}
PROMPTS = [f"thequickbrownfox{number}" for number in range(12)]
PAIRS = {"chosen": [f"jumpsover{n}" for n in range(12)], "rejected": [f"lazydogs{n * n}" for n in range(12)]}


class PlannedDPO(ForebayMixin, DPOTrainer):
    pass


class PlannedGRPO(ForebayMixin, GRPOTrainer):
    pass


class PlannedReward(ForebayMixin, RewardTrainer):
    pass


def dpo(folder: Path, memory: Memory | None) -> Trainer:
    """A trainer that has a second model, as it was, for reference: it reads that from a folder."""
    llama().save_pretrained(folder / "weights")
    given: dict[str, Any] = {
        "model": LlamaForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32),
        "args": DPOConfig(str(folder), max_length=48, **FEW),
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS, **PAIRS}),
        "processing_class": tokenizer(),
    }
    return DPOTrainer(**given) if memory is None else PlannedDPO(memory=memory, **given)


def reward(folder: Path, memory: Memory | None) -> Trainer:
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    given: dict[str, Any] = {
        "model": LlamaForSequenceClassification(LlamaConfig(vocab_size=128, num_labels=1, pad_token_id=2, **shape)),
        "args": RewardConfig(str(folder), max_length=48, **FEW),
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS, **PAIRS}),
        "processing_class": tokenizer(),
    }
    return RewardTrainer(**given) if memory is None else PlannedReward(memory=memory, **given)


def different_letters(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def grpo(folder: Path, memory: Memory | None) -> Trainer:
    given: dict[str, Any] = {
        "model": llama(),
        "args": GRPOConfig(str(folder), num_generations=2, max_completion_length=8, **FEW),
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "processing_class": tokenizer(),
        "reward_funcs": different_letters,
    }
    return GRPOTrainer(**given) if memory is None else PlannedGRPO(memory=memory, **given)


def called(tokens: int) -> dict[str, Any]:
    """What ``GRPOTrainer`` calls its model with."""
    ids = torch.ones(2, tokens, dtype=torch.int64)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "use_cache": False,
        "fused_lm_head": True,
    }


def trained(make: Callable[[Path, Memory | None], Trainer], folder: Path, memory: Memory | None) -> Trainer:
    made = make(folder, memory)
    torch.manual_seed(0)
    made.train()
    return made


@pytest.mark.parametrize(
    ("make", "memory"),
    [
        # Of these, as in SFTTrainer, most are tiles of logits.
        pytest.param(dpo, Memory("20MiB", policy="stream", device_reserve="2MiB"), id="dpo"),
        pytest.param(reward, Memory("1MiB"), id="reward"),
        pytest.param(grpo, Memory("12MiB", policy="stream", example=called(28)), id="grpo"),
    ],
)
def test_they_train_as_without_a_plan(
    make: Callable[[Path, Memory | None], Trainer], memory: Memory, tmp_path: Path
) -> None:
    own = trained(make, tmp_path / "own", memory)
    theirs = trained(make, tmp_path / "theirs", None)
    assert own.model is not None and isinstance(theirs.model, nn.Module)
    record = forebay.report(own.model)
    assert record.plan.placements and not all(placed.resident for placed in record.plan.placements)
    assert record.measured_peaks()[Tier.DEVICE] <= record.plan.budget.device
    forebay.close(own.model)
    assert seen(own) == seen(theirs) and any(entry.get("grad_norm") for entry in seen(own))
    assert same(own.model, theirs.model)


def test_batches_that_are_made_on_the_way_have_no_example(tmp_path: Path) -> None:
    own = grpo(tmp_path, Memory(12 * MiB))
    with pytest.raises(
        ConfigError, match=r"PlannedGRPO makes the batches of its model while it trains, .*; give Memory an example: "
    ):
        own.train()
