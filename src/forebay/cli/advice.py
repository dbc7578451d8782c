"""What a machine's figures mean to a user, in words. No torch."""

from __future__ import annotations

from forebay.machine import Machine
from forebay.tiers.host import HostMemory
from forebay.units import GiB, MiB, format_bytes, format_rate

__all__ = ["advice"]

_LARGE = 64 * MiB


def advice(machine: Machine, host: HostMemory, installed: int) -> tuple[str, ...]:
    """One sentence for each figure that is out of the ordinary, with what to do about it.

    ``host`` is what this process may use, ``installed`` the bytes of memory that the machine has.
    """
    return (*_memory(machine, host, installed), *_arithmetic(machine), *_links(machine), *_disk(machine))


def _memory(machine: Machine, host: HostMemory, installed: int) -> list[str]:
    found = []
    if host.total < installed:
        found.append(
            f"this process is limited to {format_bytes(host.total)} of the machine's {format_bytes(installed)} "
            f"({host.limit_source}); raise that limit to plan with more"
        )
    if machine.device_kind == "cpu":
        found.append("device and host are the same memory here: budgets for both share it")
    elif machine.pinned_capacity < machine.host_capacity // 2:
        found.append(
            f"only {format_bytes(machine.pinned_capacity)} of host memory can be page-locked; what is over it is "
            f"copied at a fraction of the rate; raise the locked-memory limit (ulimit -l)"
        )
    if host.available < 2 * GiB:
        found.append(f"only {format_bytes(host.available)} of host memory are free; end other programs first")
    return found


def _arithmetic(machine: Machine) -> list[str]:
    found = []
    full = machine.compute.get("float32", 0.0)
    for dtype, rate in machine.compute.items():
        if rate < 0.5 * full:
            found.append(
                f"{dtype} computes at {rate / full:.0%} of the rate of float32: it is computed in software or without "
                f"matrix units here; train in float32"
                + (" or bfloat16" if machine.compute.get("bfloat16", 0.0) >= full else "")
            )
    if machine.device_kind == "cpu" and machine.shared_cores > 0.25:
        found.append(
            f"compute and host lanes lose {machine.shared_cores:.0%} of their rates to each other: they run on the "
            f"same cores, so transfers and updates hide behind compute only in part"
        )
    return found


def _links(machine: Machine) -> list[str]:
    found = []
    up, down = machine.h2d.curve.rate(_LARGE), machine.d2h.curve.rate(_LARGE)
    if max(up, down) > 2 * min(up, down):
        found.append(
            f"one direction is much slower than the other ({format_rate(up)} to the device, {format_rate(down)} "
            f"back); look at the slot and the memory channels of the GPU's socket"
        )
    if machine.device_kind == "cuda":
        if max(up, down) < 10e9:
            found.append(
                f"the link moves {format_rate(max(up, down))}, less than PCIe 3.0 x16; the card may have fewer lanes "
                f"than it could, or host memory is not page-locked"
            )
        if machine.duplex < 0.75:
            found.append(
                f"with both directions busy each keeps {machine.duplex:.0%} of its rate; host memory is the limit"
            )
    return found


def _disk(machine: Machine) -> list[str]:
    if machine.disk is None:
        return ["no disk was measured; name a folder on your fastest with --disk"]
    rates = {
        "reads": machine.disk.read.curve.rate(_LARGE),
        "writes": machine.disk.write.curve.rate(_LARGE),
    }
    slow = [f"{verb} {format_rate(rate)}" for verb, rate in rates.items() if rate < 500e6]
    if slow:
        return [f"the disk {' and '.join(slow)}: states there will set the pace; use an NVMe drive"]
    return []
