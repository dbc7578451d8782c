"""The rivals of the activations benchmark: what they compute, and how the bytes of their device are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.activations import rivals
from benchmarks.activations.models import ZooModel
from benchmarks.case import DeviceKind, Job
from benchmarks.models import LlamaShape

ROWS, WIDTH, DEPTH = 1024, 64, 4
UNIT = ROWS * WIDTH * 4
"""Bytes of one activation in fp32."""
WEIGHTS = DEPTH * WIDTH * WIDTH * 4


class Stack(torch.nn.Module):
    """``DEPTH`` times a matrix product and a sigmoid, each of which saves one activation; the loss is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return SimpleNamespace(loss=x.sum())


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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        running.count()
    assert peaks["device"] == standing + rivals.peak_of(rivals.allocations(profile))
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
    changes = [change for change in rivals.allocations(profile) if abs(change) == UNIT]  # scalars become tensors too
    assert changes == [UNIT, UNIT, -UNIT, UNIT, -UNIT, -UNIT]
    assert rivals.peak_of(changes) == 2 * UNIT


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
