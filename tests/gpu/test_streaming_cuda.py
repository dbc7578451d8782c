"""The runtime on a card: the same numbers as plain PyTorch on that card, inside the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.memory import Tier
from tests.parity.compare import adamw, assert_same_training, stepped
from tests.parity.models import CASES
from tests.parity.test_saving_scope import adamw as fused_adamw
from tests.parity.test_saving_scope import batch, by_itself_reentrant, made

pytestmark = pytest.mark.gpu

AMPLE = "2GiB"


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied", "experts", "used-twice", "frozen", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_same_numbers(name: str, dtype: torch.dtype, policy: str) -> None:
    # No clipping: the norm is summed on the host for landed gradients and on the card for plain ones.
    model = assert_same_training(CASES[name], dtype, clip=None, policy=policy, device_memory=AMPLE, device="cuda")
    usage = {t.tier: t for t in forebay.report(model).timeline.tiers}
    assert 0 < usage[Tier.DEVICE].peak <= 2 * 1024**3
    forebay.close(model)


def test_updates_that_overlap_the_next_forward_change_nothing() -> None:
    case = CASES["llama"]
    model = case.model(torch.float32)
    model, _ = forebay.prepare(
        model, adamw(list(model.parameters())), device_memory=AMPLE, policy="stream", device="cuda"
    )
    plan = forebay.report(model).plan
    forebay.close(model)
    assert plan.streaming.overlap_update
    for streaming in (plan.streaming, replace(plan.streaming, overlap_update=False, poison=True)):
        made = replace(plan, streaming=streaming)
        model = assert_same_training(case, torch.float32, clip=None, plan=made, device_memory=AMPLE, device="cuda")
        forebay.close(model)


def test_a_reentrant_checkpoint_around_what_streams() -> None:
    """Planned without a batch. It runs again without any hooks for saved tensors; the numbers were NaN."""

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        return stepped(optimizer, (model(batch().to("cuda").requires_grad_()).square().mean() for _ in range(3)))

    plain, module = made(by_itself_reentrant).to("cuda"), made(by_itself_reentrant)
    expected = losses(plain, fused_adamw(plain))
    model, optimizer = forebay.prepare(module, fused_adamw(module), device_memory=AMPLE, policy="stream", device="cuda")
    assert losses(model, optimizer) == expected
    forebay.close(model)
