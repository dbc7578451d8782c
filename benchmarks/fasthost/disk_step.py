"""A step with all optimizer states on disk, beside the longer of its compute and its bytes at the disk's raw speed.

The model of ``timed``, whose forward and backward take 0, 1 and 2 times as long as the disk needs for the states of a
step. Two of three blocks are updated under backward, into the second range that each has on disk; the others under the
next forward, which wants the first blocks first: so the disk has work all the time, and what a forward waits for is
never behind what it does not want yet. The disk's own time is that of fio or of ``raw``, which reads and writes as many
bytes at one time in a process of its own, in the same rounds, in the best of several ways.
A turn is timed as in ``hidden``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Final, final

from benchmarks.fasthost.disk import WAYS, Raw, fio_version, installed, movers
from benchmarks.fasthost.hidden import NEVER, Stepped
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay.budgets import DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.machine import Disk
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.disk_rates import measure_disk
from forebay.profiler.effort import CPU_EFFORT
from forebay.units import MiB

__all__ = ["compare"]

LAYERS: Final = 18
ELEMENTS: Final = 4 << 20
CHUNK: Final = 1 << 20
STEPS: Final = 3
TIMES: Final = (0, 1, 2)
"""Forward and backward, in times of the disk."""

STATE_BYTES: Final = 12
"""Of a parameter: fp32 master and two moments, read once and written once a step."""

AHEAD: Final = 2 / 3
"""Of all blocks, those that are updated under backward, which is two thirds of the compute."""

TARGET: Final = 1.1


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Measures on the disk of ``folder``, in which files of some 4 GiB are made and removed again."""
    elements = (1 << 20) if quick else ELEMENTS
    return compared(
        "step on disk",
        "What does a step cost when all optimizer states are on disk?",
        "seconds of a step over the longer of forward and backward alone and the states' bytes at the disk's raw speed",
        command,
        lambda: _measured(folder, elements, 2 if quick else 5, say),
        keep=not quick,
        say=say,
    )


def _measured(folder: Path, elements: int, rounds: int, say: Say) -> Measured:
    nbytes = LAYERS * elements * STATE_BYTES
    with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
        device = CpuDevice()
        found = measure_disk(device, inside, CPU_EFFORT).disk
        device.close()
        raw = _RawDisk(Path(inside) / "raw", 2 * nbytes)
        subject = Stepped(LAYERS, elements, lambda model: _plan(model, inside, found))
        base = Stepped(LAYERS, elements, None)
        try:
            subject.turn(2, NEVER)
            disk_seconds = raw.choose()
            say(f"  {nbytes / MiB:.0f} MiB read and as many written take {disk_seconds:.3f} s ({raw.way})")
            seconds = rotated(_turns(subject, base, raw, disk_seconds), rounds, 1, say)
            made, taken = subject.speculation()
            note = f"{taken} of {made} updates ahead of their step were taken over"
        finally:
            subject.close()
    setting = (
        f"{LAYERS} layers of {elements >> 20}M bf16 parameters, {nbytes / MiB:.0f} MiB of states read and written a "
        f"step; 2 of 3 blocks are updated under backward; disk read in {found.reads}, and "
        f"written in {found.writes}; {rounds} rounds of {STEPS} steps"
    )
    return Measured(_rows(seconds, nbytes, note, raw.way), setting, versions=raw.versions)


def _plan(model: TimedModel, folder: str, disk: Disk) -> Plan:
    return plan_by_hand(
        model,
        states=Tier.DISK,
        overlap=True,
        speculate=spread(model, AHEAD),
        chunk=CHUNK,
        disk=DiskBudget(folder),
        reads=disk.reads,
        writes=disk.writes,
    )


def _turns(subject: Stepped, base: Stepped, raw: _RawDisk, disk_seconds: float) -> dict[str, Callable[[], float]]:
    def paced(stepped: Stepped, times: int, max_norm: float | None) -> float:
        stepped.model.pace.spread(times * disk_seconds, LAYERS)
        return stepped.turn(STEPS, max_norm)

    turns: dict[str, Callable[[], float]] = {"disk alone": raw.seconds}
    for times in TIMES:
        turns[f"compute {times}"] = lambda times=times: paced(base, times, None)  # type: ignore[misc]
        turns[f"step {times}"] = lambda times=times: paced(subject, times, None)  # type: ignore[misc]
    return turns


def _rows(seconds: Mapping[str, list[float]], nbytes: int, note: str, way: str) -> list[Row]:
    disk = seconds["disk alone"]
    what = f"the states' bytes read and written at one time: {way}"
    rows = [Row("disk alone", what, tuple(disk), nbytes=2 * nbytes)]
    for times in TIMES:
        compute, step = seconds[f"compute {times}"], seconds[f"step {times}"]
        bound = [max(c, d) for c, d in zip(compute, disk, strict=True)]
        ratios = tuple(own / least for own, least in zip(step, bound, strict=True))
        what = f"forward and backward take {times} times as long as the disk"
        rows += [
            Row(f"forward + backward, {times} x disk", "PyTorch, no step", tuple(compute)),
            Row(f"step, {times} x disk", what, tuple(step), ratios, TARGET, nbytes=2 * nbytes, note=note),
        ]
    return rows


@final
class _RawDisk:
    """Half of ``nbytes`` read and half written at one time, without forebay."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        self._ways = [(name, block, depth) for name in movers() for block, depth in WAYS]
        fio = installed()
        self.versions = {} if fio is None else fio_version(fio)
        Raw().seconds("write", path, nbytes, 4 * MiB, 1)  # real bytes in real blocks

    def choose(self) -> float:
        """Takes the fastest way from now on; its seconds."""
        taken = {way: median(self._once(way) for _ in range(3)) for way in self._ways}
        self._ways = [min(taken, key=lambda way: taken[way])]
        return taken[self._ways[0]]

    @property
    def way(self) -> str:
        """The way that is taken, in words."""
        name, block, depth = self._ways[0]
        return f"{name}, {block // MiB} MiB, {depth} in flight"

    def seconds(self) -> float:
        """Of one pass."""
        return self._once(self._ways[0])

    def _once(self, way: tuple[str, int, int]) -> float:
        name, block, depth = way
        return movers()[name]("both", self._path, self._nbytes, block, depth)
