"""What a plan leaves to the allocator's pages is enough: budgets to which nothing could be added run to the end."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import forebay
from forebay.errors import DoesNotFit
from forebay.units import MiB

pytestmark = pytest.mark.gpu

BATCH, LENGTH, VOCABULARY = 4, 512, 50257
STEPS = 4


def opened(loss: str, device_memory: int, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A GPT-2 of four layers with all of its vocabulary: its logits are large, and what it keeps of blocks is small."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepared: tuple[torch.nn.Module, torch.optim.Optimizer] = forebay.prepare(
        model, optimizer, batch_on("cpu"), device_memory=device_memory, device=device, loss=loss
    )
    return prepared


def batch_on(device: str) -> Mapping[str, torch.Tensor]:
    ids = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def trained(loss: str, device_memory: int, device: str) -> list[float]:
    model, optimizer = opened(loss, device_memory, device)
    losses = []
    try:
        for _ in range(STEPS):
            found = model(**batch_on(device)).loss
            found.backward()
            losses.append(float(found.detach()))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        forebay.close(model)
    return losses


def least(loss: str, device: str) -> int:
    """Bytes that refusals name until there is a plan: workspaces first, then what the model needs beside them."""
    budget = MiB
    for _ in range(4):
        try:
            model, _ = opened(loss, budget, device)
        except DoesNotFit as refusal:
            budget = max(budget + 1, refusal.needed)
        else:
            forebay.close(model)
            return budget
    raise AssertionError(f"refusals named {budget} bytes at last, and that was refused too")


@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize("more", [0, 48 * MiB, 256 * MiB])
def test_the_least_budget_and_more_run(loss: str, more: int) -> None:
    """No request finds the card full, and the loss goes down."""
    losses = trained(loss, least(loss, "cuda") + more, "cuda")
    assert losses[-1] < losses[0]
