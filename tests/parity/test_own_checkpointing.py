"""Activation checkpointing that a model of transformers was told to do by itself: left to the plan."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.cli.plan import PlanSettings, capture_step
from forebay.memory import Tier
from forebay.recipes.tasks import Sample
from forebay.runtime.own_checkpointing import LEFT_TO_THE_PLAN
from tests.null.planning import machine


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


def test_a_step_is_profiled_as_it_runs_under_a_plan() -> None:
    own, here = model(checkpointing=True), machine(kind="cpu")
    trace = forebay.profile(own, batch(), adamw(own))
    assert on(own) == [True, True]
    plain = model(checkpointing=False)
    assert trace == forebay.profile(plain, batch(), adamw(plain))
    captured, _ = capture_step(PlanSettings(model="own"), Sample("own", own, batch(), 16), here, None)
    assert on(own) == [True, True] and captured.trace == forebay.profile(plain, batch())
    plan = forebay.plan(trace, here, forebay.Budget(device=2 << 20), "stream")
    # Exactly what that plan takes: with what a checkpointed step takes, the first step would not fit.
    _, optimizer = forebay.prepare(own, adamw(own), batch(), device_memory=plan.device, plan=plan)
    losses(own, optimizer)
    record = forebay.report(own)
    assert record.measured_peaks()[Tier.DEVICE] <= record.predicted_peaks()[Tier.DEVICE] == plan.device
    forebay.close(own)
    assert on(own) == [True, True]


def test_several_models_leave_it_to_their_plans() -> None:
    own, plain = model(checkpointing=True), model(checkpointing=False)
    given = [(one, adamw(one), batch()) for one in (own, plain)]
    with pytest.raises(forebay.errors.DoesNotFit):
        forebay.prepare_several(given, device_memory="8KiB")
    assert on(own) == [True, True]
    (_, first), (_, second) = forebay.prepare_several(given, device_memory="4MiB", policy="stream")
    assert on(own) == [False, False]
    plans = [forebay.report(one).plan for one in (own, plain)]
    assert [LEFT_TO_THE_PLAN in plan.reasons for plan in plans] == [True, False]
    assert plans[0].device == plans[1].device
    found = forebay.alternate([own, plain], [lambda: losses(own, first), lambda: losses(plain, second)])
    assert found[0] == found[1]
    for one in (own, plain):
        forebay.close(one)
    assert on(own) == [True, True] and on(plain) == [False, False]
