"""Refusals: which tier is too small, and by how much. All figures are computed. What would do instead: ``nearest``."""

from __future__ import annotations

from forebay.arenas import Arenas
from forebay.errors import DoesNotFit
from forebay.memory import PAGES, Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft
from forebay.plans import Plan
from forebay.units import format_apart, format_bytes

__all__ = ["device_too_small", "disk_too_small", "host_too_small", "pages_too_small"]


def device_too_small(bench: Bench, draft: Draft) -> DoesNotFit:
    """``draft`` is the least that would do and does not fit on the device."""
    problem = bench.problem
    need, limit = bench.device(draft), problem.limit(Tier.DEVICE)
    parts = []
    shared = bench.streamed(draft)
    resident = sum(b.nbytes for b in bench.model.blocks if b.name in draft.resident)
    if shared:
        largest = max(shared, key=lambda b: b.nbytes)
        parts.append(f"{format_bytes(largest.nbytes)} for the largest block ({largest.name})")
    if resident:
        sizes = bench.arenas(draft)
        parts.append(f"{format_bytes(sizes.device)} for parameters, gradients and states")
    else:
        held = sum(b.nbytes for b in bench.model.blocks if b.held)
        parts.append(f"{format_bytes(held)} for blocks in use throughout")
    again = f" ({len(draft.recompute)} blocks recomputed)" if draft.recompute else ""
    workspaces = 0 if problem.trace is None else problem.trace.workspace_nbytes
    parts.append(f"{format_bytes(bench.beside(draft) - workspaces)} for the activations of one step{again}")
    if workspaces:
        parts.append(f"{format_bytes(workspaces)} for workspaces and pages of the allocator")
    needed, allowed = format_apart(need, limit)
    return DoesNotFit(
        f"device memory: {needed} are needed and {allowed} are allowed: {', '.join(parts)}; raise device_memory, "
        f"or use a smaller batch or a shorter sequence",
        tier=Tier.DEVICE.value,
        needed=need,
        allowed=limit,
    )


def pages_too_small(bench: Bench, plan: Plan, pages: int) -> DoesNotFit:
    """``plan`` fits by its bytes, pages of the allocator need ``pages``, and with less nothing fits."""
    limit = bench.problem.limit(Tier.DEVICE)
    need = plan.device - PAGES + pages
    needed, allowed = format_apart(need, limit)
    return DoesNotFit(
        f"device memory: {needed} are needed and {allowed} are allowed: {format_bytes(plan.device - PAGES)} for what "
        f"is there, {format_bytes(pages)} that pages of the allocator have more than is in them; raise device_memory, "
        f"or use a smaller batch or a shorter sequence",
        tier=Tier.DEVICE.value,
        needed=need,
        allowed=limit,
    )


def disk_too_small(bench: Bench, sizes: Arenas) -> DoesNotFit:
    """``sizes`` is the least of the disk that the host has room for."""
    limit = bench.problem.limit(Tier.DISK)
    needed, allowed = format_apart(sizes.disk, limit)
    return DoesNotFit(
        f"disk: {needed} are needed and {allowed} are allowed; give the disk budget more room, or raise host_memory",
        tier=Tier.DISK.value,
        needed=sizes.disk,
        allowed=limit,
    )


def host_too_small(bench: Bench, sizes: Arenas, policy: str = "") -> DoesNotFit:
    """``sizes`` is the least of the host that the disk has room for; or all that ``policy`` has, which uses no disk."""
    parts = (
        (sizes.host_parameters, "parameters"),
        (sizes.host_gradients, "gradients"),
        (sizes.host_states, "optimizer states"),
        (sizes.host_activations, "activations"),
        (sizes.host_staging, "staging"),
        *([(sizes.host_residuals, "of gradients that are not sent")] if sizes.host_residuals else ()),
    )
    held = ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in parts)
    disk = "" if bench.problem.limit(Tier.DISK) else ", or give disk=PATH:SIZE for the optimizer states"
    limit = bench.problem.limit(Tier.HOST)
    needed, allowed = format_apart(sizes.host, limit)
    why = f"policy {policy} keeps {held} there and nothing on disk" if policy else f"{held}; raise host_memory{disk}"
    return DoesNotFit(
        f"host memory: {needed} are needed and {allowed} are allowed: {why}",
        tier=Tier.HOST.value,
        needed=sizes.host,
        allowed=limit,
    )
