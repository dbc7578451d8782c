"""How long it takes to plan models of many layers: all of ``auto``, the proof of its plan by the checker included.

scripts/bench planning
scripts/bench planning 12 100

The layers are those of Llama 3.1 8B in bfloat16, a batch has 4 sequences of 2,048 tokens. The machine is the
catalogue's RTX 4090 with room for everything on the host, and 22 GiB of the device may be taken beside what is counted
for workspaces and pages of the allocator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.case import BenchmarkError
from benchmarks.models import LlamaShape
from forebay.budgets import Budget
from forebay.catalogue import read_machine
from forebay.collector import collector_paused
from forebay.planners import Bench, Problem, make_plan
from forebay.planning import problem_of
from forebay.trace import Trace
from forebay.units import GiB, TiB

__all__ = ["HOST", "LAYERS", "MOST_LAYERS", "Planned", "compare", "planned", "traced"]

LAYERS = (12, 32, 100)
MOST_LAYERS = 1000
DEVICE = 22 * GiB
HOST = 4 * TiB
BATCH, SEQ = 4, 2048
PLANS = 3
"""Plans of each model, every one from the trace on: the least seconds count, for others may use the processor."""


@dataclass(frozen=True)
class Planned:
    """``seconds`` on the wall and of the processor that the fastest of a few plans took; what its search simulated; the
    step of the plan, and the ``gap`` of that above the bound below which no step is (a share)."""

    layers: int
    seconds: float
    cpu_seconds: float
    simulations: int
    actions: int
    step_seconds: float
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.layers} layers: planned in {self.seconds:.2f} s ({self.cpu_seconds:.2f} s of the processor), "
            f"{self.simulations} simulations of {self.actions} actions; {self.step_seconds:.2f} s a step, at most "
            f"{100 * self.gap:.1f} % above what any plan takes"
        )


def compare(layers: Sequence[int], say: Callable[[str], None]) -> None:
    """Plans models of so many ``layers`` and says how long it took. Raises ``BenchmarkError`` for none or too many."""
    for count in layers or LAYERS:
        if not 0 < count <= MOST_LAYERS:
            raise BenchmarkError(f"a model here has 1 to {MOST_LAYERS} layers, got {count}")
        say(str(planned(count, traced(count))))


def traced(layers: int) -> Trace:
    """A step of the model with so many layers. Nothing is computed, and no weight has memory."""
    import torch

    import forebay

    shape = LlamaShape("llama", 128256, 4096, 14336, layers, 32, 8, "bfloat16")
    tokens = torch.zeros((BATCH, SEQ), dtype=torch.int64, device="meta")
    return forebay.profile(shape.build(SEQ, "meta"), {"input_ids": tokens, "labels": tokens}, device="cuda")


def planned(layers: int, trace: Trace) -> Planned:
    """The figures of a few plans for ``trace``, of a model of so many ``layers``."""
    machine = replace(read_machine("rtx-4090"), host_capacity=HOST, pinned_capacity=HOST)
    problem = problem_of(trace, machine, Budget(DEVICE + trace.workspace_nbytes))
    return min((_once(layers, problem) for _ in range(PLANS)), key=lambda one: one.cpu_seconds)


def _once(layers: int, problem: Problem) -> Planned:
    wall, cpu = time.perf_counter(), time.process_time()
    with collector_paused():  # as everyone has it who asks for a plan
        bench = Bench(problem)
        step = make_plan(problem, "auto", bench).step_seconds or 0.0
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return Planned(layers, seconds, cpu_seconds, bench.simulated, bench.actions, step, step / bench.bound - 1)
