"""What a result was measured on: hardware, versions, code. Never a host name, a user or a path."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import final

import psutil

__all__ = ["ROOT", "Code", "CpuMeter", "Hardware", "code", "hardware", "slug", "versions"]

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""

_CODE = ("src/forebay", "benchmarks")


@dataclass(frozen=True)
class Hardware:
    """``cores`` are those this process may use; memory is in bytes; ``gpu`` None: none was used."""

    cpu: str
    cores: int
    memory_bytes: int
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Code:
    """``revision`` is the commit ("unknown" outside a repository), ``dirty`` says that tracked or new files differ
    from it (None: unknown), ``sha256`` is taken over the sources of forebay and of the benchmarks themselves.
    """

    revision: str
    dirty: bool | None
    sha256: str


def hardware(with_gpu: bool) -> Hardware:
    """This machine; asks for the card and its driver only ``with_gpu``."""
    cpu = _cpu_name()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not with_gpu:
        return Hardware(cpu, cores, memory)
    import torch

    properties = torch.cuda.get_device_properties(0)
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    return Hardware(cpu, cores, memory, properties.name, properties.total_memory, driver)


@final
class CpuMeter:
    """How many cores other processes kept busy since this was made.

    Processes of our own count once they have ended. Times are in seconds: ``busy`` of the whole machine, ``own`` of
    this process and its ended children, ``clock`` of the wall.
    """

    def __init__(
        self,
        busy: Callable[[], float] | None = None,
        own: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy, self._own, self._clock = busy or _machine_busy, own or _own_busy, clock
        self._start = self._busy(), self._own(), self._clock()

    def others(self) -> float:
        """Cores that others used, on average."""
        busy, own, clock = self._start
        elapsed = self._clock() - clock
        used = (self._busy() - busy) - (self._own() - own)
        return max(0.0, used / elapsed) if elapsed > 0 else 0.0


def _machine_busy() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # guests are in user and nice too


def _own_busy() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def versions() -> dict[str, str]:
    """Python's version, and those of the packages that the figures depend on."""
    found = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
    for package in ("torch", "transformers", "forebay"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "from source"
    return found


def code(revision: str | None = None, root: Path = ROOT) -> Code:
    """The code that runs; ``revision`` names the commit of a copy that is no repository."""
    sources = sorted(path for folder in _CODE for path in (root / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    head = _output(["git", "rev-parse", "HEAD"], root)
    if head is None:
        return Code(revision or "unknown", None, digest.hexdigest())
    status = _output(["git", "status", "--porcelain", "--", *_CODE, ":!benchmarks/results", ":!*.md"], root)
    return Code(head, None if status is None else bool(status), digest.hexdigest())


def slug(machine: Hardware) -> str:
    """A machine's name for a file: the card, else the processor and its cores."""
    name = machine.gpu or f"{machine.cpu} {machine.cores} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def _output(command: list[str], folder: Path | None = None) -> str | None:
    """What ``command`` prints, or None where it cannot run or fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
