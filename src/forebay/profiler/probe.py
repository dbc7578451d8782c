"""This machine as a record: measured once, remembered, and measured again when something has changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from forebay.device import open_device
from forebay.device.base import Device
from forebay.errors import ConfigError, ModelError
from forebay.kernels.team import cores_beside_compute
from forebay.layout import PAGE
from forebay.machine import SPARED_CORES, Disk, Machine
from forebay.profiler.company import Company
from forebay.profiler.compute_rates import (
    arithmetic,
    elementwise_bandwidth,
    fresh_bandwidth,
    launch_seconds,
)
from forebay.profiler.disk_rates import measure_disk
from forebay.profiler.effort import CPU_EFFORT, CUDA_EFFORT, Effort
from forebay.profiler.in_step import as_in_a_step, lane_rates, together_seconds
from forebay.profiler.machine_cache import (
    Circumstances,
    Remembered,
    cache_file,
    cache_folder,
    cores,
    cpu_model,
    recall,
)
from forebay.profiler.nominal import typical
from forebay.profiler.overhead import Overhead, host_overhead
from forebay.profiler.pinning import memlock_limit, pinned_capacity, tries_with
from forebay.profiler.sharing import shared_cores
from forebay.profiler.stopwatch import CudaStopwatch, Stopwatch, WallStopwatch
from forebay.profiler.transfer_rates import Transfers, duplex, host_bandwidth, link
from forebay.profiler.update_rates import core_bound_rates, spared_cores, update_rate
from forebay.tiers.arena import CudaPinner, NoPinner, Pinner
from forebay.tiers.host import available_disk, available_host_memory
from forebay.timeline import Lane
from forebay.units import format_rate

__all__ = ["Examination", "cached", "circumstances", "examine", "nominal", "probe"]

Tell = Callable[[str], None]

_LEISURE = 9.0
"""Seconds of measuring after which the rest is hurried."""


@dataclass(frozen=True)
class Examination:
    """A machine, in words what its figures cannot say, and the seconds it took to measure (0: remembered)."""

    machine: Machine
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0


def probe(
    device: str | None = None,
    disk: str | None = None,
    refresh: bool = False,
    *,
    folder: Path | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
) -> Machine:
    """This machine: ``device`` (None: ``cuda`` where there is one), the host, and the disk of the folder ``disk``.

    Takes under 20 s the first time. The figures are kept in ``folder`` (None: the user's cache folder) and used again
    as long as the device, the processor, its cores for this process and torch are the same; capacities are always
    those of the moment. ``refresh`` measures anew. ``disk`` None: the one measured last, if any. ``tell`` is told in
    one line when figures that were kept cannot be used (None: the log does), and when other programs had the cores
    meanwhile: then it is measured once more, and what is still disturbed is not kept.

    Raises ``ModelError`` for a device that is not there, ``ConfigError`` and ``DiskFull`` for a disk that cannot be
    measured.
    """
    return examine(device, disk, refresh, folder=folder, effort=effort, tell=tell).machine


def examine(
    device: str | None = None,
    disk: str | None = None,
    refresh: bool = False,
    *,
    folder: Path | None = None,
    effort: Effort | None = None,
    tell: Tell | None = None,
) -> Examination:
    """``probe`` with what it noticed on the way."""
    say = tell or logging.getLogger("forebay").warning
    if disk is not None:
        available_disk(disk)  # refuses what cannot be measured before all that can
    opened = open_device(device)
    try:
        here = _Here(opened, effort)
        file = cache_file(folder or cache_folder(), opened.name)
        found, reason = (None, "") if refresh else recall(file, here.circumstances)
        if reason:
            say(f"{reason}; measuring anew")
        start = time.perf_counter()
        if found is not None and (disk is None or _same(found.machine.disk, disk)):
            return Examination(_as_now(found.machine, here), found.remarks)
        # A default device of the program's own would put what is measured elsewhere, and costs time with every call.
        with torch._C.DisableTorchFunction():
            found, busy = _undisturbed(here, found, disk, say)
        seconds = time.perf_counter() - start
        if busy:
            say(busy)
            return Examination(found.machine, (busy, *found.remarks), seconds)
        try:
            found.save(file)
        except OSError as error:
            say(f"cannot keep the figures in {file}: {error.strerror}; they are measured again next time")
        return Examination(found.machine, found.remarks, seconds)
    finally:
        opened.close()


def cached(device: str | None = None, *, folder: Path | None = None) -> Machine | None:
    """What ``probe`` would return without measuring anything; None if it would have to."""
    opened = open_device(device)
    try:
        here = _Here(opened, None)
        found, _ = recall(cache_file(folder or cache_folder(), opened.name), here.circumstances)
        return None if found is None else _as_now(found.machine, here)
    finally:
        opened.close()


def circumstances(device: str | None = None) -> tuple[str, Circumstances]:
    """Torch's name of ``device`` (None: ``cuda`` where there is one), and what must stay the same for figures of it.

    Raises ``ModelError`` for a device that is not there.
    """
    opened = open_device(device)
    try:
        return opened.name, _Here(opened, None).circumstances
    finally:
        opened.close()


def nominal(device: str | None = None) -> Machine:
    """This machine without any timing: capacities as they are here, rates typical for the kind of device.

    The rates are the same on every call. Raises ``ModelError`` for a device that is not there.
    """
    opened = open_device(device)
    try:
        here = _Here(opened, None)
        # Without a try nobody knows what can be page-locked; the runtime falls back to pageable arenas.
        return typical(here.kind, here.name, here.device_capacity(), here.host, here.host if here.kind == "cuda" else 0)
    finally:
        opened.close()


@final
class _Here:
    """The device, and the host that it is in."""

    def __init__(self, device: Device, effort: Effort | None) -> None:
        self.device = device
        torch_device = torch.device(device.name)
        self.kind = torch_device.type
        self.index = torch_device.index or 0
        self.effort = effort or (CUDA_EFFORT if self.kind == "cuda" else CPU_EFFORT)
        self.cores = cores()
        processor = cpu_model()
        if self.kind == "cuda":
            self.name = torch.cuda.get_device_name(self.index)
        else:
            self.name = f"{processor}, {len(self.cores)} cores"
        self.host = available_host_memory().available
        self.circumstances = Circumstances(
            f"{device.name} {self.name}", processor, self.cores, torch.get_num_threads(), torch.__version__
        )

    def device_capacity(self) -> int:
        """Bytes of device memory that are free, or that torch holds already in this process."""
        if self.kind != "cuda":
            return self.host
        free, _ = torch.cuda.mem_get_info(self.index)
        return int(free) + torch.cuda.memory_reserved(self.index)

    def measure(self) -> Remembered:
        """Everything but a disk."""
        start = time.perf_counter()

        def effort() -> Effort:
            # On a machine that others keep busy everything takes longer; what comes late gets fewer rounds.
            late = time.perf_counter() - start > _LEISURE
            return replace(self.effort, rounds=2) if late else self.effort

        cuda, device = self.kind == "cuda", self.device
        watch: Stopwatch = CudaStopwatch(self.index) if cuda else WallStopwatch()
        pinner: Pinner = CudaPinner.of(torch.device(device.name)) if cuda else NoPinner()
        capacity = self.device_capacity()
        found = arithmetic(device.name, watch, effort())
        if not found.rates:
            raise ModelError(f"{self.name} multiplies matrices in no dtype that forebay trains in; use another device")
        remarks = [f"{self.name} does not multiply matrices of {dtype}" for dtype in found.refused]
        nbytes = min(self.effort.copy_sizes[-1], self.host // 8, capacity // 4) // PAGE * PAGE
        overhead = Overhead() if cuda else host_overhead(watch, effort())
        # On ``cpu`` updates do not run beside compute, and have all cores (``opening``).
        spared = spared_cores(device, effort()) if cuda else SPARED_CORES
        threads = cores_beside_compute(spared) if cuda else len(self.cores)
        with Transfers(device, pinner, nbytes) as transfers:
            machine = Machine(
                name=self.name,
                source="measured",
                device_kind=self.kind,
                device_capacity=capacity,
                host_capacity=self.host,
                pinned_capacity=self._pinned(pinner) if cuda else 0,
                compute=found.rates,
                device_bandwidth=elementwise_bandwidth(device.name, watch, effort()),
                host_bandwidth=host_bandwidth(transfers, effort()),
                update_rate=update_rate(device, effort(), threads),
                # Inline, as the runtime asks for them.
                h2d=link(transfers, Lane.H2D, effort(), inline=True),
                d2h=link(transfers, Lane.D2H, effort(), inline=True),
                offload=None if cuda else link(transfers, Lane.D2H, effort(), inline=True),
                duplex=duplex(transfers, effort()),
                # A GPU computes and copies with engines of its own.
                shared_cores=0.0 if cuda else shared_cores(transfers, effort()),
                launch_seconds=launch_seconds(device.name, watch, effort()) if cuda else overhead.launch,
                watch_seconds=overhead.watch,
                handover_seconds=overhead.handover,
                replay_seconds=overhead.replay,
                treat_seconds=overhead.treat,
                update_elements=core_bound_rates(device, effort(), threads),
                spared_cores=spared,
            )
        if not cuda:
            machine = replace(as_in_a_step(machine, lane_rates()), together_seconds=together_seconds())
            fresh = fresh_bandwidth(watch, effort())
            remarks.append(
                f"memory fresh from the system is filled at {format_rate(fresh)}: tensors of more than 32 MiB, which "
                f"a step allocates anew each time, are no faster on cpu"
            )
        machine = replace(machine, sources=self._sources(time.perf_counter() - start))
        return Remembered(self.circumstances, machine, tuple(remarks))

    def _pinned(self, pinner: Pinner) -> int:
        return pinned_capacity(tries_with(pinner), self.host, self.effort.pinned_bound, memlock_limit())

    def _sources(self, seconds: float) -> tuple[str, ...]:
        threads = torch.get_num_threads()
        precision = torch.get_float32_matmul_precision()
        return (
            f"measured by forebay doctor in {seconds:.0f} s: {cpu_model()}, {len(self.cores)} cores, {threads} "
            f"threads, torch {torch.__version__}; every figure is a median of several short runs",
            f"compute: forward, input gradient and weight gradient of a linear layer, float32 precision {precision}",
            "h2d, d2h: copies of the runtime on their lanes; duplex: both lanes busy with copies of up to 16 MiB",
            f"update_rate: AdamW by the runtime's updater on {self.effort.update_dtype} parameters; update_elements: "
            f"updates that cores bind, by the same",
            "host_bandwidth, device_bandwidth: bytes read and written, of a copy and of a sum",
        )


def _undisturbed(here: _Here, known: Remembered | None, disk: str | None, say: Tell) -> tuple[Remembered, str]:
    """What is measured (where it is ``known`` but for the disk, only that), and in words who disturbed it (empty:
    nobody). Once more where somebody did, and the better of the two counts: most others are soon gone."""
    found, others = _measured(here, known, disk)
    most, count = here.effort.company, len(here.cores)
    if others > most:
        say(f"other programs had {others:.0%} of the {count} cores while this was measured; measuring once more")
        again, later = _measured(here, known, disk)
        found, others = (again, later) if later < others else (found, others)
    if others <= most:
        return found, ""
    return found, (
        f"other programs had {others:.0%} of the {count} cores while this was measured: the rates are too low and are "
        f"not kept; end what else runs here and measure again, or write them to a file with --out and plan with "
        f"--machine FILE, if the machine is always shared like this"
    )


def _measured(here: _Here, known: Remembered | None, disk: str | None) -> tuple[Remembered, float]:
    """What is measured, and the share of the cores' time that others had meanwhile."""
    company = Company(here.cores)
    found = here.measure() if known is None else known
    if disk is not None:
        found = _with_disk(found, here, disk)
    return found, company.share()


def _with_disk(found: Remembered, here: _Here, path: str) -> Remembered:
    measured = measure_disk(here.device, path, here.effort)
    old = found.machine.disk
    kept = tuple(r for r in found.remarks if old is None or not r.startswith(f"{old.path} was read"))
    return replace(found, machine=replace(found.machine, disk=measured.disk), remarks=(*kept, measured.remark))


def _as_now(machine: Machine, here: _Here) -> Machine:
    """The rates that were kept, and the capacities of this moment."""
    pinned = min(machine.pinned_capacity, here.host)
    disk = machine.disk
    if disk is not None:
        try:
            disk = replace(disk, capacity=available_disk(disk.path))
        except ConfigError:  # the folder is gone, or its disk was taken out
            disk = None
    return replace(
        machine,
        device_capacity=here.device_capacity(),
        host_capacity=here.host,
        pinned_capacity=pinned,
        disk=disk,
    )


def _same(disk: Disk | None, path: str) -> bool:
    return disk is not None and disk.path == str(Path(path).absolute())
