"""Mixtures of experts whose sizes follow from the routes: a promise of device memory that holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import device_bound
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.profiler.probe import nominal
from forebay.profiler.routing import EXTREMES, Routing, route
from forebay.trace import Trace
from tests.parity.compare import adamw
from tests.parity.models import VOCABULARY
from tests.parity.observed import AMPLE
from tests.parity.test_capture_values import MOES
from tests.parity.test_lowering_order import prepared_plan, streamed
from tests.parity.unseen import Unseen

WINDOW = 4096
TOKENS, K, N = 2 * 48, 2, 4

Picks = Callable[[], torch.Tensor]


def batch() -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def built(name: str, kind: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    return MOES[name](kind).train()


def drawn() -> torch.Tensor:
    """Experts drawn without replacement, each with a weight of its own."""
    weights = torch.tensor([0.1, 3.0, 1.0, 0.02]).expand(TOKENS, N)
    return weights.multinomial(K, generator=torch.Generator().manual_seed(1))


ROUTES: dict[str, Picks] = {
    **{routing.value: lambda routing=routing: route(routing, TOKENS, K, N) for routing in Routing},  # type: ignore[misc]
    "two only": lambda: torch.arange(K).repeat(TOKENS, 1),
    "middle": lambda: torch.arange(1, 1 + K).repeat(TOKENS, 1),
    "drawn": drawn,
}


@cache
def traced(name: str) -> Trace:
    return capture(built(name), batch()).trace


def forced(model: nn.Module, picks: torch.Tensor) -> nn.Module:
    """Makes every router choose ``picks``."""

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        return output[0], output[1], picks

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(choose)
    return model


def measured(name: str, plan: Plan, picks: torch.Tensor) -> int:
    """Peak of the device's ledger over two steps, in bytes."""
    model = forced(built(name), picks)
    model, optimizer = forebay.prepare(model, adamw(list(model.parameters())), device_memory=AMPLE, plan=plan)
    for _ in range(2):
        output = model(**batch())  # held while the next forward runs, as loops do
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    forebay.synchronize(model)
    usage = forebay.report(model).timeline.usage(Tier.DEVICE)
    forebay.close(model)
    return usage.peak


def planned(name: str, trace: Trace, *, recompute: bool) -> Plan:
    plan = streamed(trace, prepared_plan(built(name), "stream"), 3, distance=1, window=WINDOW)
    layers = tuple(b.name for b in trace.model.blocks if b.module is not None and b.name[-1].isdigit())
    return replace(plan, recompute=layers if recompute else ())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_a_promise_holds_for_every_routing_and_is_near_the_worst(name: str, recompute: bool) -> None:
    trace = traced(name)
    plan = planned(name, trace, recompute=recompute)
    bound = device_bound(trace, plan)
    peaks = {key: measured(name, plan, picks()) for key, picks in ROUTES.items()}
    assert max(peaks.values()) <= bound
    assert bound <= max(peaks[routing.value] for routing in EXTREMES) * 1.03 + WINDOW
    if recompute:  # as long as all that is saved stays, all routes save the same
        assert device_bound(replace(trace, extremes=()), plan) < peaks[Routing.EARLY_SUM.value]


def test_the_checker_wants_the_promise_for_every_routing() -> None:
    trace = traced("mixtral")
    plan = planned("mixtral", trace, recompute=True)
    alone, most = device_bound(replace(trace, extremes=()), plan), device_bound(trace, plan)
    check(trace, nominal("cpu"), replace(plan, device=most))
    with pytest.raises(PlanInvalid, match=f"predicts a device peak of {alone} bytes"):
        check(trace, nominal("cpu"), replace(plan, device=alone))


def forwards(model: nn.Module) -> list[None]:
    """Grows by one with every forward of ``model``."""
    seen = Unseen()
    model.register_forward_pre_hook(lambda *_: seen.note(None))
    return seen.found


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("kind", "extremes"), [("eager", len(EXTREMES)), ("grouped_mm", 0)])
@pytest.mark.parametrize("name", MOES)
def test_only_sizes_that_follow_from_routes_are_captured_again(name: str, kind: str, extremes: int) -> None:
    model = built(name, kind)
    seen = forwards(model)
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    trace = capture(model, batch()).trace
    assert (len(trace.extremes), len(seen)) == (extremes, 1 + extremes)
    assert {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()} == hooks
    assert all(p.grad is None for p in model.parameters())
    assert any("memory holds for any routing" in note for note in trace.notes) is bool(extremes)
    assert all(not extreme.notes for extreme in trace.extremes)


def test_a_trace_with_extremes_is_the_same_every_time_and_goes_to_json() -> None:
    trace = traced("mixtral")
    assert trace.extremes and capture(built("mixtral"), batch()).trace == trace
    assert Trace.from_json(trace.to_json()) == trace


class Counted(nn.Module):
    """Asks for what follows from its router's picks, and for no size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        picks = scores.topk(2, dim=-1).indices
        return scores.sum() * float(picks.sum().item() > 0)


def test_what_is_asked_for_and_decides_no_size_is_no_extreme() -> None:
    model = Counted()
    seen = forwards(model)
    trace = capture(model, {"x": torch.randn(6, 8)}).trace
    assert (trace.extremes, len(seen)) == ((), 2)
    assert not any("memory" in note for note in trace.notes)


@pytest.mark.parametrize(("tokens", "k", "n"), [(1, 1, 2), (1, 3, 8), (2, 2, 3), (5, 2, 8), (9, 4, 6), (40, 8, 64)])
@pytest.mark.parametrize("routing", Routing)
def test_routes(routing: Routing, tokens: int, k: int, n: int) -> None:
    picks = route(routing, tokens, k, n)
    assert picks.shape == (tokens, k) and int(picks.min()) >= 0 and int(picks.max()) < n
    assert all(len(set(row)) == k for row in picks.tolist())
    rows = picks.flatten().bincount(minlength=n).tolist()
    if routing is Routing.BALANCED:
        assert max(rows) - min(rows) <= 1
        return
    running = n - 1 if routing is Routing.LATE else k - 1
    alone = k == 1 and routing is not Routing.LATE  # it gives the spare rows itself
    spare = {Routing.EARLY: 1, Routing.EARLY_SUM: 2, Routing.LATE: 0}[routing]
    assert rows[running] >= tokens - spare * alone
    held = sum(rows[:k]) if routing is not Routing.LATE else sum(rows)
    assert held >= k * tokens - spare
