"""Activation checkpointing that a model of transformers was told to do by itself: left to the plan."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.runtime.own_checkpointing import LEFT_TO_THE_PLAN


def model(*, checkpointing: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **shape)).train()
    if checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def on(made: LlamaForCausalLM) -> list[bool]:
    return [layer.gradient_checkpointing for layer in made.model.layers]


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def losses(made: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        loss = made(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(made: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_the_plan_says_what_runs_again(policy: str) -> None:
    plain = model(checkpointing=True)
    expected = losses(plain, adamw(plain))
    own = model(checkpointing=True)
    _, optimizer = forebay.prepare(own, adamw(own), batch(), device_memory="2MiB", policy=policy)
    assert on(own) == [False, False]
    assert LEFT_TO_THE_PLAN in forebay.report(own).plan.reasons
    assert losses(own, optimizer) == expected
    forebay.close(own)
    assert on(own) == [True, True]


def test_it_stays_on_where_nobody_knows_the_activations_or_nothing_fits() -> None:
    own = model(checkpointing=True)
    forebay.prepare(own, adamw(own), device_memory="2MiB", policy="stream")
    assert on(own) == [True, True] and LEFT_TO_THE_PLAN not in forebay.report(own).plan.reasons
    forebay.close(own)
    with pytest.raises(forebay.errors.DoesNotFit):
        forebay.prepare(own, adamw(own), batch(), device_memory="4KiB")
    assert on(own) == [True, True]


def test_a_model_without_it_is_left_alone() -> None:
    own = model(checkpointing=False)
    forebay.prepare(own, adamw(own), batch(), device_memory="2MiB", policy="stream")
    assert LEFT_TO_THE_PLAN not in forebay.report(own).plan.reasons
    forebay.close(own)
    assert on(own) == [False, False]
