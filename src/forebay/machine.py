"""What a machine can hold, move and compute. Measured (``forebay doctor``) or from the catalogue; no torch.

All capacities are bytes, all rates bytes/s or FLOP/s, all latencies seconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from forebay.calls import Calls
from forebay.errors import ConfigError

__all__ = ["MACHINE_SCHEMA", "SPARED_CORES", "Curve", "Disk", "Link", "Machine"]

MACHINE_SCHEMA = 2

SPARED_CORES = 1
"""Cores that updates leave to others where nothing is known of what the last one would bring them."""


@dataclass(frozen=True)
class Curve:
    """A rate that depends on how much is moved at once: ``points`` are (bytes, bytes/s), sizes increasing.

    Between two points the rate is linear in the size; outside of them it is that of the nearest.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or any(not 0 < rate < inf for _, rate in self.points):
            raise ConfigError(f"a curve needs points of increasing sizes and rates above 0, got {self.points}")

    @property
    def best(self) -> float:
        """The highest rate, bytes/s."""
        return max(rate for _, rate in self.points)

    def rate(self, nbytes: float) -> float:
        """Bytes/s for a transfer of ``nbytes``."""
        above = bisect_right(self.points, nbytes, key=lambda p: p[0])
        if above == 0:
            return self.points[0][1]
        if above == len(self.points):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[above - 1], self.points[above]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


@dataclass(frozen=True)
class Link:
    """One direction of a way between two tiers: ``curve``, bytes/s over bytes, and ``latency``, seconds a transfer.

    Raises ``ConfigError`` for a latency that is not 0 or more.
    """

    curve: Curve
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < inf:
            raise ConfigError(f"a latency is 0 or more seconds, got {self.latency}")

    def seconds(self, nbytes: int) -> float:
        """Seconds of one transfer of ``nbytes`` that has the link to itself."""
        return self.latency + nbytes / self.curve.rate(nbytes) if nbytes else 0.0


@dataclass(frozen=True)
class Disk:
    """The disk tier: bytes free (``capacity``), and its two links. ``path`` is where it was measured ("" in the
    catalogue).

    The links are those of transfers in the calls ``reads`` and ``writes``, the ways in which this disk was found
    fastest. ``duplex`` is the share of its rate that each direction keeps while both are busy, ``shared_cores`` the
    share that compute loses of its own while the disk is read or written, and the disk to compute (0 where the device
    has cores of its own). ``update_rate`` is what a device inside the disk, or inside all of its drives together,
    updates: bytes/s of states and parameters in and out and gradients in (None: there is none, and an update beside the
    storage is one of a process on the host). Of such a process, which reads and writes by turns, ``alternation`` is the
    share of the links' rates that it has, and ``order_seconds`` are what each chunk takes whatever its size: told,
    begun, answered.
    """

    capacity: int
    read: Link
    write: Link
    path: str = ""
    reads: Calls = field(default_factory=Calls)
    writes: Calls = field(default_factory=Calls)
    duplex: float = 1.0
    update_rate: float | None = None
    shared_cores: float = 0.0
    alternation: float = 1.0
    order_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("duplex", self.duplex), ("alternation", self.alternation)):
            if not 0 < share <= 1:
                raise ConfigError(f"{name} of a disk is in (0, 1], got {share}")
        if self.capacity < 0:
            raise ConfigError(f"capacity of a disk is 0 bytes or more, got {self.capacity}")
        if not 0 <= self.order_seconds < inf:
            raise ConfigError(f"order_seconds of a disk are 0 or more, got {self.order_seconds}")
        if not 0 <= self.shared_cores < 1:
            raise ConfigError(f"shared_cores of a disk is in [0, 1), got {self.shared_cores}")
        if self.update_rate is not None and not 0 < self.update_rate < inf:
            raise ConfigError(f"update_rate of a disk must be more than 0 bytes/s, got {self.update_rate}")


@dataclass(frozen=True)
class Machine:
    """One device with the host and the disk beside it.

    ``name`` is for people. ``source`` is ``measured`` or ``catalogue``, and ``sources`` says where the figures are
    from. ``device_kind`` is ``cpu`` or ``cuda``. ``device_capacity`` and ``host_capacity`` are bytes that a run may
    have.

    Compute: ``compute`` is FLOP/s per dtype on large matrices, ``device_bandwidth`` what elementwise ops reach,
    ``launch_seconds`` what the host takes for an op beside its kernel (the least time of an op on ``cuda``, where the
    host works ahead), ``watch_seconds`` how much more that is where parameters come and go (``cpu``: hooks, lanes),
    ``handover_seconds`` what it takes for each transfer of an activation (``cpu``: hooks, and a lane's thread that is
    woken up where the copy is not made inline), ``replay_seconds`` how much longer an op takes that runs again
    (``cpu``: the saved-tensor hooks of a checkpoint), ``treat_seconds`` how much longer each op takes in the forward of
    a block of which a plan treats some and every op is seen (``cpu``: the mode that sees them), ``together_seconds``
    how much longer an op takes in micro-batches that pass the model together, or in models that train in turns
    (``cpu``: kernels run on more threads than there are cores). ``op_seconds`` are measured seconds of an op alone per
    ``Work.signature``; they go before everything else. ``device_bandwidth`` and ``host_bandwidth`` count each byte that
    is read and each that is written.

    Links: ``h2d`` and ``d2h`` of everything that crosses, but that ``offload``, where it is stated, is for activations
    on their way to the host (``cpu``: the threads that compute may copy all that crosses between two ops, and what a
    step makes of activations is another rate than what it makes of gradients).

    Host: ``host_bandwidth`` of a large copy, ``update_rate`` the bytes/s that an optimizer update moves,
    ``update_elements`` the elements/s of updates that are known to differ from that, because the cores bind and not the
    bytes, by ``forebay.states.update_kind``; ``spared_cores`` how many of the host's cores updates beside compute are
    better off without; ``pinned_capacity`` what may be page-locked (0: this device needs none).

    Sharing: ``duplex`` is the share of its rate that each direction of the h2d/d2h pair keeps while both are busy;
    ``shared_cores`` the share of its rate that compute loses while a host lane is busy (0 where the device has an
    engine of its own for that; near 1 where device and host are the same cores), and host lanes lose to compute.
    """

    name: str
    source: str
    device_kind: str
    device_capacity: int
    host_capacity: int
    pinned_capacity: int
    compute: Mapping[str, float]
    device_bandwidth: float
    host_bandwidth: float
    update_rate: float
    h2d: Link
    d2h: Link
    offload: Link | None = None
    duplex: float = 1.0
    shared_cores: float = 0.0
    launch_seconds: float = 0.0
    watch_seconds: float = 0.0
    handover_seconds: float = 0.0
    replay_seconds: float = 0.0
    treat_seconds: float = 0.0
    together_seconds: float = 0.0
    disk: Disk | None = None
    op_seconds: Mapping[str, float] = field(default_factory=dict)
    update_elements: Mapping[str, float] = field(default_factory=dict)
    spared_cores: int = SPARED_CORES
    sources: tuple[str, ...] = ()
    schema: int = MACHINE_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != MACHINE_SCHEMA:
            raise ConfigError(
                f"machine {self.name} has schema {self.schema}, this forebay reads schema {MACHINE_SCHEMA}; "
                f"measure it again with forebay doctor"
            )
        if self.source not in ("measured", "catalogue"):
            raise ConfigError(f"machine {self.name}: source is measured or catalogue, got {self.source!r}")
        if self.device_kind not in ("cpu", "cuda"):
            raise ConfigError(f"machine {self.name}: device_kind is cpu or cuda, got {self.device_kind!r}")
        if not self.compute:
            raise ConfigError(f"machine {self.name}: compute names no dtype")
        self._check_figures()
        if not 0 < self.duplex <= 1 or not 0 <= self.shared_cores <= 1:
            raise ConfigError(
                f"machine {self.name}: duplex is in (0, 1] and shared_cores in [0, 1], got {self.duplex} and "
                f"{self.shared_cores}"
            )

    def _check_figures(self) -> None:
        """Raises for capacities, rates and seconds that are none."""
        positive = {
            "device_capacity": self.device_capacity,
            "host_capacity": self.host_capacity,
            "device_bandwidth": self.device_bandwidth,
            "host_bandwidth": self.host_bandwidth,
            "update_rate": self.update_rate,
            **{f"compute.{dtype}": rate for dtype, rate in self.compute.items()},
            **{f"update_elements.{kind}": rate for kind, rate in self.update_elements.items()},
        }
        for name, value in positive.items():
            if not 0 < value < inf:
                raise ConfigError(f"machine {self.name}: {name} must be more than 0 and finite, got {value}")
        others = {
            "pinned_capacity": self.pinned_capacity,
            "launch_seconds": self.launch_seconds,
            "watch_seconds": self.watch_seconds,
            "handover_seconds": self.handover_seconds,
            "replay_seconds": self.replay_seconds,
            "treat_seconds": self.treat_seconds,
            "together_seconds": self.together_seconds,
            "spared_cores": self.spared_cores,
            **{f"op_seconds.{signature}": seconds for signature, seconds in self.op_seconds.items()},
        }
        for name, value in others.items():
            if not 0 <= value < inf:
                raise ConfigError(f"machine {self.name}: {name} must be 0 or more and finite, got {value}")

    @property
    def leaving(self) -> Link:
        """The link of activations on their way to the host."""
        return self.offload or self.d2h

    @property
    def copies_between_ops(self) -> bool:
        """Whether those that compute copy activations themselves, between two ops: none is under way beside an op."""
        return self.offload is not None

    @property
    def out_rate(self) -> float:
        """The most bytes/s of anything on its way to the host."""
        return max(self.d2h.curve.best, self.leaving.curve.best)

    def to_json(self) -> str:
        """The machine as one JSON object."""
        from forebay.records import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Machine:
        """Reads ``to_json``'s text, of schema 1 too. Raises ``ConfigError`` naming the field that is wrong."""
        from forebay.records import load

        return load(cls, _with_calls_of_their_own(text))


def _with_calls_of_their_own(text: str | bytes) -> str | bytes:
    """``text`` of schema 1, where a disk was read and written in the same calls, as one of schema 2; else as it is."""
    try:
        whole = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text  # what is wrong with it is said by who reads it
    if not isinstance(whole, dict) or whole.get("schema") != 1:
        return text
    disk = whole.get("disk")
    if isinstance(disk, dict):
        calls = {name: disk.pop(name) for name in ("block", "depth") if name in disk}
        whole["disk"] = {**disk, "reads": calls, "writes": calls}
    return json.dumps({**whole, "schema": 2})
