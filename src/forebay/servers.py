"""Several devices of one host: how they are joined, and what a step of one model over them comes to. No torch.

These are records: ``planners.parallel`` decides, ``simulation`` plays, and nothing runs on several devices yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError, UnitError
from forebay.timeline import Lane
from forebay.units import format_rate, parse_bytes

__all__ = ["DeviceShare", "Server", "ServerPlan"]

MOST_DEVICES = 64
"""More devices than any one host has."""

_GROUPS = re.compile(r"\d+(\+\d+)*")


@dataclass(frozen=True)
class Server:
    """So many devices as there are ``roots``: of each the root complex that its link to the host ends on. ``channel``:
    bytes/s of a root complex in one direction, for all links that end there. ``peer``: bytes/s at which a device sends
    to the others, and as many at which it gets, over links between devices that bypass the host (None: there are none).

    Raises ``ConfigError`` for no device and for links of nothing."""

    roots: tuple[int, ...]
    channel: float
    peer: float | None = None

    def __post_init__(self) -> None:
        if not self.roots or self.channel <= 0:
            raise ConfigError("a server has a device or more, and a channel that moves more than 0 bytes/s")
        if self.peer is not None and self.peer <= 0:
            raise ConfigError(f"links between devices move more than 0 bytes/s, got {self.peer}")

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.roots)

    @property
    def sharers(self) -> int:
        """The most devices whose links end on one root complex."""
        return max(self.roots.count(root) for root in self.roots)

    @property
    def groups(self) -> str:
        """Devices by root complex, as ``parse`` reads them."""
        return "+".join(str(self.roots.count(root)) for root in dict.fromkeys(self.roots))

    @property
    def words(self) -> str:
        """How the devices are joined."""
        links = "no links between devices" if self.peer is None else f"{format_rate(self.peer)} between devices"
        where = "on one root complex" if len(set(self.roots)) == 1 else "by root complex"
        return f"{self.groups} device{'s' * (self.devices > 1)} {where}, {links}"

    @classmethod
    def parse(cls, text: str, channel: float) -> Server:
        """The server written ``N``, ``N+N`` (devices by root complex) or either with ``:RATE`` behind it, bytes a
        second between devices, as ``8:25GB``. Raises ``ConfigError`` that says so."""
        groups, colon, rate = text.partition(":")
        form = "devices are written N or N+N (by root complex), with links between them as N:RATE, like 8:25GB"
        if _GROUPS.fullmatch(groups) is None:
            raise ConfigError(f"{form}; got {text!r}")
        counts = [int(count) for count in groups.split("+")]
        if not 0 < min(counts) <= sum(counts) <= MOST_DEVICES:
            raise ConfigError(f"a server has 1 to {MOST_DEVICES} devices, got {text!r}")
        try:
            peer = float(parse_bytes(rate.removesuffix("/s"))) if colon else None
        except UnitError as error:
            raise ConfigError(f"{form}; got {text!r}: {error}") from None
        return cls(tuple(root for root, count in enumerate(counts) for _ in range(count)), channel, peer)


@dataclass(frozen=True)
class DeviceShare:
    """What one device does in a step: it computes with ``blocks`` blocks for ``busy`` seconds and holds ``peak`` bytes
    at most."""

    blocks: int
    busy: float
    peak: int

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``."""
        return {"blocks": self.blocks, "busy_seconds": self.busy, "peak": self.peak}


@dataclass(frozen=True)
class ServerPlan:
    """What a step of one model over several devices comes to under ``policy``: ``step_seconds``, what each of
    ``devices`` does, the most bytes on the ``host``, bytes that all of them ``moved`` in a step, by lane; why in words
    (``reasons``)."""

    policy: str
    step_seconds: float
    devices: tuple[DeviceShare, ...]
    host: int
    moved: Mapping[Lane, int]
    reasons: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes on the fullest device."""
        return max(share.peak for share in self.devices)

    @property
    def idle_share(self) -> float:
        """Share of the step, 0 to 1, in which devices compute nothing, on average."""
        busy = sum(share.busy for share in self.devices) / len(self.devices)
        return 1 - busy / self.step_seconds if self.step_seconds else 0.0
