"""Gradient accumulation over eight micro-batches: the bytes that cross the link, and the seconds, beside the loop.

Parameters and optimizer are on the host and every block streams. A ratio is the bytes that one step brings to the
device, over those of a step of one micro-batch: 1 says that the parameters are moved once for all eight.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.case import Account, BenchmarkError, DeviceKind, Job
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared
from benchmarks.fasthost.trainers import Accumulating
from benchmarks.isolated import IsolatedRunner
from benchmarks.measure import Turn, in_rotation
from benchmarks.models import LLAMA_16M

__all__ = ["compare"]

STEPS: Final = 2
MICRO_BATCHES: Final = 8
SEQ: Final = 256
TARGET: Final = 1.05

CONTENDERS: Final = (
    Accumulating(name="plain", what="PyTorch's loop, everything in memory", how="plain"),
    Accumulating(name="one micro-batch", what="forebay, a step of one micro-batch", how="one"),
    Accumulating(name="loop", what="forebay, PyTorch's loop", how="loop"),
    Accumulating(name="accumulate", what="forebay.accumulate", how="layers"),
)


def compare(command: str, *, quick: bool, say: Say) -> Comparison:
    """Trains a Llama of 16M parameters."""
    return compared(
        "accumulation",
        "What crosses the link in a step of eight micro-batches?",
        "bytes to the device in a step over those of a step of one micro-batch",
        command,
        lambda: _measured(1 if quick else 7, 1, say),
        keep=not quick,
        say=say,
    )


def _measured(rounds: int, warmup: int, say: Say) -> Measured:
    runners: dict[str, IsolatedRunner] = {}
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as inside:
        try:
            job = Job(LLAMA_16M, MICRO_BATCHES, SEQ, DeviceKind.CPU, Path(inside))
            for contender in CONTENDERS:
                runners[contender.name] = IsolatedRunner(contender, job, STEPS)
                say(f"  {contender.name} is set up")
            for index in range(warmup + rounds):
                for name in in_rotation(list(runners), index):
                    turns[name].append(runners[name].turn(index))
                _check(index, turns["loop"][-1].losses, turns["accumulate"][-1].losses)
                say(f"  round {index + 1} of {warmup + rounds}")
            accounts = {name: runner.account() for name, runner in runners.items()}
        finally:
            for runner in runners.values():
                runner.close()
    seconds = {name: [turn.seconds / STEPS for turn in taken[warmup:]] for name, taken in turns.items()}
    setting = (
        f"{LLAMA_16M.name} ({LLAMA_16M.parameters / 1e6:.1f}M parameters, fp32), {MICRO_BATCHES} micro-batches of "
        f"1 x {SEQ}; {rounds} rounds of {STEPS} steps"
    )
    return Measured(_rows(seconds, accounts), setting)


def _check(index: int, loop: Sequence[float], accumulated: Sequence[float]) -> None:
    """Refuses a round in which the two did not compute the same bits."""
    if any(a.hex() != b.hex() or not math.isfinite(a) for a, b in zip(loop, accumulated, strict=True)):
        raise BenchmarkError(f"round {index}: the loop has losses {tuple(loop)}, accumulate {tuple(accumulated)}")


def _rows(seconds: Mapping[str, Sequence[float]], accounts: Mapping[str, Account]) -> list[Row]:
    one = _per_step(accounts["one micro-batch"], "h2d")
    rows = []
    for contender in CONTENDERS:
        name, account = contender.name, accounts[contender.name]
        taken = tuple(seconds[name])
        if contender.how == "plain":
            rows.append(Row(name, contender.what, taken))
            continue
        there, back = _per_step(account, "h2d"), _per_step(account, "d2h")
        parameters = LLAMA_16M.parameter_bytes
        note = f"{there / parameters:.2f} times the parameters' bytes to the device, {back / parameters:.2f} times back"
        faster = [a / b for a, b in zip(taken, seconds["loop"], strict=True)]
        if contender.how == "layers":
            note += f"; {sorted(faster)[len(faster) // 2]:.3f} of the loop's seconds"
        target = TARGET if contender.how == "layers" else None
        rows.append(Row(name, contender.what, taken, (round(there / one, 3),), target, note=note))
    return rows


def _per_step(account: Account, lane: str) -> float:
    return account.lanes[lane].nbytes / account.counters["steps"]
