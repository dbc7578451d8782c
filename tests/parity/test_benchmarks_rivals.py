"""The rivals of the activations benchmark: what they compute, and how the bytes of their device are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch

import forebay
from benchmarks.activations import rivals
from benchmarks.activations.loop import Loop, Planned, counted
from benchmarks.activations.models import NO_DROPOUT, ZooModel
from benchmarks.case import DeviceKind, Job
from benchmarks.models import LlamaShape
from forebay.memory import Tier
from forebay.profiler.compiled import allocations, peak_of

ROWS, WIDTH, DEPTH = 1024, 64, 4
UNIT = ROWS * WIDTH * 4
"""Bytes of one activation in fp32."""
WEIGHTS = DEPTH * WIDTH * WIDTH * 4


class Output(NamedTuple):
    loss: torch.Tensor


class Stack(torch.nn.Module):
    """``DEPTH`` times a matrix product and a sigmoid, each of which saves one activation; the loss is a sum."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return Output(x.sum())


@dataclass(frozen=True)
class Stacked:
    """Builds and feeds a ``Stack`` as a ``ZooModel`` does."""

    def build(self, seq: int, device: str) -> torch.nn.Module:
        torch.manual_seed(0)
        return Stack()

    def batch(self, batch: int, seq: int, device: str, seed: int) -> Mapping[str, torch.Tensor]:
        return {"x": torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed))}


JOB = Job(cast(LlamaShape, Stacked()), ROWS, 0, DeviceKind.CPU, Path())


def ran(rival: rivals.Rival) -> tuple[list[float], dict[str, int]]:
    """Losses of two steps, and peaks of the steps that follow."""
    running = rival.start(JOB)
    running.reset(2, first_seed=1)
    losses = [running.read(running.step(index)) for index in range(2)]
    peaks = dict(running.account().peaks)
    running.close()
    return losses, peaks


def test_saved_activations_are_host_bytes_under_save_on_cpu_and_the_losses_are_plains() -> None:
    plain, device = ran(rivals.PLAIN)
    saving, moved = ran(rivals.SAVE_ON_CPU)
    assert saving == plain
    # A copy for every save: what each product reads, what each sigmoid made, and the parameters but the first, whose
    # product needs no gradient of its input.
    assert device["host"] == 0
    assert moved["host"] == 2 * DEPTH * UNIT + (DEPTH - 1) * WEIGHTS // DEPTH
    assert device["device"] - moved["device"] > UNIT


def test_the_ledger_and_the_allocator_agree_on_the_peak_of_a_rival() -> None:
    _, peaks = ran(rivals.PLAIN)
    running = rivals.PLAIN.start(JOB)
    assert isinstance(running, rivals.Eager)
    running.settle()
    running.count()  # the optimizer's states come with the first step
    running.settle()
    standing = sum(storage.nbytes() for _, storage in running.standing())
    assert standing == 3 * WEIGHTS + 4 * DEPTH  # two moments; a count of steps for each parameter
    assert peaks["device"] == counted(standing, running.count)
    # What the sigmoids saved and the last product's result, or two gradients beside what is left of them.
    assert peaks["device"] >= standing + (DEPTH + 1) * UNIT


def test_what_the_allocator_reports_is_what_the_ledger_counts() -> None:
    x = torch.randn(ROWS, WIDTH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        a = x + 1
        b = a + 1
        del a
        c = b + 1
        del b, c
    changes = [change for change in allocations(profile) if abs(change) == UNIT]  # scalars become tensors too
    assert changes == [UNIT, UNIT, -UNIT, UNIT, -UNIT, -UNIT]
    assert peak_of(changes) == 2 * UNIT


@pytest.mark.parametrize("name", ["llama-16m", "vit-14m"])
def test_batches_are_of_any_size_and_like_those_of_the_zoo(name: str) -> None:
    example, made = (ZooModel(name).batch(rows, 0, "cpu", seed=3) for rows in (2, 5))
    assert {k: (v.shape[1:], v.dtype) for k, v in made.items()} == {
        k: (v.shape[1:], v.dtype) for k, v in example.items()
    }
    assert all(len(value) == 5 for value in made.values())
    again = ZooModel(name).batch(5, 0, "cpu", seed=3)
    assert all(torch.equal(again[key], made[key]) for key in made)
    if name == "llama-16m":
        assert torch.equal(made["labels"], made["input_ids"])


def test_without_its_dropout_gpt2_draws_nothing() -> None:
    assert [ZooModel(name).draws for name in ("gpt2-14m", f"gpt2-14m{NO_DROPOUT}", "llama-16m")] == [True, False, False]


WIDE = 256
"""A gradient of WIDE * WIDE is more than what is copied without a thread (``device.cpu.BRIEF``)."""


@dataclass(frozen=True)
class CompiledLayers(Stacked):
    """A wider one, its layers compiled one by one."""

    def build_compiled(self, seq: int, device: str, share: float) -> torch.nn.Module:
        torch.manual_seed(0)
        model = Stack(WIDE)
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    def batch(self, batch: int, seq: int, device: str, seed: int) -> Mapping[str, torch.Tensor]:
        return {"x": torch.randn(batch, WIDE, generator=torch.Generator().manual_seed(seed))}


def test_what_other_threads_let_go_of_is_gone_from_the_peak_of_compiled_blocks() -> None:
    """Under ``aot_eager`` the ledger sees all that the allocator does, so both have one peak."""
    torch._dynamo.reset()
    stack = CompiledLayers()
    model, batch = stack.build_compiled(0, "cpu", 1.0), stack.batch(8, 0, "cpu", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    forebay.prepare(model, optimizer, batch, device_memory="4MiB", policy="stream", device="cpu")
    plan = forebay.report(model).plan
    forebay.close(model)
    assert plan.compiled
    job = replace(JOB, model=cast(LlamaShape, stack), batch=8)
    running = cast(Loop, Planned(name="auto", what="", plan=plan).start(job))
    running.reset(2, first_seed=1)
    for index in range(2):
        running.step(index)
    running.finish()
    seen = forebay.report(running.model).measured_peaks()[Tier.DEVICE]
    peak = running.account().peaks["device"]
    running.close()
    print(seen, peak, plan.device)
    assert seen == peak <= plan.device
