"""How far the machine has drifted from the one that was measured.

A shared host can become half as fast from one minute to the next. A prediction made of rates that were measured before
is then wrong for a reason that is not its own. So plain PyTorch takes steps beside, when the rates are measured and
before and after each run, and steps are compared in units of its own. Nothing of it is in what is predicted or
run.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.prediction.zoo import Entry
from forebay.machine import Machine

if TYPE_CHECKING:
    from forebay.profiler.capture import Captured

__all__ = ["Known", "measure", "plain_seconds"]

STEPS = 3
OP_SECONDS = 10.0


@dataclass(frozen=True)
class Known:
    """Rates and op seconds, and the seconds of a step of plain PyTorch ``before`` and ``after`` they were measured."""

    machine: Machine
    before: float
    after: float

    def drift(self, seconds: float) -> float:
        """How much slower plain PyTorch has become that takes ``seconds`` now; below 0: faster."""
        return seconds / ((self.before + self.after) / 2) - 1


def measure(entry: Entry, captured: Captured) -> Known:
    """The machine now: the rates of its lanes, and each distinct op of ``captured`` alone."""
    import torch

    from forebay.profiler.probe import probe
    from forebay.profiler.stopwatch import ColdStopwatch
    from forebay.profiler.timing import TimingPolicy, time_ops

    before = plain_seconds(entry)
    here = probe("cpu", refresh=True)
    policy = TimingPolicy(total=OP_SECONDS)
    timed = time_ops(captured.trace, captured.calls, here, torch.device("cpu"), ColdStopwatch(), policy)
    return Known(timed, before, plain_seconds(entry))


def plain_seconds(entry: Entry) -> float:
    """Seconds of a step of plain PyTorch: the median of ``STEPS``, after one to warm up."""
    import torch

    model, batch = entry.build(), entry.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    taken = []
    for _ in range(1 + STEPS):
        start = perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(perf_counter() - start)
    del model, optimizer
    gc.collect()
    return median(taken[1:])
