"""What naming ops of recomputed blocks costs and saves: ops that run, bytes on the device, bytes that are let go."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import forebay
from forebay.memory import Kind, Tier, TierUsage
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.treatments import Fate, Selection, Treatment
from tests.parity.compare import adamw
from tests.parity.models import Case
from tests.parity.offloading import trace_of
from tests.parity.recomputing import AMPLE, plan_of, recomputable
from tests.parity.test_recompute_edges import DEPTH, FLOAT, LAYERS, ROWS, TOWER, WIDTH
from tests.parity.treated import SUBJECTS, eligible, host_nbytes, treated

WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
GELU = "aten.gelu.default"
KEPT = ROWS * 4 * WIDTH * FLOAT
"""Bytes of what GELU makes in a layer of the tower, and of what it is given."""


class Ops(TorchDispatchMode):
    """Counts what really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_a_pass(case: Case, plan: Plan) -> Counter[str]:
    model = case.model(torch.float32)
    model, _ = forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")
    # The first pass puts the byte ledger's mode on, which stays: one that is entered after it can be left again.
    model(**case.inputs(0, torch.float32))["loss"].backward()
    with Ops() as ops:
        model(**case.inputs(1, torch.float32))["loss"].backward()
    forebay.close(model)
    del ops.ran["aten.detach.default"]  # a look at what is there, of which the runtime takes some
    return ops.ran


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["llama", "gpt2-dropout", "t5", "vit", "convnet"])
def test_what_is_named_does_not_run_again_and_all_else_does(name: str) -> None:
    """Beside a pass that recomputes nothing, a pass runs the ops of its blocks' forwards again up to the last tensor
    that is saved there, without those that are named, each as often as the plan says."""
    case = SUBJECTS[name]
    trace = trace_of(case, torch.float32)
    blocks = recomputable(trace.model)
    recomputing = plan_of(trace.model, blocks, resident=True)
    every = eligible(trace)
    every = every[::2] + every[1::4]
    named = Counter(one.op for one in every if one.again)
    assert named
    whole = ops_of_a_pass(case, recomputing)
    kept = ops_of_a_pass(case, treated(recomputing, dict.fromkeys(every, Fate.KEEP)))
    assert whole - kept == named
    assert kept - whole == Counter()
    plain = ops_of_a_pass(case, plan_of(trace.model, (), resident=True))
    for op in named:
        again = sum(
            trace.works[o.work].op == op
            for v in trace.visits
            if v.block in blocks
            for o in trace.segments[v.segment].ops[: max(0, trace.segments[v.segment].saves_until)]
        )
        assert kept[op] - plain[op] == again - named[op], op


def tower(recompute: Iterable[str], op: str, fate: Fate | None, resident: bool) -> Plan:
    """The first GELU of every layer that recomputes has ``fate``."""
    plan = plan_of(find_blocks(TOWER.model(torch.float32)).model, recompute, resident=resident)
    trace = trace_of(TOWER, torch.float32)
    named = [one for one in eligible(trace) if one.op == op and one.block in plan.recompute and fate is not None]
    return treated(plan, dict.fromkeys(named, fate)) if fate is not None and named else plan


def usage(plan: Plan) -> TierUsage:
    """Device bytes of two steps, of which the second is like all that follow."""
    model = TOWER.model(torch.float32)
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu"
    )
    for step in range(2):
        model(**TOWER.inputs(step, torch.float32))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    found = forebay.report(model).timeline.usage(Tier.DEVICE)
    forebay.close(model)
    return found


@WHERE
@pytest.mark.parametrize("count", [1, DEPTH - 1])
def test_the_peak_lies_between_by_what_is_kept(count: int, resident: bool) -> None:
    """A layer saves its input (n w floats), what goes into GELU and what comes out (4 n w each). The peak is in the
    backward of the last layer. With k layers before it recomputed it is lower by 8 n w for each of them; with their
    GELU kept by 4 n w only; with their GELU on the host by 8 n w again."""
    nothing = usage(tower([], GELU, None, resident))
    recomputed = usage(tower(LAYERS[:count], GELU, None, resident))
    kept = usage(tower(LAYERS[:count], GELU, Fate.KEEP, resident))
    moved = usage(tower(LAYERS[:count], GELU, Fate.OFFLOAD, resident))
    assert nothing.peak - kept.peak == count * KEPT
    assert kept.peak - recomputed.peak == count * KEPT
    assert moved.peak == recomputed.peak
    assert kept.at_peak[Kind.ACTIVATION] - recomputed.at_peak[Kind.ACTIVATION] == count * KEPT


class Late(nn.Module):
    """A layer whose last op comes after all that it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 1.0


class Lates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Late() for _ in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().sum()}


def live(model: nn.Module, tier: Tier = Tier.DEVICE) -> int:
    gc.collect()
    return forebay.report(model).timeline.usage(tier).live


def with_plan(model: nn.Module, ops: Iterable[str], fate: Fate, resident: bool = True) -> nn.Module:
    """``model``, prepared: every layer recomputes, and the first run of each of ``ops`` in it has ``fate``."""
    plan = plan_of(find_blocks(model).model, LAYERS, resident=resident)
    chosen = Selection(tuple(LAYERS), tuple(Treatment(op, 0, fate) for op in ops))
    arena = AMPLE // 16 if fate is Fate.OFFLOAD else 0
    streaming = replace(plan.streaming, host_activations=arena)
    plan = replace(plan, activations=(chosen,), streaming=streaming, host=plan.host + arena)
    return forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")[0]


def test_what_no_recomputation_will_ask_for_is_not_kept() -> None:
    """The product comes after the last tensor that is saved: kept, each layer would hold n w floats more."""
    bytes_after = []
    for ops in (["aten.addmm.default"], ["aten.relu.default"]):
        model = with_plan(Lates(), ops, Fate.KEEP)
        loss = model(torch.randn(ROWS, WIDTH))["loss"]
        bytes_after.append(live(model))
        loss.backward()
        forebay.close(model)
    assert bytes_after[0] == bytes_after[1]


@pytest.mark.parametrize("fate", list(Fate))
def test_a_graph_that_nobody_runs_backward_is_freed(fate: Fate) -> None:
    model = with_plan(TOWER.model(torch.float32), [GELU, "aten.addmm.default"], fate)
    attachment = session_of(model)
    assert attachment is not None
    stash = attachment.session.stash
    before = live(model)
    for _ in range(3):
        loss = model(**TOWER.inputs(0, torch.float32))["loss"]
        held = live(model) - before, stash.taken
        # n x 4w floats twice (what GELU is given is the first product): on the device or on the host.
        assert held[fate is Fate.OFFLOAD] >= 2 * KEPT * DEPTH
        assert fate is Fate.OFFLOAD or not stash.taken
        del loss
    forebay.synchronize(model)
    assert live(model) == before
    assert stash.taken == 0
    forebay.close(model)


@pytest.mark.parametrize("fate", list(Fate))
def test_evaluation_keeps_nothing(fate: Fate) -> None:
    model = with_plan(TOWER.model(torch.float32), [GELU], fate)
    before = live(model)
    with torch.no_grad():
        model(**TOWER.inputs(0, torch.float32))
    assert live(model) == before
    forebay.close(model)


def test_the_arena_is_as_large_as_the_formula_says() -> None:
    trace = trace_of(TOWER, torch.float32)
    named = [one for one in eligible(trace) if one.op == GELU]
    plan = tower(LAYERS, GELU, Fate.OFFLOAD, resident=True)
    assert plan.streaming.host_activations == host_nbytes(named) == DEPTH * KEPT
    model = TOWER.model(torch.float32)
    model, _ = forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")
    model(**TOWER.inputs(0, torch.float32))["loss"].backward()
    assert forebay.report(model).timeline.counters["activations_kept"] == 0
    moved = [e for e in forebay.report(model).timeline.events if e.what.startswith("offload ")]
    assert [e.what for e in moved] == [f"offload {layer} {GELU}#0" for layer in LAYERS]
    forebay.close(model)
