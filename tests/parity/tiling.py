"""Models with a weight that is larger than their device."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["TOKENS", "WIDTH", "WORDS", "Bigram", "bigram_batch", "language_batch", "language_model"]

WORDS, WIDTH, TOKENS = 2048, 256, 8


@final
class Bigram(nn.Module):
    """The next token from the last one: an embedding and a head, and nothing else."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids).tanh())
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def bigram_batch(step: int) -> dict[str, torch.Tensor]:
    """One token several times: its gradient is a sum."""
    ids = torch.randint(0, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(step))
    ids[2:5] = WORDS - 1
    return {"ids": ids, "labels": ids.roll(-1)}


ODD = 1031
"""Words that no size of tile divides."""


def language_batch(step: int, words: int = ODD) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, words, (2, 8), generator=torch.Generator().manual_seed(step))
    ids[:, 2:4] = words - 1
    return {"input_ids": ids, "labels": ids}


def language_model(tied: bool = False, **sizes: Any) -> Any:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    config = {"vocab_size": ODD, "num_hidden_layers": 2, **shape, **sizes}
    return LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=tied))
