"""``auto`` and every published policy for model states train a Llama-, a T5- and a MoE-shaped model with the numbers of
plain PyTorch, bit for bit, within their budgets of device, host and disk; those that change the numbers in their exact
mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.errors import CannotServe
from forebay.memory import Tier
from forebay.planners import INEXACT, STATES
from forebay.plans import Plan
from forebay.trace import Trace
from forebay.units import MiB
from tests.null.planning import machine
from tests.parity.compare import adamw
from tests.parity.models import VOCABULARY, Case, tokens
from tests.parity.offloading import trace_of
from tests.parity.recomputing import AMPLE

POLICIES = ("auto", *STATES, *INEXACT)

STEPS, MICRO_BATCHES = 2, 2
CLIP = 0.5

GROUPED = {"harmony", "mobius"}
"""They are for steps of several micro-batches, which pass a layer together."""

WITH_DISK = {"auto", "zero-infinity", "angel-ptm", "angel-ptm-lock-free", "mobius", "moesys", "lohan"}
"""They use the disk where the host has too little room."""

ON_DISK = {"smart-infinity", "smart-infinity-compressed"}
"""They use it whatever room the host has."""

REFUSED = {("moesys", "llama"), ("moesys", "t5")}
"""It is for models with experts."""

DISK = 64 * MiB

HOME_BYTES = 16
"""Of a parameter, all of them fp32: itself, its gradient and two states."""


def _llama() -> nn.Module:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def _t5() -> nn.Module:
    sizes = {"d_model": 192, "d_kv": 48, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


def _moe() -> nn.Module:
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes, **experts))


SHAPES: Mapping[str, Case] = {"llama": Case(_llama, tokens), "t5": Case(_t5, tokens), "moe": Case(_moe, tokens)}


def planned(trace: Trace, policy: str, budget: Budget) -> Plan:
    on = machine(kind="cpu", disk=None if budget.disk is None else 1e8)
    plan = forebay.plan(trace, on, budget, policy, micro_batches=MICRO_BATCHES if policy in GROUPED else 1)
    return plan if plan.streaming.gradient_density is None else with_all_elements(plan, trace)


def with_all_elements(plan: Plan, trace: Trace) -> Plan:
    """``plan`` with all elements of a gradient among its largest, each with its place: nothing is left over."""
    streaming = replace(plan.streaming, gradient_density=1.0)
    sizes = arenas(trace.model, plan.placements, streaming, trace.state_names)
    return replace(plan, streaming=streaming, host=sizes.host, disk=sizes.disk, changes_numbers=())


@dataclass(frozen=True)
class Plain:
    """A model as plain PyTorch trains it: the losses of every micro-batch, and what its parameters are in the end.
    ``device`` bytes are what zero-offload takes, ``host`` too few for all of it."""

    shape: str
    case: Case
    trace: Trace
    device: int
    host: int
    losses: tuple[torch.Tensor, ...]
    values: Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", params=SHAPES)
def plain(request: pytest.FixtureRequest) -> Plain:
    case = SHAPES[request.param]
    trace = trace_of(case, torch.float32)
    resident, needed = (planned(trace, policy, Budget(AMPLE, AMPLE)).device for policy in ("resident", "zero-offload"))
    assert needed < resident
    model = case.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses = _trained(model, optimizer, case, lambda batches: _looped(model, batches))
    homes = HOME_BYTES * sum(parameter.numel() for parameter in model.parameters())
    return Plain(request.param, case, trace, needed, homes - homes // 10, losses, dict(model.named_parameters()))


@pytest.mark.thinned(16)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_with_the_same_numbers(plain: Plain, policy: str, tmp_path: Path) -> None:
    host, disk = plain.host if policy in WITH_DISK else AMPLE, DiskBudget(str(tmp_path), DISK)
    budget = Budget(plain.device, host, None, disk)
    if (policy, plain.shape) in REFUSED:
        with pytest.raises(CannotServe, match=r"policy moesys .*experts"):
            planned(plain.trace, policy, budget)
        return
    plan = planned(plain.trace, policy, budget)
    assert plan.planner == policy and any(not placement.resident for placement in plan.placements)
    # In turns other numbers come out (test_update_turns.py): a round of one step is what is exact of them.
    if plan.streaming.update_every > 1:
        plan = replace(plan, streaming=replace(plan.streaming, update_every=1), changes_numbers=())
    # Delayed updates come behind steps that are exact: all of these are.
    assert plan.streaming.delay_after is None or plan.streaming.delay_after >= STEPS
    model = plain.case.model(torch.float32)
    model, optimizer = forebay.prepare(
        model,
        adamw(list(model.parameters())),
        plain.case.inputs(0, torch.float32),
        device_memory=plain.device,
        host_memory=host,
        disk=f"{tmp_path}:{DISK}",
        plan=plan,
        device="cpu",
    )

    def passed(batches: list[dict[str, Any]]) -> list[torch.Tensor]:
        return forebay.accumulate(model, batches, _loss) if policy in GROUPED else _looped(model, batches)

    try:
        losses = _trained(model, optimizer, plain.case, passed)
        assert all(map(torch.equal, losses, plain.losses))
        values = forebay.parameters(model)
        assert all(torch.equal(values[name], value) for name, value in plain.values.items())
        report = forebay.report(model)
    finally:
        forebay.close(model)
    peaks, promised = report.measured_peaks(), report.predicted_peaks()
    assert peaks[Tier.DEVICE] <= promised[Tier.DEVICE] <= plain.device
    assert peaks[Tier.HOST] <= promised[Tier.HOST] <= host
    assert peaks[Tier.DISK] == promised[Tier.DISK] <= DISK
    assert (peaks[Tier.DISK] > 0) == (policy in WITH_DISK | ON_DISK)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"] / MICRO_BATCHES
    return loss


def _looped(model: nn.Module, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = _loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, passed: Any) -> tuple[torch.Tensor, ...]:
    """The losses of every micro-batch. The last step is clipped: what was updated ahead of it is then undone."""
    losses: list[torch.Tensor] = []
    for step in range(STEPS):
        losses += passed([case.inputs(MICRO_BATCHES * step + micro, torch.float32) for micro in range(MICRO_BATCHES)])
        if step == STEPS - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return tuple(losses)
