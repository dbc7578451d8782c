"""DeepSpeed's ZeRO beside forebay: what each adds to a step of plain PyTorch, and the memory that it takes.

Everyone trains one model in fp32 on the CPU with the same batches and threads, each in a process of its own, in turns.
Plain PyTorch has the faster of its AdamWs, the fused one; what is added is added to the mean of two of it, since a
difference is small beside what either varies by. Few tokens a step, for the same reason: with 512 of them two of plain
PyTorch differed by as much as an engine adds. DeepSpeed is imported from wherever Python finds it: keep it out of the
project's environment with ``pip install --target FOLDER`` and ``PYTHONPATH=FOLDER``.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Final, get_args

from benchmarks.case import BenchmarkError, Contender, DeviceKind, Job
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.rival import DeepSpeed, build
from benchmarks.fasthost.run import Measured, Say, compared
from benchmarks.fasthost.trainers import Forebay, Mode, Plain
from benchmarks.isolated import IsolatedRunner
from benchmarks.measure import Turn, in_rotation
from benchmarks.models import LLAMA_16M

__all__ = ["compare"]

MODES: Final[tuple[Mode, ...]] = get_args(Mode)
BATCH, SEQ = 2, 64
STEPS: Final = 3
ROUNDS: Final = 14
WARMUP: Final = 1
"""Rounds that are not counted: orders of blocks are recorded, kernels loaded, pages touched."""

AT_ONCE: Final = 3
"""Contenders that are set up at one time: they import and compute on the same cores."""

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
AGAIN: Final = "plain-again"


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Trains a Llama of 16M parameters; files on disk are made in ``folder`` and removed again."""
    return compared(
        "zero",
        "What do DeepSpeed's ZeRO modes and forebay add to a step of plain PyTorch?",
        "seconds that forebay adds to plain-fused (mean of two) over those that DeepSpeed adds in the same mode",
        command,
        lambda: _measured(folder, 1 if quick else ROUNDS, say),
        keep=not quick,
        say=say,
    )


def _contenders() -> list[Contender]:
    plain = [
        Plain(name="plain", what="PyTorch, torch.optim.AdamW as a user writes it"),
        Plain(name=BASE, what="PyTorch, torch.optim.AdamW(fused=True)", fused=True),
        Plain(name=AGAIN, what="the same as plain-fused", fused=True),
    ]
    pairs: list[Contender] = []
    for mode in MODES:
        pairs.append(DeepSpeed(name=f"deepspeed {mode}", what=f"{_STAGE[mode]}: {_WHERE[mode]}", mode=mode))
        pairs.append(Forebay(name=f"forebay {mode}", what=_WHERE[mode], mode=mode))
    return [*plain, *pairs]


def _measured(folder: Path, rounds: int, say: Say) -> Measured:
    build(say)
    contenders = _contenders()
    runners: dict[str, IsolatedRunner] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
        try:
            absent = _set_up(contenders, Path(inside), runners, say)
            turns = _race(runners, rounds, say)
            memory = {name: runner.account().peaks["process"] for name, runner in runners.items()}
        finally:
            for runner in runners.values():
                runner.close()
    seconds = {name: [turn.seconds / STEPS for turn in taken[WARMUP:]] for name, taken in turns.items()}
    rows = [row for contender in contenders if contender.name in seconds for row in _row(contender, seconds, memory)]
    setting = (
        f"{LLAMA_16M.name} ({LLAMA_16M.parameters / 1e6:.1f}M parameters, fp32), batch {BATCH} x {SEQ}; {rounds} "
        f"rounds of {STEPS} steps; memory is the peak of each process"
    )
    return Measured(rows, setting, absent, _versions())


def _set_up(
    contenders: Sequence[Contender], folder: Path, runners: dict[str, IsolatedRunner], say: Say
) -> tuple[str, ...]:
    """Puts those that can take part into ``runners``, in the order of ``contenders``; says who cannot, and why."""

    def started(contender: Contender) -> IsolatedRunner | str:
        job = Job(LLAMA_16M, BATCH, SEQ, DeviceKind.CPU, folder / contender.name.replace(" ", "-"))
        start = time.perf_counter()
        try:
            runner = IsolatedRunner(contender, job, STEPS)
        except BenchmarkError as error:
            say(f"  {contender.name}: {error}")
            return f"{contender.name}: {error}"
        say(f"  {contender.name} is set up after {time.perf_counter() - start:.0f} s")
        return runner

    absent: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for contender, found in zip(contenders, pool.map(started, contenders), strict=True):
            if isinstance(found, str):
                absent.append(found)
            else:
                runners[contender.name] = found
    return tuple(absent)


def _versions() -> dict[str, str]:
    try:
        return {"deepspeed": metadata.version("deepspeed")}
    except metadata.PackageNotFoundError:
        return {}


def _race(runners: Mapping[str, IsolatedRunner], rounds: int, say: Say) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in runners}
    for index in range(WARMUP + rounds):
        for name in in_rotation(list(runners), index):
            turns[name].append(runners[name].turn(index))
        _check(index, {name: taken[-1].losses for name, taken in turns.items()})
        line = ", ".join(f"{name} {taken[-1].seconds / STEPS:.3f}" for name, taken in turns.items())
        say(f"  round {index + 1} of {WARMUP + rounds}: {line}")
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
        bases = [fmean(two) for two in zip(seconds[BASE], seconds[AGAIN], strict=True)]
        rounds = [(o - b, d - b) for o, b, d in zip(own, bases, seconds[rival], strict=True)]
        ratios = tuple(added / theirs for added, theirs in rounds if theirs > 0)
        note = f"{memory[name] / memory[rival]:.2f} times DeepSpeed's memory"
    target = TARGET if ratios else None
    return [Row(name, contender.what, tuple(own), ratios, target, memory=memory[name], note=note)]
