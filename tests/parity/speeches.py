"""Real text as bytes, and a small Llama that learns it, for tests of whole loss curves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.case import BenchmarkError
from benchmarks.losses.text import byte_llama, files, losses, text_of

__all__ = ["LEARNT", "WORST", "byte_llama", "entropy", "losses", "speeches"]

WORST, LEARNT = 0.01, 0.85
"""How much worse than plain a loss may be, as a share; and the share of the entropy of single bytes below which a loss
has learnt something."""


def speeches(count: int = 4) -> torch.Tensor:
    """The last ``count`` speeches as bytes."""
    try:
        return text_of(files()[-count:])
    except BenchmarkError as error:
        pytest.skip(str(error))


def entropy(text: torch.Tensor) -> float:
    """Loss in nats of whoever knows how often each byte comes and no more."""
    shares = torch.tensor(list(Counter(text.tolist()).values()), dtype=torch.float64) / text.numel()
    return float(-(shares * shares.log()).sum())
