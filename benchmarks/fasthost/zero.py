"""DeepSpeed's ZeRO beside forebay: what each adds to a step of plain PyTorch, and the memory that it takes.

Everyone trains one model in fp32 on the CPU with the same batches and threads, each in a process of its own, in turns.
Plain PyTorch has the faster of its AdamWs, the fused one. DeepSpeed is imported from wherever Python finds it: keep it
out of the project's environment with ``pip install --target FOLDER`` and ``PYTHONPATH=FOLDER``.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, get_args

from benchmarks.case import BenchmarkError, Contender, DeviceKind, Job
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared
from benchmarks.fasthost.trainers import DeepSpeed, Forebay, Mode, Plain
from benchmarks.isolated import IsolatedRunner
from benchmarks.measure import Turn, in_rotation
from benchmarks.models import LLAMA_16M

__all__ = ["compare"]

MODES: Final[tuple[Mode, ...]] = get_args(Mode)
STEPS: Final = 3
TARGET: Final = 0.5
TOLERANCE: Final = 1e-3
"""Relative: losses after updates, whose rounding differs."""

_WHERE: Final[Mapping[Mode, str]] = {
    "offload": "gradients and optimizer on the host",
    "infinity": "parameters, gradients and optimizer on the host",
    "nvme": "parameters and optimizer on disk",
}
_STAGE: Final[Mapping[Mode, str]] = {
    "offload": "ZeRO-Offload (stage 2)",
    "infinity": "ZeRO-Infinity (stage 3)",
    "nvme": "ZeRO-Infinity (stage 3, NVMe)",
}
BASE: Final = "plain-fused"


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Trains a Llama of 16M parameters; files on disk are made in ``folder`` and removed again."""
    return compared(
        "zero",
        "What do DeepSpeed's ZeRO modes and forebay add to a step of plain PyTorch?",
        "seconds that forebay adds to plain-fused over those that DeepSpeed adds in the same mode",
        command,
        lambda: _measured(folder, 1 if quick else 5, 1 if quick else 2, say),
        keep=not quick,
        say=say,
    )


def _contenders() -> list[Contender]:
    plain = [
        Plain(name="plain", what="PyTorch, torch.optim.AdamW as a user writes it"),
        Plain(name=BASE, what="PyTorch, torch.optim.AdamW(fused=True)", fused=True),
        Plain(name="plain-again", what="the same as plain-fused", fused=True),
    ]
    pairs: list[Contender] = []
    for mode in MODES:
        pairs.append(DeepSpeed(name=f"deepspeed {mode}", what=f"{_STAGE[mode]}: {_WHERE[mode]}", mode=mode))
        pairs.append(Forebay(name=f"forebay {mode}", what=_WHERE[mode], mode=mode))
    return [*plain, *pairs]


def _measured(folder: Path, rounds: int, warmup: int, say: Say) -> Measured:
    absent: list[str] = []
    runners: dict[str, IsolatedRunner] = {}
    contenders = _contenders()
    with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
        try:
            for contender in contenders:
                scratch = Path(inside) / contender.name.replace(" ", "-")
                job = Job(LLAMA_16M, 4, 512, DeviceKind.CPU, scratch)
                try:
                    runners[contender.name] = IsolatedRunner(contender, job, STEPS)
                    say(f"  {contender.name} is set up")
                except BenchmarkError as error:
                    absent.append(f"{contender.name}: {error}")
                    say(f"  {absent[-1]}")
            turns = _race(runners, rounds, warmup, say)
            memory = {name: runner.account().peaks["process"] for name, runner in runners.items()}
        finally:
            for runner in runners.values():
                runner.close()
    seconds = {name: [turn.seconds / STEPS for turn in taken[warmup:]] for name, taken in turns.items()}
    rows = [row for contender in contenders if contender.name in seconds for row in _row(contender, seconds, memory)]
    setting = (
        f"{LLAMA_16M.name} ({LLAMA_16M.parameters / 1e6:.1f}M parameters, fp32), batch 4 x 512; {rounds} rounds of "
        f"{STEPS} steps; memory is the peak of each process"
    )
    return Measured(rows, setting, absent, _versions())


def _versions() -> dict[str, str]:
    try:
        return {"deepspeed": metadata.version("deepspeed")}
    except metadata.PackageNotFoundError:
        return {}


def _race(runners: Mapping[str, IsolatedRunner], rounds: int, warmup: int, say: Say) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in runners}
    for index in range(warmup + rounds):
        for name in in_rotation(list(runners), index):
            turns[name].append(runners[name].turn(index))
        _check(index, {name: taken[-1].losses for name, taken in turns.items()})
        line = ", ".join(f"{name} {taken[-1].seconds / STEPS:.3f}" for name, taken in turns.items())
        say(f"  round {index + 1} of {warmup + rounds}: {line}")
    return turns


def _check(index: int, losses: Mapping[str, Sequence[float]]) -> None:
    """Refuses a round in which somebody did not train as plain PyTorch does."""
    expected = losses[BASE]
    for name, own in losses.items():
        if not all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(own, expected, strict=True)):
            raise BenchmarkError(f"round {index}: {name} has losses {tuple(own)} and {BASE} has {tuple(expected)}")


def _row(contender: Contender, seconds: Mapping[str, Sequence[float]], memory: Mapping[str, int]) -> list[Row]:
    name, own = contender.name, seconds[contender.name]
    rival = name.replace("forebay", "deepspeed")
    ratios: tuple[float, ...] = ()
    note = ""
    if rival != name and rival in seconds:
        # A round in which DeepSpeed adds nothing, or less, says nothing of a share of it.
        rounds = [(o - b, d - b) for o, b, d in zip(own, seconds[BASE], seconds[rival], strict=True)]
        ratios = tuple(added / theirs for added, theirs in rounds if theirs > 0)
        note = f"{memory[name] / memory[rival]:.2f} times DeepSpeed's memory"
    target = TARGET if ratios else None
    return [Row(name, contender.what, tuple(own), ratios, target, memory=memory[name], note=note)]
