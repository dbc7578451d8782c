"""A Llama on real text with moments of few bits: the loss falls as it does with moments in fp32.

Sixteen speeches as bytes, 150 steps of 8 x 64 tokens, AdamW at 3e-3, clipping at 1; three seeds for weights and order
of the text. What is compared is the mean loss of the last 30 steps, of one seed with the same seed.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

import forebay
from forebay.data.text import Windows
from forebay.optim import AdamW, Lion
from forebay.states import Moments
from tests.parity.speeches import LEARNT, WORST, byte_llama, entropy, losses, speeches

pytestmark = pytest.mark.slow

STEPS, LAST = 150, 30
SEEDS = (0, 1, 2)
SPEECHES = 16


@cache
def ended(moments: Moments | None, seed: int, policy: str | None = None) -> float:
    """Mean loss of the last steps; ``moments`` None: Lion. ``policy``: of a prepared model."""
    made, windows = byte_llama(seed), Windows(speeches(SPEECHES), batch=8, seq=64, seed=seed)
    optimizer: torch.optim.Optimizer = (
        Lion(made.parameters(), lr=6e-4, weight_decay=0.05)
        if moments is None
        else AdamW(made.parameters(), lr=3e-3, moments=moments)
    )
    if policy is not None:
        made, optimizer = forebay.prepare(made, optimizer, device_memory="256MiB", policy=policy, device="cpu")
    found = losses(made, optimizer, windows, STEPS)
    forebay.close(made)
    end = sum(found[-LAST:]) / LAST
    print(moments, seed, policy, *(f"{loss:.3f}" for loss in found[19::20]), f"{end:.4f}")  # see docs/log.md
    return end


@pytest.mark.parametrize(("moments", "worst"), [("bfloat16", WORST), ("8bit", WORST), ("4bit", 2 * WORST)])
def test_losses_with_moments_of_few_bits(moments: Moments, worst: float) -> None:
    known = entropy(speeches(SPEECHES))
    ratios = []
    for seed in SEEDS:
        plain, found = ended("float32", seed), ended(moments, seed)
        assert max(plain, found) < LEARNT * known
        ratios.append(found / plain)
    # Single runs differ by about as much as what is looked for; their mean less.
    assert max(ratios) <= 1 + 2 * worst and sum(ratios) / len(ratios) <= 1 + worst


def test_a_streamed_run_is_the_plain_one() -> None:
    assert ended("8bit", 0, "stream") == ended("8bit", 0)


def test_lion_learns() -> None:
    assert ended(None, 0) < LEARNT * entropy(speeches(SPEECHES))
