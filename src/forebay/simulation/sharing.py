"""How much slower lanes run beside each other. No torch.

Every lane that runs keeps a share of the rate it has alone, and the shares change only when a lane starts or ends
something. Three things are shared:

*The link.* While h2d and d2h both run, each keeps ``duplex`` of its rate (measured that way). The same of the disk:
while it is read and written, each keeps ``Disk.duplex``.

*The cores*, on machines where host lanes use those that compute (``shared_cores`` above 0). The model is fair
sharing of processors, as the operating system's scheduler does it: a host lane is one thread, compute is one thread
on each of C cores. With n host lanes beside compute there are C + n threads on C cores and each gets C / (C + n) of
one; with s = 1 / C, every lane runs at 1 / (1 + s n). Without compute, n threads on C cores get min(1, 1 / (s n)).
With s = 1 work is conserved: the shares of the lanes that run add up to 1. ``shared_cores`` is what compute was seen
to lose beside one host lane, L = 1 - 1 / (1 + s), so s = L / (1 - L); from L = 1/2 on all is shared and s stays 1.
A disk lane waits for the disk most of the time (O_DIRECT moves bytes without a core), and what it takes of one is
little: ``Disk.shared_cores`` is what compute was seen to lose beside it, D, so that it counts as d = D / (1 - D)
threads. Beside compute or a host lane it runs at 1 / (1 + d) itself: who sleeps most is woken first, however many wait.
What a disk lane brings to a process beside the storage, or from there, goes from memory to memory: that is a host
thread's work, and no disk's.

*The disk's ends.* A process beside the storage is one more that reads or writes: n at a time have 2 ``Disk.duplex`` of
the disk between them, each as much as any other, and each the whole of it while it is alone. With a ``duplex`` of 1
nothing is shared: so says a catalogue of what nobody has measured.

*Host memory.* While the update lane runs beside copies, the bytes/s that they read and write there add up to at most
``host_bandwidth``, or to what the fastest of them was measured to reach alone; what is too much is taken from all in
proportion. An update's bytes are all in host memory; a copied byte is there once, and twice on a ``cpu`` machine, whose
device is host memory too. Copies among themselves are left out: ``duplex`` has seen their host memory.
"""

from __future__ import annotations

from typing import Final, final

from forebay.machine import Machine
from forebay.timeline import Lane

__all__ = ["LANES", "Sharing"]

LANES: Final = (
    Lane.COMPUTE,
    Lane.H2D,
    Lane.D2H,
    Lane.UPDATE,
    Lane.DISK_READ,
    Lane.DISK_WRITE,
    Lane.DEVICE_UPDATE,
    Lane.STORAGE_UPDATE,
)
"""The lanes that actions run on; their places here are the bits of a set of lanes."""

_COMPUTE, _H2D, _D2H, _UPDATE = map(LANES.index, (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE))
COMPUTE, H2D, D2H, UPDATE = (1 << place for place in (_COMPUTE, _H2D, _D2H, _UPDATE))
HOST = H2D | D2H | UPDATE
THREADS = HOST | 1 << LANES.index(Lane.DEVICE_UPDATE)
DISK = 1 << LANES.index(Lane.DISK_READ) | 1 << LANES.index(Lane.DISK_WRITE)
COPYING: Final = len(LANES)
"""How many bits beside the bit of a lane of the disk is the one that it has instead while it copies from memory to
memory."""
COPIES = DISK << COPYING


@final
class Sharing:
    """The shares of ``machine``'s lanes."""

    def __init__(self, machine: Machine) -> None:
        lost = machine.shared_cores
        self.crowding = min(1.0, lost / (1 - lost)) if lost < 1 else 1.0
        self._duplex = machine.duplex
        # Updates beside the storage are the work of a host thread, unless the disk has a device for it.
        within = machine.disk is not None and machine.disk.update_rate is not None
        beside = 0 if within else 1 << LANES.index(Lane.STORAGE_UPDATE)
        self._threads = THREADS | beside
        self._on_disk = DISK | beside
        self._disk_duplex = 1.0 if machine.disk is None else machine.disk.duplex
        lost = 0.0 if machine.disk is None or not self.crowding else machine.disk.shared_cores
        self._disk_crowding = lost / (1 - lost)
        self._bandwidth = machine.host_bandwidth
        copied = 2.0 if machine.device_kind == "cpu" else 1.0
        self._traffic = [1.0 if lane is Lane.UPDATE else copied for lane in LANES]
        self._known: dict[int, list[float]] = {}
        self._crowded: dict[tuple[int, float, float, float], list[float]] = {}

    def may_crowd(self, fastest: list[float]) -> bool:
        """Whether host memory can become too slow, with ``fastest`` the most bytes/s of each lane alone."""
        host = [rate * self._traffic[i] for i, rate in enumerate(fastest) if HOST >> i & 1]
        return sum(host) > max(self._bandwidth, *host)

    def alone(self, *, crowds: bool) -> int:
        """The lanes whose rate is their own whatever else runs, and that take none from any other. ``crowds`` says that
        host memory may become too slow (``may_crowd``)."""
        # What is copied to a process beside the storage takes of the cores, whatever the disk does.
        copied = self.crowding and self._on_disk != DISK
        lanes = DISK if self._disk_duplex == 1 and not self._disk_crowding and not copied else 0
        if not self.crowding:
            lanes |= COMPUTE | self._threads & ~HOST
            if self._disk_duplex < 1:
                lanes &= ~self._on_disk
            if not crowds:
                lanes |= UPDATE | (H2D | D2H if self._duplex == 1 else 0)
        return lanes

    def shares(self, busy: int) -> list[float]:
        """The share of its rate that each lane keeps while the lanes in ``busy`` run, host memory left out."""
        known = self._known.get(busy)
        if known is None:
            known = self._known[busy] = [self._share(1 << i, busy) for i in range(len(LANES))]
        return known

    def crowded(self, busy: int, h2d: float, d2h: float, update: float) -> list[float]:
        """``shares`` with host memory; ``h2d``, ``d2h`` and ``update`` are the bytes/s that what these lanes run would
        have alone."""
        if not busy & UPDATE or not busy & (H2D | D2H):
            return self.shares(busy)
        key = busy, h2d, d2h, update
        known = self._crowded.get(key)
        if known is None:
            known = self._crowded[key] = self._crowd(busy, {_H2D: h2d, _D2H: d2h, _UPDATE: update})
        return known

    def _crowd(self, busy: int, rates: dict[int, float]) -> list[float]:
        shares = self.shares(busy)
        alone = {i: rate * self._traffic[i] for i, rate in rates.items() if busy & (1 << i)}
        wanted = sum(rate * shares[i] for i, rate in alone.items())
        allowed = max(self._bandwidth, *alone.values())
        if wanted <= allowed:
            return shares
        return [s * allowed / wanted if i in alone else s for i, s in enumerate(shares)]

    def _share(self, lane: int, busy: int) -> float:
        copies = bool(busy & lane << COPYING & COPIES)
        if lane & DISK and not copies:
            share = self._of_disk(busy)
            with_cores = busy & (COMPUTE | self._threads | COPIES)
            return min(share, 1 / (1 + self._disk_crowding)) if with_cores else share
        share = self._duplex if lane & (H2D | D2H) and busy & H2D and busy & D2H else 1.0
        if lane & self._on_disk and not copies:
            share = self._of_disk(busy)
        host = (busy & (self._threads | COPIES)).bit_count()
        if copies or lane & (COMPUTE | self._threads):
            threads = self.crowding * host + self._disk_crowding * (busy & DISK).bit_count()
            # The tighter of the two: duplex was measured on the same cores, and has seen their sharing.
            share = min(share, 1 / (1 + threads) if busy & COMPUTE else 1 / max(1.0, threads))
        return share

    def _of_disk(self, busy: int) -> float:
        """The share of its rate that the disk leaves to each of those in ``busy`` that read or write."""
        users = (busy & self._on_disk).bit_count()
        return min(1.0, 2 * self._disk_duplex / users) if users > 1 and self._disk_duplex < 1 else 1.0
