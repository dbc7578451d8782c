"""A step with all optimizer states on disk, beside the longer of its compute and its bytes at the disk's raw speed.

The model of ``timed``, whose forward and backward take 0, 1 and 2 times as long as the disk needs for the states of a
step. Two of three blocks are updated under backward, into the second range that each has on disk; the others under the
next forward, which wants the first blocks first: so the disk has work all the time, and what a forward waits for is
never behind what it does not want yet. The disk's own time is that of fio or of ``raw``, which reads and writes as many
bytes at one time in a process of its own, in the same rounds, in the best of several ways. A turn is timed as in
``hidden``.

The fastest ways have few buffers, which a processor's cache holds. States come from more memory than that: so the disk
is measured once more from and to as many bytes as the ring has through which they pass. Notes have the ratio to that;
targets are for the other.

Where compute takes as long as the disk neither can be busy all the time: the first gradient of a step is there after
forward and one block's backward, and the first block that waits is updated when the step has ended. So each row also
says what a disk without any loss would leave (``floor``); it is the nearer to 1 the more blocks there are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, final

from benchmarks.fasthost.disk import WAYS, Fio, Mover, Raw, fio_version, installed, movers
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.stepped import NEVER, Stepped
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay.arenas import UPDATE_RING
from forebay.budgets import DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.machine import Disk
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.disk_rates import measure_disk
from forebay.profiler.effort import CPU_EFFORT
from forebay.units import MiB

__all__ = ["compare", "floor"]

LAYERS: Final = 36
ELEMENTS: Final = 2 << 20
CHUNK: Final = 1 << 20
STEPS: Final = 3
TIMES: Final = (0, 1, 2)
"""Forward and backward, in times of the disk."""

STATE_BYTES: Final = 12
"""Of a parameter: fp32 master and two moments, read once and written once a step."""

RING: Final = UPDATE_RING * CHUNK * STATE_BYTES // 2
"""Bytes of the buffers through which states pass, of each direction when both have as many."""

BLOCKS: Final = (2 * MiB, 6 * MiB)
"""Bytes of a call from or to one of so many buffers."""

AHEAD: Final = 2 / 3
"""Of all blocks, those that are updated under backward, which is two thirds of the compute."""

TARGET: Final = 1.1
STEADY: Final = 12
"""Steps after which each takes as long as the one before."""

RINGED: Final = "disk alone, buffers of the ring"


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
        path = Path(inside) / "raw"
        Raw().seconds("write", path, 2 * nbytes, 4 * MiB, 1)  # real bytes in real blocks
        raw, ring = _RawDisk(path, 2 * nbytes, _ways()), _RawDisk(path, 2 * nbytes, _ways_of_ring())
        subject = Stepped(LAYERS, elements, lambda model: _plan(model, inside, found))
        base = Stepped(LAYERS, elements, None)
        try:
            subject.turn(2, NEVER)
            disk_seconds = raw.choose()
            say(f"  {nbytes / MiB:.0f} MiB read and as many written take {disk_seconds:.3f} s ({raw.way})")
            say(f"  from and to buffers of the ring's bytes {ring.choose():.3f} s ({ring.way})")
            seconds = rotated(_turns(subject, base, raw, ring, disk_seconds), rounds, 1, say)
            made, taken = subject.speculation()
            note = f"{taken} of {made} updates ahead of their step were taken over"
        finally:
            subject.close()
            base.close()
    fio = installed()
    setting = (
        f"{LAYERS} layers of {elements >> 20}M bf16 parameters, {nbytes / MiB:.0f} MiB of states read and written a "
        f"step; 2 of 3 blocks are updated under backward; disk read in {found.reads}, and "
        f"written in {found.writes}; {rounds} rounds of {STEPS} steps"
    )
    return Measured(
        _rows(seconds, nbytes, note, str(raw.way), str(ring.way)),
        setting,
        versions={} if fio is None else fio_version(fio),
    )


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


def _turns(
    subject: Stepped, base: Stepped, raw: _RawDisk, ring: _RawDisk, disk_seconds: float
) -> dict[str, Callable[[], float]]:
    def paced(stepped: Stepped, times: int, max_norm: float | None) -> float:
        stepped.model.pace.spread(times * disk_seconds, LAYERS)
        return stepped.turn(STEPS, max_norm)

    turns: dict[str, Callable[[], float]] = {"disk alone": raw.seconds, RINGED: ring.seconds}
    for times in TIMES:
        turns[f"compute {times}"] = lambda times=times: paced(base, times, None)  # type: ignore[misc]
        turns[f"step {times}"] = lambda times=times: paced(subject, times, None)  # type: ignore[misc]
    return turns


def _rows(seconds: Mapping[str, list[float]], nbytes: int, note: str, way: str, ring: str) -> list[Row]:
    disk, ringed = seconds["disk alone"], seconds[RINGED]
    what = "the states' bytes read and written at one time"
    slower = tuple(r / d for r, d in zip(ringed, disk, strict=True))
    rows = [
        Row("disk alone", f"{what}: {way}", tuple(disk), nbytes=2 * nbytes),
        Row(RINGED, f"{what} in {2 * RING // MiB} MiB of buffers: {ring}", tuple(ringed), slower, nbytes=2 * nbytes),
    ]
    for times in TIMES:
        compute, step = seconds[f"compute {times}"], seconds[f"step {times}"]
        to_ring = median(_ratios(step, compute, ringed))
        least = floor(LAYERS, AHEAD, times, 1.0) / max(times, 1.0)
        longer = "the longer of compute and the disk from and to the ring's bytes"
        said = f"{to_ring:.3f} of {longer}, floor {least:.3f}, {note}"
        what = f"forward and backward take {times} times as long as the disk"
        ratios = _ratios(step, compute, disk)
        rows += [
            Row(f"forward + backward, {times} x disk", "PyTorch, no step", tuple(compute)),
            Row(f"step, {times} x disk", what, tuple(step), ratios, TARGET, nbytes=2 * nbytes, note=said),
        ]
    return rows


def floor(layers: int, ahead: float, compute: float, disk: float) -> float:
    """Seconds of a step whose forward and backward take ``compute`` and whose states the disk reads and writes in
    ``disk``, block after block and without a loss: a block that is updated ``ahead`` of its step (that share of all,
    evenly) from its gradient on, the others in the order of forward from the end of the step on."""
    forward, backward, update = compute / 3 / layers, 2 * compute / 3 / layers, disk / layers
    count = round(ahead * layers)
    early = {layers - 1 - number * layers // count for number in range(count)}
    now = idle = 0.0
    ready, ends = [0.0] * layers, [0.0]
    for _ in range(2 * STEADY):
        for block in range(layers):
            now = max(now, ready[block]) + forward
        for block in reversed(range(layers)):
            now += backward
            if block in early:
                ready[block] = idle = max(idle, now) + update
        for block in range(layers):
            if block not in early:
                ready[block] = idle = max(idle, now) + update
        ends.append(now)
    return (ends[-1] - ends[-1 - STEADY]) / STEADY


def _ratios(step: Sequence[float], compute: Sequence[float], disk: Sequence[float]) -> tuple[float, ...]:
    return tuple(own / max(c, d) for own, c, d in zip(step, compute, disk, strict=True))


@dataclass(frozen=True)
class _Way:
    """``who`` moves bytes in calls of ``block``, ``depth`` of them at one time."""

    who: str
    moves: Mover
    block: int
    depth: int

    def __str__(self) -> str:
        return f"{self.who}, {self.block // MiB} MiB, {self.depth} in flight"


def _ways() -> list[_Way]:
    return [_Way(name, moves, block, depth) for name, moves in movers().items() for block, depth in WAYS]


def _ways_of_ring() -> list[_Way]:
    """Those with buffers of ``RING`` bytes in each direction. fio has one for each call in flight, and no more."""
    fio = installed()
    ways = [_Way("raw", Raw(buffers=RING // block).seconds, block, 1) for block in BLOCKS]
    return ways if fio is None else [*ways, *(_Way("fio", Fio(fio).seconds, b, RING // b) for b in BLOCKS)]


@final
class _RawDisk:
    """Half of ``nbytes`` of the file ``path`` read and half written at one time, without forebay, in one of ``ways``:
    the first until it is chosen."""

    def __init__(self, path: Path, nbytes: int, ways: Sequence[_Way]) -> None:
        self._path, self._nbytes, self._ways = path, nbytes, ways
        self.way = ways[0]

    def choose(self) -> float:
        """Takes the fastest way from now on; its seconds."""
        taken = [median(self._once(way) for _ in range(3)) for way in self._ways]
        self.way = self._ways[taken.index(min(taken))]
        return min(taken)

    def seconds(self) -> float:
        """Of one pass."""
        return self._once(self.way)

    def _once(self, way: _Way) -> float:
        return way.moves("both", self._path, self._nbytes, way.block, way.depth)
