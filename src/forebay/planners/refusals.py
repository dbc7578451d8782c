"""Refusals: which tier is too small, and by how much. All figures are computed. What would do instead: ``nearest``."""

from __future__ import annotations

from forebay.arenas import Arenas
from forebay.errors import DoesNotFit
from forebay.memory import PAGES, Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.units import format_apart, format_bytes

__all__ = ["device_too_small", "disk_too_small", "host_too_small", "pages_too_small"]

_LESS_OF_THE_DEVICE = "raise device_memory, or use a smaller batch or a shorter sequence"


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
    workspaces = problem.workspace_nbytes
    parts.append(f"{format_bytes(bench.beside(draft) - workspaces)} for the activations of one step{again}")
    if workspaces:
        parts.append(f"{format_bytes(workspaces)} for workspaces and pages of the allocator")
    why = f": {', '.join(parts)}; {_LESS_OF_THE_DEVICE}"
    return _too_small(Tier.DEVICE, _of_the_device(problem), need, limit, why)


def pages_too_small(bench: Bench, plan: Plan, pages: int) -> DoesNotFit:
    """``plan`` fits by its bytes, pages of the allocator need ``pages``, and with less nothing fits."""
    live = plan.device - PAGES
    why = (
        f": {format_bytes(live)} for what is there, {format_bytes(pages)} that pages of the allocator have more than "
        f"is in them; {_LESS_OF_THE_DEVICE}"
    )
    return _too_small(Tier.DEVICE, _of_the_device(bench.problem), live + pages, bench.problem.limit(Tier.DEVICE), why)


def disk_too_small(bench: Bench, sizes: Arenas) -> DoesNotFit:
    """``sizes`` is the least of the disk that the host has room for."""
    why = "; give the disk budget more room, or raise host_memory"
    return _too_small(Tier.DISK, "disk", sizes.disk, bench.problem.limit(Tier.DISK), why)


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
    why = f"policy {policy} keeps {held} there and nothing on disk" if policy else f"{held}; raise host_memory{disk}"
    return _too_small(Tier.HOST, "host memory", sizes.host, bench.problem.limit(Tier.HOST), f": {why}")


def _of_the_device(problem: Problem) -> str:
    """What there is too little of."""
    reserve = problem.budget.device_reserve
    return f"device memory beside device_reserve={format_bytes(reserve)}" if reserve else "device memory"


def _too_small(tier: Tier, what: str, need: int, limit: int, why: str) -> DoesNotFit:
    needed, allowed = format_apart(need, limit)
    text = f"{what}: {needed} are needed and {allowed} are allowed{why}"
    return DoesNotFit(text, tier=tier.value, needed=need, allowed=limit)
