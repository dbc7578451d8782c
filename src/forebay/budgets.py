"""Bytes that a run may take of each tier. Frozen, no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from forebay.errors import ConfigError
from forebay.memory import Tier
from forebay.units import format_apart, parse_bytes, parse_disks

__all__ = ["Budget", "DiskBudget", "DiskShare", "Size", "expect_disk"]

Size = int | str
"""Bytes, or what ``units.parse_bytes`` reads (``"24GiB"``)."""


@dataclass(frozen=True)
class DiskShare:
    """A folder of the disk tier, ``path``, and the bytes allowed in it, ``nbytes`` (None: what its file system has
    free).

    Raises ``ConfigError`` for 0 bytes or less.
    """

    path: str
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes is not None and self.nbytes <= 0:
            raise ConfigError(
                f"the disk budget must be more than 0 bytes, got {self.nbytes} for {self.path}; or leave the disk out"
            )


@dataclass(frozen=True)
class DiskBudget:
    """Folders for the disk tier and the bytes allowed in all of them (None: what their file systems have free).

    ``path`` is the first folder and ``beside`` are the others, each of which should be a disk of its own: what is on
    disk is spread over all of them in stripes. ``nbytes`` less the bytes of the others is what ``path`` may hold.
    Raises ``ConfigError`` for 0 bytes or less, a folder that is named twice, and sizes for some folders only.
    """

    path: str
    nbytes: int | None = None
    beside: tuple[DiskShare, ...] = ()

    def __post_init__(self) -> None:
        if self.nbytes is not None and self.nbytes <= 0:
            raise ConfigError(f"the disk budget must be more than 0 bytes, got {self.nbytes}; or leave the disk out")
        if any((share.nbytes is None) != (self.nbytes is None) for share in self.beside):
            raise ConfigError("of several disk folders either each has a size or none; write PATH:SIZE,PATH:SIZE")
        paths = [share.path for share in self.folders]
        if len(set(paths)) < len(paths):
            raise ConfigError(f"the disk folder {max(paths, key=paths.count)} is named twice; name each one once")

    @classmethod
    def of(cls, text: str | os.PathLike[str]) -> DiskBudget:
        """The budget written as ``PATH``, ``PATH:SIZE`` or several of these with commas between them.

        Raises ``UnitError`` for what cannot be read and ``ConfigError`` for sizes of 0 or missing ones.
        """
        first, *others = (DiskShare(path, nbytes) for path, nbytes in parse_disks(text))
        sizes = [share.nbytes for share in (first, *others) if share.nbytes is not None]
        return cls(first.path, None if first.nbytes is None else sum(sizes), tuple(others))

    @property
    def folders(self) -> tuple[DiskShare, ...]:
        """Every folder, with the bytes that it may hold."""
        if self.nbytes is None:
            return (DiskShare(self.path), *self.beside)
        others = sum(share.nbytes for share in self.beside if share.nbytes is not None)
        return (DiskShare(self.path, self.nbytes - others), *self.beside)


@dataclass(frozen=True)
class Budget:
    """Bytes allowed per tier: ``device``, ``host``, ``pinned`` (of the host, page-locked), ``disk`` (None: no disk).

    ``host`` and ``pinned`` None: what the machine (or its cgroup) has. ``device_reserve`` of the device's are in no
    plan: they are for what the training loop has there beside the model's step, such as another model. Raises
    ``ConfigError`` for 0 bytes or less, and for a reserve that is not less than ``device``.
    """

    device: int
    host: int | None = None
    pinned: int | None = None
    disk: DiskBudget | None = None
    device_reserve: int = 0

    def __post_init__(self) -> None:
        for name, value in (("device", self.device), ("host", self.host), ("pinned", self.pinned)):
            if not isinstance(value, int | None):
                raise ConfigError(f"a Budget is in bytes, got {value!r} for {name}; Budget.of('24GiB') reads sizes")
            if value is not None and value <= 0:
                raise ConfigError(f"the {name} budget must be more than 0 bytes, got {value}")
        if not isinstance(self.device, int) or not isinstance(self.device_reserve, int):
            raise ConfigError(
                f"a Budget is in bytes, got {self.device!r} and {self.device_reserve!r} to reserve; Budget.of('24GiB') "
                f"reads sizes"
            )
        if not 0 <= self.device_reserve < self.device:
            reserve, device = format_apart(self.device_reserve, self.device)
            raise ConfigError(
                f"device_reserve is the part of device_memory that no plan takes, got {reserve} of {device}; reserve "
                f"less, or raise device_memory"
            )

    @property
    def planned_device(self) -> int:
        """Bytes of the device that a plan may take."""
        return self.device - self.device_reserve

    def reserve(self, tier: Tier) -> int:
        """Bytes of what is allowed of ``tier`` that no plan takes."""
        return self.device_reserve if tier is Tier.DEVICE else 0

    def with_planned_device(self, nbytes: int) -> Budget:
        """The same, but that a plan may take ``nbytes`` of the device."""
        return replace(self, device=nbytes + self.device_reserve)

    @classmethod
    def of(
        cls,
        device: Size,
        host: Size | None = None,
        disk: str | os.PathLike[str] | None = None,
        device_reserve: Size = 0,
    ) -> Budget:
        """The budget of sizes as they are written, ``disk`` as ``DiskBudget.of`` reads it. Raises ``UnitError`` for
        what cannot be read and ``ConfigError`` for sizes of 0."""
        folder = None if disk is None else DiskBudget.of(disk)
        most = None if host is None else parse_bytes(host)
        return cls(parse_bytes(device), most, None, folder, parse_bytes(device_reserve))


def expect_disk(disk: object | None, *, checksums: bool) -> None:
    """Raises ``ConfigError`` where ``checksums`` are asked for of what is on a disk that there is not."""
    if not isinstance(checksums, bool):
        raise ConfigError(f"checksums must be True or False, got {checksums!r}")
    if checksums and disk is None:
        raise ConfigError(
            "checksums are of what is on disk, and no disk is allowed; give a disk (--disk PATH, or disk=), or leave "
            "checksums out"
        )
