"""The machine that a plan is made for when it is this one: as it was measured, or as machines of its kind are."""

from __future__ import annotations

from dataclasses import replace

from forebay.budgets import DiskBudget
from forebay.machine import Curve, Disk, Link, Machine
from forebay.profiler.probe import cached, nominal
from forebay.tiers.host import disks_of, free_in
from forebay.units import MiB

__all__ = ["this_machine"]

UNMEASURED_DISK = (
    Link(Curve(((MiB, 1.5e9), (16 * MiB, 3.0e9))), 1e-4),
    Link(Curve(((MiB, 1e9), (16 * MiB, 1.5e9))), 1e-4),
)
"""Reading and writing of a disk that nobody has measured: an NVMe disk of the PCIe 3 generation."""


def this_machine(device: str | None = None, disk: DiskBudget | None = None) -> tuple[Machine, tuple[str, ...]]:
    """This machine with ``device`` (torch's name; None: a GPU where there is one) and the disk of a budget, and in
    words what of it was never measured. Nothing is timed here.

    Raises ``ModelError`` for a device that is not there and ``StorageError`` or ``ConfigError`` for a folder that
    cannot be used.
    """
    notes: tuple[str, ...] = ()
    machine = cached(device)
    if machine is None:
        notes = ("this machine has not been measured: rates are typical ones; run forebay doctor for its own",)
        machine = nominal(device)
    if disk is None:
        return machine, notes
    paths = [share.path for share in disk.folders]
    free, disks = free_in(paths), 1 if len(paths) == 1 else len(disks_of(paths))
    if disks > 1:
        notes += (f"{disks} disks of one rate side by side, each as fast as the one of {disk.path}",)
    if machine.disk is not None:
        return replace(machine, disk=_side_by_side(replace(machine.disk, capacity=free), disks)), notes
    note = f"the disk of {disk.path} has not been measured: rates of a common one; run forebay doctor --disk"
    return replace(machine, disk=_side_by_side(Disk(free, *UNMEASURED_DISK, path=disk.path), disks)), (*notes, note)


def _side_by_side(disk: Disk, count: int) -> Disk:
    """``count`` disks like ``disk``, over which each transfer is spread: each moves its part of the bytes."""

    def wider(link: Link) -> Link:
        return replace(link, curve=Curve(tuple((size * count, rate * count) for size, rate in link.curve.points)))

    return replace(disk, read=wider(disk.read), write=wider(disk.write))
