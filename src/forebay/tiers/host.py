"""How much host memory and disk this process may use. No torch here.

The kernel kills a process at the limit of its control group (cgroup), and refuses it memory at a limit of its own
(``ulimit -v``), however much memory the machine has, so every limit that applies is read and the smallest wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from forebay.errors import ConfigError

__all__ = ["HostMemory", "available_disk", "available_host_memory", "disks_of", "free_in"]


@dataclass(frozen=True)
class HostMemory:
    """Host memory of this process in bytes: its limit, what of it is free now, and which limit says so."""

    total: int
    available: int
    limit_source: str


@dataclass(frozen=True)
class _Version:
    """File names and words of one cgroup version; the first of ``limits`` is the one that kills."""

    filesystem: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


# memory.high does not kill, but a process above it is slowed down until it makes no progress. The "total_" entries of
# version 1 include child groups, as its usage does.
_V2 = _Version("cgroup2", ("memory.max", "memory.high"), "memory.current", ("inactive_file",))
_V1 = _Version("cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))


@dataclass(frozen=True)
class _Mount:
    """One mounted cgroup hierarchy: ``root`` is the group that ``point`` shows."""

    version: _Version
    root: PurePosixPath
    point: Path


def available_host_memory(root: Path = Path("/")) -> HostMemory:
    """The smallest of what /proc/meminfo, every cgroup around this process and its own limits leave free.

    Page cache that the kernel can drop counts as free, swap does not. ``root`` is the folder under which ``proc`` and
    the cgroup mounts are looked for. Raises ``ConfigError`` where there is no readable /proc/meminfo.
    """
    machine = _machine(root)
    known = [machine, *_own_limits(root)]
    for mount in _memory_mounts(root):
        for folder in _groups(root, mount):
            group = _group_memory(folder, mount.version, machine.total, root)
            if group is not None:
                known.append(group)
    tightest = min(known, key=lambda memory: memory.available)
    return HostMemory(min(memory.total for memory in known), tightest.available, tightest.limit_source)


def available_disk(path: str | os.PathLike[str]) -> int:
    """Bytes that an ordinary user may still write to the file system of the folder ``path``.

    Raises ``ConfigError`` if ``path`` is no folder, or cannot be looked at.
    """
    try:
        stat = os.statvfs(_as_folder(path))
    except OSError as error:
        raise ConfigError(
            f"cannot ask how much room {os.fspath(path)} has: {error.strerror}; name a folder that exists"
        ) from error
    return stat.f_bavail * stat.f_frsize


def disks_of(paths: Sequence[str]) -> dict[int, str]:
    """The file systems of the folders ``paths``: the first path in each, by the number of its device.

    Raises ``ConfigError`` if a path is no folder, or cannot be looked at.
    """
    found: dict[int, str] = {}
    for path in paths:
        try:
            found.setdefault(os.stat(_as_folder(path)).st_dev, path)
        except OSError as error:
            raise ConfigError(f"cannot look at {path}: {error.strerror}; name a folder that exists") from error
    return found


def free_in(paths: Sequence[str]) -> int:
    """Bytes that may still be written to the file systems of the folders ``paths``, each counted once.

    Raises ``ConfigError`` if a path is no folder, or cannot be looked at.
    """
    if len(paths) == 1:
        return available_disk(paths[0])
    return sum(available_disk(path) for path in disks_of(paths).values())


def _as_folder(path: str | os.PathLike[str]) -> str:
    """``path`` as one that is refused ("Not a directory") where a file goes by it: with a slash at its end."""
    return os.path.join(path, "")


def _machine(root: Path) -> HostMemory:
    """What /proc/meminfo says."""
    table = _table(_text(root / "proc/meminfo"))
    total, available = table.get("MemTotal"), table.get("MemAvailable")
    if total is None or available is None:
        raise ConfigError("cannot read from /proc/meminfo how much memory this machine has; give host_memory")
    return HostMemory(total * 1024, available * 1024, "MemAvailable of /proc/meminfo")


_OWN_LIMITS = (("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d"))
"""Limits of a process in /proc/self/limits, what of each is used in /proc/self/status, and the command that sets it."""


def _own_limits(root: Path) -> Iterator[HostMemory]:
    """What the limits of this process leave free, where there are some: what is mapped counts, used or not."""
    limits = _text(root / "proc/self/limits").splitlines()
    status = _table(_text(root / "proc/self/status"))
    for name, used, command in _OWN_LIMITS:
        soft = next((line[len(name) :].split()[0] for line in limits if line.startswith(name)), "unlimited")
        if soft.isdecimal() and used in status:
            limit = int(soft)
            yield HostMemory(limit, max(0, limit - 1024 * status[used]), f"limit of this process ({command})")


def _group_memory(folder: Path, version: _Version, physical: int, root: Path) -> HostMemory | None:
    """What the group in ``folder`` leaves free; None if it has no limit below the machine's memory."""
    limits = {name: _number(folder / name) for name in version.limits}
    # Version 1 writes "no limit" as a number beyond any memory.
    real = {name: value for name, value in limits.items() if value is not None and value < physical}
    usage = _number(folder / version.usage)
    if not real or usage is None:
        return None
    name = min(real, key=lambda key: real[key])
    table = _table(_text(folder / "memory.stat"))
    cache = next((table[key] for key in version.reclaimable if key in table), 0)
    shown = PurePosixPath("/") / folder.relative_to(root)
    return HostMemory(real[name], max(0, real[name] - max(0, usage - cache)), f"cgroup limit {shown / name}")


def _memory_mounts(root: Path) -> Iterator[_Mount]:
    """The mounted hierarchies that may limit memory."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, described = left.split(), right.split()
        if len(fields) < 5 or len(described) < 3:
            continue
        filesystem, options = described[0], described[2].split(",")
        if filesystem == _V2.filesystem or (filesystem == _V1.filesystem and "memory" in options):
            version = _V2 if filesystem == _V2.filesystem else _V1
            yield _Mount(version, PurePosixPath(_unescape(fields[3])), _under(root, _unescape(fields[4])))


def _groups(root: Path, mount: _Mount) -> Iterator[Path]:
    """Folders of this process's group and of every ancestor that the mount shows, innermost first."""
    inside = _inside(mount.root, _own_group(root, mount.version))
    for group in (inside, *inside.parents):
        yield mount.point / group


def _own_group(root: Path, version: _Version) -> PurePosixPath:
    """This process's group in the hierarchy of ``version``, as /proc/self/cgroup names it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if version is _V2 else "memory" in controllers.split(","):
            return PurePosixPath(path)
    return PurePosixPath("/")


def _inside(shown: PurePosixPath, group: PurePosixPath) -> PurePosixPath:
    """``group`` relative to the mounted group ``shown``.

    In a container the two may be named from different roots; then the mounted group is the only one that can be read.
    """
    if ".." in group.parts or not group.is_relative_to(shown):
        return PurePosixPath()
    return group.relative_to(shown)


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _unescape(text: str) -> str:
    """mountinfo writes spaces and the like as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _text(path: Path) -> str:
    """The file's text, or nothing: a group's files may be missing (the root group has none) or unreadable."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _table(text: str) -> dict[str, int]:
    """Lines of "name value" or "name: value kB" as a mapping."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
