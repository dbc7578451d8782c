"""Two models on one device: in turns, beside one after the other, and what was predicted for both.

Two Llamas of one shape and different batches, prepared together within one budget, so that both ways to train run the
same plans. Where the states are on disk, one computes while the other waits for its updates; where all is in memory,
``cpu`` has little to wait for: what a step waits for shares the cores with what computes.

A ratio is the seconds of some steps of each in turns over those of the same steps one after the other.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, final

import torch

import forebay
from benchmarks.case import BenchmarkError
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.models import LLAMA_16M

__all__ = ["compare"]

STEPS: Final = 3
SEQ: Final = 256
MODELS: Final = 2
DEVICE: Final = "96MiB"
LITTLE: Final = "256MiB"
"""Of host memory for both: parameters and gradients have room, states have none."""

HOW: Final[Mapping[str, str]] = {"sequence": "one after the other", "turns": "forebay.alternate"}


@final
@dataclass(frozen=True)
class _Setting:
    name: str
    what: str
    policy: str
    host: str


SETTINGS: Final = (
    _Setting("host", "all in memory", "hydra", "4GiB"),
    _Setting("disk", "states on disk", "zero-infinity", LITTLE),
)


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Trains two Llamas of 16M parameters; ``folder`` is where the states are that are on disk."""
    return compared(
        "several",
        "How much faster do two models train in turns?",
        "seconds of both in turns over those of one after the other",
        command,
        lambda: _measured(folder, 1 if quick else 7, 1, say),
        keep=not quick,
        say=say,
    )


def _measured(folder: Path, rounds: int, warmup: int, say: Say) -> Measured:
    rows: list[Row] = []
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
            both = _Both(setting, inside)
            try:
                say(f"  {setting.name} is set up")
                turns = {"sequence": both.one_after_the_other, "turns": both.in_turns}
                seconds = rotated(turns, rounds, warmup, say)
                rows += _rows(setting, seconds, both.predicted(), both.alone())
            finally:
                both.close()
    words = f"{MODELS} x {LLAMA_16M.name} ({LLAMA_16M.parameters / 1e6:.1f}M parameters, fp32), 1 x {SEQ} tokens each"
    return Measured(rows, f"{words}, {DEVICE} of device memory for both; {rounds} rounds of {STEPS} steps")


@final
class _Both:
    def __init__(self, setting: _Setting, folder: str) -> None:
        self._batches = [LLAMA_16M.batch(1, SEQ, "cpu", seed) for seed in range(MODELS)]
        given = []
        for seed, batch in enumerate(self._batches):
            model = LLAMA_16M.build(SEQ, "cpu", seed)
            given.append((model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch))
        self._pairs = forebay.prepare_several(
            given,
            device_memory=DEVICE,
            host_memory=setting.host,
            disk=f"{folder}:4GiB",
            policy=setting.policy,
            device="cpu",
        )
        self._models = [model for model, _ in self._pairs]
        self._alone = [list[float]() for _ in self._pairs]

    def one_after_the_other(self) -> float:
        start = time.perf_counter()
        for number in range(MODELS):
            before = time.perf_counter()
            self._train(number)
            self._alone[number].append((time.perf_counter() - before) / STEPS)
        return time.perf_counter() - start

    def in_turns(self) -> float:
        start = time.perf_counter()
        forebay.alternate(self._models, [partial(self._train, number) for number in range(MODELS)])
        return time.perf_counter() - start

    def _train(self, number: int) -> None:
        model, optimizer = self._pairs[number]
        batch: dict[str, Any] = self._batches[number]
        for _ in range(STEPS):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        forebay.synchronize(model)
        if not math.isfinite(loss.item()):
            raise BenchmarkError(f"model {number} has a loss of {loss.item()}")

    def predicted(self) -> float:
        """Seconds of a step of each in turns, the longest."""
        return max(run.plan.step_seconds or 0.0 for run in forebay.report_several(self._models).runs)

    def alone(self) -> float:
        """Seconds of a step of each by itself, the sum of their medians."""
        return sum(map(median, self._alone))

    def close(self) -> None:
        for model in self._models:
            forebay.close(model)


def _rows(setting: _Setting, seconds: Mapping[str, Sequence[float]], predicted: float, alone: float) -> list[Row]:
    after, turns = seconds["sequence"], seconds["turns"]
    step = median(turns) / STEPS
    note = f"{step:.3f} s a step of both, {predicted:.3f} s predicted ({step / predicted:.2f} times)"
    return [
        Row(
            f"{setting.name}, sequence",
            f"{setting.what}, {HOW['sequence']}",
            tuple(after),
            note=f"{alone:.3f} s a step",
        ),
        Row(
            f"{setting.name}, turns",
            f"{setting.what}, {HOW['turns']}",
            tuple(turns),
            tuple(t / a for t, a in zip(turns, after, strict=True)),
            note=note,
        ),
    ]
