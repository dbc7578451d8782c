"""The disk tier beside fio: a whole file read, written, and read and written at one time.

Everyone has the same file, made and written once before anything is timed: where a file lies, and what of it a host
caches, is the same for all. fio and the loop of ``raw`` are processes of their own, and all three move bytes from and
to huge pages that have been touched before; fio in the pages that it takes by itself has rows of its own. The tier
moves the file in chunks through the runtime's lanes and a ring of three buffers, in the calls that ``forebay doctor
--disk`` finds fastest here. fio and the loop are tried in several ways; what counts is the best of all, chosen for each
round by the others.

The best ways go round in few buffers, which a processor's cache holds; what is fetched from a disk comes to more memory
than that. So fio and the loop also go round in as many bytes as the tier does (``RINGED``): notes have the ratio to the
best of those. Targets are for the other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, final

import torch

from benchmarks.case import BenchmarkError
from benchmarks.fasthost.raw import HUGE
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.host import ROOT
from forebay.device.base import Completion
from forebay.device.cpu import CpuDevice
from forebay.machine import Disk
from forebay.memory import Kind, Ledger, Tier
from forebay.profiler import disk_rates
from forebay.profiler.effort import CPU_EFFORT
from forebay.tiers.arena import HostArena
from forebay.tiers.diskfile import DiskPolicy
from forebay.tiers.stripes import DiskTier, Folder
from forebay.timeline import Lane
from forebay.units import MiB

__all__ = ["WAYS", "Fio", "Mover", "Raw", "compare", "fio_version", "installed", "movers"]

Mover = Callable[[str, Path, int, int, int], float]
"""Seconds of a verb over the first bytes of a file that is there, in calls of so many bytes, so many in flight."""

Key = tuple[str, str, int, int]
"""Who does what in which way."""

VERBS: Final = ("read", "write", "both")
WAYS: Final = tuple((calls.block, calls.depth) for calls in disk_rates.WAYS)
"""Bytes of a call and calls in flight, for fio and for the loop: all that the tier may choose from."""

CHUNK: Final = 32 * MiB
BUFFERS: Final = 3
"""Of ``CHUNK`` each, for each direction."""

RINGED: Final = ", as much memory"
"""Ends the names of those who go round in as many bytes as the tier."""

RINGED_BLOCKS: Final = (4 * MiB, 16 * MiB)
"""Bytes of their calls."""

TARGET: Final = 0.9


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Measures the disk of ``folder``, in which a file of half a GiB is made and removed again."""
    nbytes = (64 if quick else 512) * MiB
    return compared(
        "disk",
        "How fast does the disk tier read and write, beside fio?",
        "the tier's bytes/s over those of the best other way",
        command,
        lambda: _measured(folder, nbytes, 2 if quick else 7, say),
        keep=not quick,
        say=say,
    )


def _measured(folder: Path, nbytes: int, rounds: int, say: Say) -> Measured:
    fio = installed()
    with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
        device = CpuDevice()
        found = disk_rates.measure_disk(device, inside, CPU_EFFORT).disk
        policy = DiskPolicy(reads=found.reads, writes=found.writes)
        with DiskTier([Folder(inside)], Ledger(Tier.DISK), policy=policy) as tier:
            subject = _Tier(device, tier, nbytes)
            try:
                seconds = rotated(_turns(_only_open(inside), nbytes, subject), rounds, 1, say)
            finally:
                subject.close()
                device.close()
    rows = [row for verb in VERBS for row in _rows(verb, seconds, nbytes, found)]
    version = {} if fio is None else fio_version(fio)
    absent = () if fio is not None else ("fio: not installed; the loop of benchmarks/fasthost/raw.py stands in for it",)
    setting = f"one file of {nbytes // MiB} MiB, {rounds} rounds; both: half of the bytes each way"
    return Measured(rows, setting, absent, version)


def fio_version(program: str) -> dict[str, str]:
    """Its version, as a record names it."""
    return {"fio": _said([program, "--version"]).strip().removeprefix("fio-")}


def installed() -> str | None:
    """Where fio is."""
    return shutil.which("fio")


def movers() -> Mapping[str, Mover]:
    """Everyone who moves bytes without forebay here, by name."""
    fio = installed()
    found: dict[str, Mover] = {"raw": Raw().seconds}
    if fio is not None:
        found |= {"fio": Fio(fio).seconds, "fio in 4 KiB pages": Fio(fio, huge=False).seconds}
    return found


def _only_open(folder: str) -> Path:
    """The one file that this process has open in ``folder``, by a name under which others can open it: the tier takes
    away the one that it made it with."""
    inside = os.path.realpath(folder)
    (found,) = (path for path in Path(f"/proc/{os.getpid()}/fd").iterdir() if _target(path).startswith(inside))
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # a descriptor that the listing itself had
        return ""


def _turns(file: Path, nbytes: int, subject: _Tier) -> dict[Key, Callable[[], float]]:
    turns: dict[Key, Callable[[], float]] = {}
    for verb in VERBS:
        for name, moves in movers().items():
            for block, depth in WAYS:
                turns[name, verb, block, depth] = partial(moves, verb, file, nbytes, block, depth)
        for (name, block, depth), moves in _ringed().items():
            turns[name + RINGED, verb, block, depth] = partial(moves, verb, file, nbytes, block, depth)
        turns["forebay", verb, 0, 0] = partial(subject.seconds, verb)
    return turns


def _ringed() -> Mapping[tuple[str, int, int], Mover]:
    """Who moves bytes from and to as much memory as the tier, by name, bytes of a call and calls in flight. fio has a
    buffer for each call in flight, and no more."""
    ring, program = BUFFERS * CHUNK, installed()
    found: dict[tuple[str, int, int], Mover] = {
        ("raw", block, 1): Raw(buffers=ring // block).seconds for block in RINGED_BLOCKS
    }
    if program is not None:
        found |= {("fio", block, ring // block): Fio(program).seconds for block in RINGED_BLOCKS}
    return found


def _rows(verb: str, seconds: Mapping[Key, list[float]], nbytes: int, disk: Disk) -> list[Row]:
    own = seconds["forebay", verb, 0, 0]
    others = {key: taken for key, taken in seconds.items() if key[1] == verb and key[0] != "forebay"}
    names = sorted({key[0] for key in others})
    best = {n: min((k for k in others if k[0] == n), key=lambda k: median(others[k])) for n in names}
    free = [taken for key, taken in others.items() if not key[0].endswith(RINGED)]
    ringed = [taken for key, taken in others.items() if key[0].endswith(RINGED)]
    ratios = _over(own, _best_elsewhere(free))
    rows = [
        Row(f"{key[0]} {verb}", f"{key[2] // MiB} MiB, {key[3]} in flight", tuple(others[key]), nbytes=nbytes)
        for key in best.values()
    ]
    ways = {"read": str(disk.reads), "write": str(disk.writes)}
    what = f"chunks of {CHUNK // MiB} MiB in {ways.get(verb, ' and '.join(ways.values()))}"
    note = f"{median(_over(own, _best_elsewhere(ringed))):.3f} of the best from and to as much memory"
    return [*rows, Row(f"forebay {verb}", what, tuple(own), ratios, TARGET, at_least=True, nbytes=nbytes, note=note)]


def _over(own: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """The rate of ``own`` over that of ``others``, round by round."""
    return tuple(theirs / mine for theirs, mine in zip(others, own, strict=True))


def _best_elsewhere(ways: Sequence[Sequence[float]]) -> list[float]:
    """Of every round the seconds of the way that is fastest in all others. The fastest of many ways in the same rounds
    is the luckiest one too: a single way, tried as often under many names, would come out ahead of itself."""

    def of_round(number: int) -> float:
        return min(ways, key=lambda way: median([*way[:number], *way[number + 1 :]]))[number]

    return [of_round(number) for number in range(len(ways[0]))]


@final
class Fio:
    """fio in a process of its own, over a file that is there; ``huge``: from and to huge pages."""

    def __init__(self, program: str, *, huge: bool = True) -> None:
        self._program = program
        # fio asks for no huge pages of this kind, but glibc does for it.
        self._tunables = f"glibc.malloc.hugetlb={int(huge)}"

    def seconds(self, verb: str, path: Path, nbytes: int, block: int, depth: int) -> float:
        """By fio's own account of the time between its first and its last transfer."""
        half = nbytes // 2
        common = [self._program, f"--filename={path}", f"--bs={block}", f"--iodepth={depth}", "--direct=1"]
        common += ["--ioengine=libaio", "--output-format=json", "--allow_file_create=0", f"--iomem_align={HUGE}"]
        jobs = [f"--name={verb}", f"--rw={verb}", f"--size={nbytes}"]
        if verb == "both":
            jobs = ["--name=read", "--rw=read", f"--size={half}", "--name=write", "--rw=write", f"--size={half}"]
            jobs += [f"--offset={half}"]
        told: Any = json.loads(_said([*common, *jobs], GLIBC_TUNABLES=self._tunables))
        return max(float(job[kind]["runtime"]) for job in told["jobs"] for kind in ("read", "write")) / 1e3


@final
class Raw:
    """The loop of ``raw``. Each of its threads goes round in ``buffers``, one block each."""

    def __init__(self, *, buffers: int = 1) -> None:
        self._buffers = buffers

    def seconds(self, verb: str, path: Path, nbytes: int, block: int, depth: int) -> float:
        """By the loop's own clock, without the start of its process."""
        module = [sys.executable, "-m", "benchmarks.fasthost.raw"]
        return float(_said([*module, verb, str(path), str(nbytes), str(block), str(depth), str(self._buffers * block)]))


def _said(command: list[str], **environment: str) -> str:
    around = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise BenchmarkError(f"{command[0]} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


@final
class _Tier:
    """A file of ``tier``, moved in chunks by the lanes of ``device``."""

    def __init__(self, device: CpuDevice, tier: DiskTier, nbytes: int) -> None:
        self._device = device
        self._file = tier.create("subject", nbytes)
        # For each direction, as of the ring through which states pass.
        self._arena = HostArena(2 * BUFFERS * CHUNK, Kind.STAGING, ledger=Ledger(Tier.HOST), what="ring")
        self._arena.memory.random_(generator=torch.Generator().manual_seed(0))
        for start in range(0, nbytes, CHUNK):
            self._file.write(start, self._arena.view(0, CHUNK))

    def seconds(self, verb: str) -> float:
        """Wall time until the last chunk is there."""
        nbytes = self._file.nbytes
        half = nbytes // 2
        spans = {"read": ((Lane.DISK_READ, 0, nbytes),), "write": ((Lane.DISK_WRITE, 0, nbytes),)}
        parts = spans.get(verb, ((Lane.DISK_READ, 0, half), (Lane.DISK_WRITE, half, nbytes)))
        begin = time.perf_counter()
        done: list[Completion] = []
        for lane, start, stop in parts:
            ring = 0 if lane is Lane.DISK_READ else BUFFERS
            for number, offset in enumerate(range(start, stop, CHUNK)):
                buffer = self._arena.view((ring + number % BUFFERS) * CHUNK, min(CHUNK, stop - offset))
                move = self._file.read if lane is Lane.DISK_READ else self._file.write
                job = lambda move=move, offset=offset, buffer=buffer: move(offset, buffer)  # noqa: E731
                done.append(self._device.submit(lane, job, nbytes=buffer.numel()))
        for completion in done:
            completion.wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        self._arena.close()
