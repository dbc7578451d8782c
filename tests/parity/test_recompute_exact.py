"""What recomputing blocks costs is foretold to the op and to the byte, on models of several families.

torch ends a recomputation when the last tensor that it saved in forward has been made again. So fewer ops run again
than the block's forward has, and what these would have made is never there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import forebay
from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.profiler.work import is_view
from forebay.program import Program
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.trace import NO_SAVES, Phase, Trace
from tests.null.strategies import roomy_machine
from tests.parity.compare import adamw
from tests.parity.models import CASES, Case, images
from tests.parity.recomputing import AMPLE, plan_for, recomputable


class Scale(nn.Module):
    """Its only op saves what it is given, before it runs: nothing of it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Layer(nn.Module):
    """Two products: the second saves what it is given, before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(32, 64) / 8)
        self.down = nn.Parameter(torch.randn(64, 32) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x @ self.up) @ self.down


class InARow(nn.Module):
    """A layer that is called three times, nothing in between; and blocks of one op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 32)
        self.layers = nn.ModuleList([Layer(), Layer(), Scale(), Scale()])
        self.head = nn.Linear(32, 4)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(pixel_values[:, :, :4, :4].flatten(1))
        for layer in (self.layers[0], self.layers[0], *self.layers):
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


SUBJECTS: Mapping[str, Case] = {
    **{name: CASES[name] for name in ("llama", "gpt2", "t5", "vit", "mixtral", "convnet", "used-twice", "frozen")},
    "in-a-row": Case(InARow, images),
}
WHICH = pytest.mark.parametrize("every", [1, 2], ids=["all", "some"])


def batch(name: str) -> dict[str, Any]:
    """Language models without a cache: what a recomputation remembers of one is no activation of the step."""
    made = SUBJECTS[name].inputs(0, torch.float32)
    return {**made, "use_cache": False} if "input_ids" in made else made


@cache
def traced(name: str) -> Trace:
    return capture(SUBJECTS[name].model(torch.float32), batch(name)).trace


def foretold(name: str, every: int) -> tuple[Trace, Plan, Program]:
    """Everything resident, each ``every``-th block recomputed."""
    trace = traced(name)
    plan = plan_for(SUBJECTS[name], torch.float32, recomputable(trace.model)[::every], resident=True)
    assert plan.recompute
    return trace, plan, lower(trace, plan)


class Ops(TorchDispatchMode):
    """Counts what runs, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_view(func):
            self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def trained(name: str, plan: Plan) -> tuple[Counter[str], int]:
    """The ops of the second pass, and the device's peak over three steps."""
    model = SUBJECTS[name].model(torch.float32)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, optimizer = forebay.prepare(model, optimizer, device_memory=AMPLE, plan=plan, device="cpu")
    inputs = batch(name)
    for step in range(3):
        # The first pass puts the byte ledger's mode on, which stays: one that is entered after it can be left again.
        with Ops() if step else contextlib.nullcontext(Ops()) as ops:
            output = model(**inputs)  # held while the next forward runs, as loops do
            output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        forebay.synchronize(model)  # so that the next pass runs no update
    usage = forebay.report(model).timeline.usage(Tier.DEVICE)
    forebay.close(model)
    return ops.ran, usage.peak


def in_program(trace: Trace, program: Program) -> Counter[str]:
    """The ops of the last pass of a program, by name, views left out."""
    names = [trace.works[op.work].op for _, _, op in trace.ops()]
    compute = [a for a in program.actions if a.step == program.steps - 1 and a.ops[0] < a.ops[1]]
    found = Counter(names[n] for action in compute for n in range(*action.ops))
    return Counter({name: n for name, n in found.items() if not is_view(_overload(name))})


def _overload(name: str) -> Any:
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


@pytest.mark.thinned(3)
@WHICH
@pytest.mark.parametrize("name", SUBJECTS)
def test_ops_and_peak(name: str, every: int) -> None:
    trace, plan, program = foretold(name, every)
    ran, peak = trained(name, plan)
    usage = play(program, Costs(trace, roomy_machine(trace.device), Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak == peak
    expected = in_program(trace, program)
    # A recomputation works on copies of the block's buffers: three of a batch norm. Of the one that its forward changes
    # by an op of its own, the count of batches, there is a copy from before that.
    copies = 4 * len([b for b in plan.recompute if name == "convnet" and _has_norm(trace, b)])
    expected["aten.clone.default"] += copies
    assert +expected == ran


def _has_norm(trace: Trace, block: str) -> bool:
    return any(t.name.startswith(f"{block}.") and "running_mean" in t.name for t in trace.sources)


def remade(trace: Trace, block: str) -> list[tuple[int, int]]:
    """Of every forward visit of a block: its ops, and how many of them run again."""
    visits = [v for v in trace.visits if v.block == block and v.phase is Phase.FORWARD]
    return [(len(trace.segments[v.segment].ops), trace.segments[v.segment].saves_until) for v in visits]


def test_calls_that_follow_each_other_are_recomputed_one_by_one() -> None:
    trace, _, program = foretold("in-a-row", 1)
    assert remade(trace, "layers.0") == [(3, 2)] * 3
    assert remade(trace, "layers.1") == [(3, 2)]
    assert remade(trace, "layers.2") == [(1, 0)]
    again = [a.what for a in program.actions if a.recomputed and a.step == program.steps - 1]
    # Of the blocks of one op nothing is run again.
    assert [w for w in again if "layers" in w] == ["recompute layers.1", *["recompute layers.0"] * 3]


def test_a_frozen_block_before_all_trained_ones_saves_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    trace = capture(model, (torch.randn(2, 8),), blocks=["0", "1", "2"]).trace
    assert remade(trace, "0") == [(2, NO_SAVES)]
    assert remade(trace, "1") == [(2, 1)]


@WHICH
@pytest.mark.parametrize("name", ["llama", "t5", "convnet", "in-a-row"])
def test_the_checker_finds_the_same(name: str, every: int) -> None:
    trace, plan, program = foretold(name, every)
    check(trace, roomy_machine(trace.device), plan, program)
    last = max(i for i, a in enumerate(program.actions) if a.recomputed)
    for more in (-1, 1):
        first, stop = program.actions[last].ops
        actions = list(program.actions)
        actions[last] = replace(actions[last], ops=(first, stop + more))
        with pytest.raises(PlanInvalid, match=r"is run again|not run again|not in memory"):
            check(trace, roomy_machine(trace.device), plan, replace(program, actions=tuple(actions)))
