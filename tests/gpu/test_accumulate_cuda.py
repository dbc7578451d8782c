"""Accumulation block by block on a card: the numbers of the loop on that card, inside the budget."""

from __future__ import annotations

import pytest
import torch

import forebay
from forebay.memory import Tier
from forebay.runtime.blocks import find_blocks
from tests.parity.accumulating import assert_same_accumulation
from tests.parity.models import CASES
from tests.parity.recomputing import DROPOUT, plan_for, recomputable

pytestmark = pytest.mark.gpu

BUDGET = 2 * 2**30


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied", "used-twice", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_numbers(name: str, dtype: torch.dtype) -> None:
    # No clipping: the norm is summed on the host for landed gradients and on the card for plain ones.
    model = assert_same_accumulation(
        CASES[name], dtype, clip=None, policy="stream", device_memory=BUDGET, micro_batches=3, device="cuda"
    )
    usage = {t.tier: t for t in forebay.report(model).timeline.tiers}
    assert 0 < usage[Tier.DEVICE].peak <= BUDGET
    forebay.close(model)


@pytest.mark.parametrize("name", ["gpt2-dropout", "llama"])
def test_same_numbers_recomputed(name: str) -> None:
    """With dropout too: it draws the numbers that the loop draws on the card, and draws them again."""
    case = DROPOUT[name] if name in DROPOUT else CASES[name]
    blocks = recomputable(find_blocks(case.model(torch.float32)).model)
    plan = plan_for(case, torch.float32, blocks, resident=False, slots=2)
    model = assert_same_accumulation(case, torch.float32, clip=None, plan=plan, device_memory=BUDGET, device="cuda")
    forebay.close(model)
