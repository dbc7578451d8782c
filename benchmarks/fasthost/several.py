"""Two models on one device: in turns, beside one after the other, and what was predicted for both.

Two Llamas of one shape and different batches, prepared together within one budget, so that both ways to train run the
same plans. Where the states are on disk, one computes while the other waits for its updates; where all is in memory,
``cpu`` has little to wait for: what a step waits for shares the cores with what computes.

A ratio is the seconds of some steps of each in turns over those of the same steps one after the other. What is foretold
of a round is the mean of what the rates measured before it and those measured after it say (``prediction.rounds``).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch.utils._python_dispatch import _disable_current_modes

import forebay
from benchmarks.case import BenchmarkError
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.models import LLAMA_16M
from benchmarks.prediction.rounds import measure, measure_again
from forebay.planning import predict
from forebay.profiler.capture import Captured, capture
from forebay.simulation import Costs, alternating

if TYPE_CHECKING:
    from forebay.machine import Machine

__all__ = ["compare"]

STEPS: Final = 6
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
        lambda: _measured(folder, 1 if quick else 3, say),
        keep=not quick,
        say=say,
    )


def _measured(folder: Path, rounds: int, say: Say) -> Measured:
    rows: list[Row] = []
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
            both = _Both(setting, inside, say)
            try:
                say(f"  {setting.name} is set up")
                turns = {"sequence": both.one_after_the_other, "turns": both.in_turns}
                seconds = rotated(turns, rounds, 0, say, begin=both.begin)
                both.foretell()
                rows += _rows(setting, seconds, both.foretold(rounds))
            finally:
                both.close()
    words = f"{MODELS} x {LLAMA_16M.name} ({LLAMA_16M.parameters / 1e6:.1f}M parameters, fp32), 1 x {SEQ} tokens each"
    return Measured(rows, f"{words}, {DEVICE} of device memory for both; {rounds} rounds of {STEPS} steps")


@final
class _Both:
    def __init__(self, setting: _Setting, folder: str, say: Say) -> None:
        self._say = say
        self._batches = [LLAMA_16M.batch(1, SEQ, "cpu", seed) for seed in range(MODELS)]
        self._captured = _captured(self._batches[0])
        self._machine: Machine = measure(self._captured, folder)
        self._foretold: list[dict[str, float]] = []
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

    def one_after_the_other(self) -> float:
        start = time.perf_counter()
        for number in range(MODELS):
            self._train(number, STEPS)
        return time.perf_counter() - start

    def in_turns(self) -> float:
        start = time.perf_counter()
        forebay.alternate(self._models, [partial(self._train, number, STEPS) for number in range(MODELS)])
        return time.perf_counter() - start

    def _train(self, number: int, steps: int) -> None:
        model, optimizer = self._pairs[number]
        batch: dict[str, Any] = self._batches[number]
        for _ in range(steps):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        forebay.synchronize(model)
        if not math.isfinite(loss.item()):
            raise BenchmarkError(f"model {number} has a loss of {loss.item()}")

    def begin(self) -> None:
        """Of a round."""
        self.foretell()
        # The first steps after so many ops alone take up to twice as long: memory that was given back comes anew.
        for number in range(MODELS):
            self._train(number, STEPS)

    def foretell(self) -> None:
        """Measures what the machine does now, and what a step of both takes with that."""
        if self._foretold:
            # Past the modes that guard the parameters of prepared models: an op is timed alone.
            with _disable_current_modes():
                self._machine = measure_again(self._captured, self._machine)
        plans = [run.plan for run in forebay.report_several(self._models).runs]
        costs = Costs(self._captured.trace, self._machine, plans[0].streaming.masters)
        alone = sum(predict(costs.trace, self._machine, plan)[1].step_seconds for plan in plans)
        turns = alternating(plans, [costs] * MODELS, STEPS).seconds / STEPS
        self._foretold.append({"sequence": alone, "turns": turns})
        self._say(f"  foretold {alone:.3f} s one after the other, {turns:.3f} s in turns")

    def foretold(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a step of both in each of the last ``rounds``."""
        around = list(pairwise(self._foretold))[-rounds:]
        return {how: [mean((before[how], after[how])) for before, after in around] for how in HOW}

    def close(self) -> None:
        for model in self._models:
            forebay.close(model)


def _captured(batch: dict[str, Any]) -> Captured:
    """A step of such a model: both have the same ops."""
    return capture(LLAMA_16M.build(SEQ, "cpu", 0), batch, "adamw", "cpu")


def _rows(
    setting: _Setting, seconds: Mapping[str, Sequence[float]], foretold: Mapping[str, Sequence[float]]
) -> list[Row]:
    after = seconds["sequence"]
    rows = []
    for how, words in HOW.items():
        steps = [taken / STEPS for taken in seconds[how]]
        times = median(taken / told for taken, told in zip(steps, foretold[how], strict=True))
        rows.append(
            Row(
                f"{setting.name}, {how}",
                f"{setting.what}, {words}",
                tuple(seconds[how]),
                tuple(t / a for t, a in zip(seconds[how], after, strict=True)) if how == "turns" else (),
                note=f"{median(steps):.3f} s a step of both, {median(foretold[how]):.3f} s foretold ({times:.2f})",
            )
        )
    return rows
