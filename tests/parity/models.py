"""Tiny models of every shape that streaming has to get right, and a batch for each. Seeds make them repeatable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 128


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def images(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 4, (2,), generator=generator),
    }


def gpt2() -> nn.Module:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def llama(tied: bool = False) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def albert(dropout: float = 0.0) -> nn.Module:
    """One layer that the forward runs three times."""
    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCABULARY,
            embedding_size=16,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=1,
        )
    )


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_labels=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class WithLoss(nn.Module):
    """A classifier with its loss inside, so that every model here is called in the same way."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def convnet() -> nn.Module:
    def stage(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )

    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *[stage(16) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return WithLoss(body).to(memory_format=torch.channels_last)


class Experts(nn.Module):
    """Routes the whole batch to one of several experts, by the input: the others get no gradient in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 32)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)])
        self.head = nn.Linear(32, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.embed(pixel_values[:, :, :4, :4].flatten(1))
        chosen = int(pixel_values.sum().abs().item() * 10) % 4
        return self.head(x + self.experts[chosen](x))


class UsedTwice(nn.Module):
    """One layer applied twice, between others; and a scale that the root owns itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 32)
        self.shared = nn.Linear(32, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 4)
        self.scale = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.embed(pixel_values[:, :, :4, :4].flatten(1))
        x = self.shared(x).relu()
        for layer in self.layers:
            x = x + layer(x).relu() * self.scale
        return self.head(self.shared(x))


class WithUnused(nn.Module):
    """A layer that forward never reaches: its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(3)])
        self.unused = nn.Linear(48, 48)
        self.head = nn.Linear(48, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values[:, :, :4, :4].flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def frozen() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "norm" in name)
    return model


def checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@dataclass(frozen=True)
class Case:
    """A model, a batch for each micro-step, and the dtypes that make sense for it."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Mapping[str, Any]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The model, the same every time."""
        torch.manual_seed(0)
        return self.make().to(dtype)

    def inputs(self, step: int, dtype: torch.dtype) -> dict[str, Any]:
        """The batch of a micro-step, floating inputs in ``dtype``."""
        return {
            k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in self.batch(step).items()
        }


CASES: Mapping[str, Case] = {
    "gpt2": Case(gpt2, tokens),
    "llama": Case(llama, tokens),
    "llama-tied": Case(lambda: llama(tied=True), tokens),
    "albert": Case(albert, tokens),
    "t5": Case(t5, tokens),
    "mixtral": Case(mixtral, tokens),
    "experts": Case(lambda: WithLoss(Experts()), images),
    "vit": Case(vit, images),
    "convnet": Case(convnet, images, (torch.float32,)),
    "used-twice": Case(lambda: WithLoss(UsedTwice()), images),
    "frozen": Case(frozen, tokens),
    "unused": Case(lambda: WithLoss(WithUnused()), images),
    "checkpointed": Case(checkpointed, tokens),
}
