"""Parameters that a model reads itself, outside of their module's forward: there for the whole of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.errors import CannotServe, ConfigError
from forebay.memory import Tier
from forebay.plans import Plan
from tests.null.planning import machine

WIDTH, WORDS = 64, 1000


class Reading(nn.Module):
    """A language model whose loss is computed from the weight of a head that is never called."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        logits = F.linear(hidden, self.head.weight)
        return F.cross_entropy(logits[:, :-1].flatten(end_dim=1), ids[:, 1:].flatten())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_it_trains_with_the_numbers_of_plain_pytorch(policy: str, *, tied: bool) -> None:
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = Reading(tied=tied)
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), ids)
    model = Reading(tied=tied)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    _, optimizer = forebay.prepare(model, made, ids, device_memory="1800KiB", policy=policy)
    plan = forebay.report(model).plan
    # A tied weight is read by the embedding's forward first: it is that block that is held.
    assert plan.read_outside == (("embedding",) if tied else ("head",))
    assert any(not placed.resident for placed in plan.placements if placed.block in plan.read_outside)
    assert trained(model, optimizer, ids) == expected
    record = forebay.report(model)
    assert record.measured_peaks()[Tier.DEVICE] <= record.predicted_peaks()[Tier.DEVICE]
    forebay.close(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_plan_from_json_says_what_is_read() -> None:
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    trace = forebay.profile(Reading(tied=False), ids)
    held = [block.name for block in trace.model.blocks if block.held]
    assert held == ["head"] == [block.name for block in trace.model.blocks if block.is_read_outside]
    text = forebay.plan(trace, machine(kind="cpu"), forebay.Budget(device=1800 << 10), "stream").to_json()
    model = Reading(tied=False)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, optimizer = forebay.prepare(model, made, ids, device_memory="1800KiB", plan=Plan.from_json(text))
    assert len(trained(model, optimizer, ids)) == 3
    forebay.close(model)


def test_a_plan_that_names_another_block_is_refused() -> None:
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    trace = forebay.profile(Reading(tied=False), ids)
    plan = forebay.plan(trace, machine(kind="cpu"), forebay.Budget(device=1800 << 10), "stream")
    odd = replace(plan, read_outside=("tail",))
    model = Reading(tied=False)
    with pytest.raises(ConfigError, match="'tail'"):
        forebay.prepare(model, torch.optim.AdamW(model.parameters()), ids, device_memory="1800KiB", plan=odd)


class Checkpointed(Reading):
    """Runs what makes the logits again in backward: by itself, or by calling the head."""

    def __init__(self, *, calls: bool, reentrant: bool) -> None:
        super().__init__(tied=False)
        self.calls, self.reentrant = calls, reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.head(hidden) if self.calls else F.linear(hidden, self.head.weight)
            return made

        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        made = checkpoint(logits, hidden, use_reentrant=self.reentrant)
        return F.cross_entropy(made[:, :-1].flatten(end_dim=1), ids[:, 1:].flatten())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_reads_itself_has_to_stay(*, reentrant: bool) -> None:
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = Checkpointed(calls=False, reentrant=reentrant)
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), ids)
    model = Checkpointed(calls=False, reentrant=reentrant)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with pytest.raises(
        CannotServe, match=r"reads parameters of head in backward.*call the module inside it"
    ) as refused:
        forebay.prepare(model, made, ids, device_memory="1800KiB", policy="stream")
    (remedy,) = refused.value.nearest
    # What it names is enough, to the byte.
    _, optimizer = forebay.prepare(model, made, ids, device_memory=remedy.needed)
    assert trained(model, optimizer, ids) == expected
    forebay.close(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_a_checkpoint_calls_is_brought(*, reentrant: bool) -> None:
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = Checkpointed(calls=True, reentrant=reentrant)
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), ids)
    model = Checkpointed(calls=True, reentrant=reentrant)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    _, optimizer = forebay.prepare(model, made, ids, device_memory="1800KiB", policy="stream")
    assert not any(placed.resident for placed in forebay.report(model).plan.placements)
    assert trained(model, optimizer, ids) == expected
    forebay.close(model)
