"""What ``probe`` found, kept in the user's cache folder. No torch.

One file for each device. It says under which circumstances it was measured, and is of no use under others.
"""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from forebay.errors import ConfigError
from forebay.machine import MACHINE_SCHEMA, Machine
from forebay.records import dump, load

__all__ = [
    "PROBE_SCHEMA",
    "Circumstances",
    "Remembered",
    "cache_file",
    "cache_folder",
    "cores",
    "cpu_model",
    "keep",
    "recall",
    "recall_as",
]

PROBE_SCHEMA = 9
"""Goes up when what is measured, or how, changes: figures of another version are measured anew."""


@dataclass(frozen=True)
class Circumstances:
    """What must be the same for figures to be of use: device, processor, its cores for us, threads, torch."""

    device: str
    cpu: str
    cores: tuple[int, ...]
    threads: int
    torch: str
    probe_schema: int = PROBE_SCHEMA
    machine_schema: int = MACHINE_SCHEMA


@dataclass(frozen=True)
class Remembered:
    """One measurement: where, what was found, and in words what the figures cannot say."""

    circumstances: Circumstances
    machine: Machine
    remarks: tuple[str, ...] = ()

    def save(self, file: Path) -> None:
        """Writes the file, whole or not at all. Raises ``OSError``."""
        keep(self, file)


class _Kept(Protocol):
    """What can be kept: a record that says under which circumstances it was measured."""

    @property
    def circumstances(self) -> Circumstances: ...


R = TypeVar("R", bound=_Kept)


def keep(record: _Kept, file: Path) -> None:
    """Writes ``record`` to ``file``, whole or not at all. Raises ``OSError``."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Two processes may measure at one time: each writes a file of its own, and the last name wins.
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(dump(record) + "\n")
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def recall(file: Path, wanted: Circumstances) -> tuple[Remembered | None, str]:
    """What ``file`` remembers, if it was measured under the circumstances ``wanted``; else None and why, in words.

    The reason is empty when there is no file: nothing is wrong then.
    """
    return recall_as(Remembered, file, wanted)


def recall_as(kind: type[R], file: Path, wanted: Circumstances) -> tuple[R | None, str]:
    """``recall`` for a record of another ``kind``."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot read {file}: {error.strerror}"
    try:
        found = load(kind, text)
    except ConfigError as error:
        return None, f"{file} cannot be used ({error})"
    was, now = asdict(found.circumstances), asdict(wanted)
    changed = [f"{name.replace('_', ' ')} was {was[name]}, is {now[name]}" for name in now if was[name] != now[name]]
    if changed:
        return None, f"{file} was measured under other circumstances ({'; '.join(changed)})"
    return found, ""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/forebay``, or ``~/.cache/forebay`` where that is not set or not an absolute path."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "forebay"


def cache_file(folder: Path, device: str, what: str = "machine") -> Path:
    """The file of ``device`` (``cpu``, ``cuda:0``) in ``folder`` that keeps ``what``."""
    return folder / f"{what}-{device.replace(':', '-')}.json"


def cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name for itself, or its architecture where it has none."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), platform.machine())
