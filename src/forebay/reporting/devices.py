"""One model over several devices, policy by policy: the records, and the tables that ``--devices`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rich.console import Group
from rich.text import Text

from forebay.memory import Tier
from forebay.reporting.rows import NONE, size
from forebay.reporting.side_by_side import Answer, fastest_first, moved_table, tables_by_budget, times
from forebay.reporting.terminal import bullets, figure_table
from forebay.servers import ServerPlan
from forebay.timeline import Lane
from forebay.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["DevicesReport", "ServerCandidate", "devices_table", "devices_tables"]

LINKS = (Lane.H2D, Lane.D2H, Lane.PEER_OUT, Lane.PEER_IN)
"""Ways of a device, to the host and to other devices."""


@final
@dataclass(frozen=True)
class ServerCandidate(Answer):
    """One policy with one budget of each device (bytes), and its ``plan``."""

    plan: ServerPlan | None = None

    @property
    def seconds(self) -> float | None:
        """Of a step; None without a plan."""
        return None if self.plan is None else self.plan.step_seconds

    def to_json_dict(self) -> dict[str, Any]:
        """The figures for ``--json``: bytes and seconds."""
        plan = self.plan
        return {
            "policy": self.policy,
            "budget": self.budget,
            "feasible": self.feasible,
            "step_seconds": plan.step_seconds if plan else None,
            "idle_share": plan.idle_share if plan else None,
            "peaks": {Tier.DEVICE.value: plan.peak, Tier.HOST.value: plan.host} if plan else None,
            "devices": [share.to_json_dict() for share in plan.devices] if plan else None,
            "moved": {lane.value: plan.moved.get(lane, 0) for lane in LINKS} if plan else None,
            "solve_seconds": self.solve_seconds,
            "reasons": list(plan.reasons) if plan else [],
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class DevicesReport:
    """What a step over several devices comes to with the policy that was asked for, or with the fastest of all.

    ``micro_batches`` pass in a step, each of ``tokens``. ``budgets`` are bytes of each device, and of the host."""

    model: str
    server: str
    micro_batches: int
    tokens: int
    budgets: tuple[int, int]
    chosen: ServerCandidate
    others: tuple[ServerCandidate, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.chosen.feasible

    @property
    def tokens_per_second(self) -> float | None:
        """Of all devices together; None where nothing fits."""
        return self.micro_batches * self.tokens / self.chosen.seconds if self.chosen.seconds else None

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints: sizes are bytes, times seconds, rates per second."""
        own = self.chosen.to_json_dict()
        device, host = self.budgets
        return {
            "fits": self.fits,
            **{key: own[key] for key in ("policy", "step_seconds", "idle_share", "peaks", "devices", "moved")},
            "tokens_per_second": self.tokens_per_second,
            "micro_batches": self.micro_batches,
            "budgets": {Tier.DEVICE.value: device, Tier.HOST.value: host},
            "solve_seconds": own["solve_seconds"],
            "alternatives": [
                {"change": f"--policy {one.policy}", "step_seconds": one.seconds} for one in self.others if one.feasible
            ],
            "reasons": [*own["reasons"], *([self.chosen.reason] if self.chosen.reason else []), *self.notes],
        }


def devices_table(report: DevicesReport) -> Group:
    """What each device does and holds; why, and what else there is."""
    title = Text(f"{report.model} on {report.server}, {report.micro_batches} micro-batches a step", style="bold")
    plan = report.chosen.plan
    if plan is None:
        return Group(title, Text(f"Does not fit: {report.chosen.reason}"), *bullets(report.notes))
    rate = "" if report.tokens_per_second is None else f", {report.tokens_per_second:,.0f} tokens/s"
    step = Text(f"{plan.policy}: a step takes {format_seconds(plan.step_seconds)}{rate}")
    table = figure_table("Devices", "device", ["blocks", "computes", "peak", "allowed"])
    for number, share in enumerate(plan.devices):
        busy = f"{share.busy / plan.step_seconds:.0%}" if plan.step_seconds else NONE
        table.add_row(str(number), str(share.blocks), busy, size(share.peak), size(report.budgets[0]))
    table.add_row("host", "", "", size(plan.host or None), size(report.budgets[1]))
    moved = [f"{format_bytes(plan.moved[lane])} {lane.value}" for lane in LINKS if plan.moved.get(lane)]
    crossing = [f"bytes that cross in a step, of all devices: {', '.join(moved)}"] if moved else []
    faster = [one.plan for one in fastest_first(report.others) if one.plan is not None]
    others = [f"--policy {other.policy}: {format_seconds(other.step_seconds)}" for other in faster]
    return Group(title, step, table, *bullets([*plan.reasons, *crossing, *others, *report.notes]))


def devices_tables(title: str, candidates: Sequence[ServerCandidate], notes: Sequence[str] = ()) -> Group:
    """For every budget the policies that fit, the fastest first; then why the others do not."""
    return tables_by_budget(title, candidates, notes, _tables)


def _tables(budget: int, fitting: Sequence[ServerCandidate]) -> list[RenderableType]:
    plans = [one.plan for one in fitting if one.plan is not None]
    moved = ((plan.policy, plan.moved) for plan in plans)
    why = [f"{plan.policy}: {'; '.join(plan.reasons)}" for plan in plans if plan.reasons]
    links = moved_table("Bytes over links in a step, of all devices", LINKS, moved)
    return [_figures(budget, plans), links, *bullets(why)]


def _figures(budget: int, fitting: Sequence[ServerPlan]) -> RenderableType:
    """``idle``: the share of the step in which devices compute nothing; ``most`` and ``least``: bytes on the fullest
    device and on the emptiest one."""
    columns = ["step", "times", "idle", "most", "least", "host"]
    table = figure_table(f"{format_bytes(budget)} on each device: step and peaks", "policy", columns)
    fastest = min(plan.step_seconds for plan in fitting)
    for plan in fitting:
        peaks = [share.peak for share in plan.devices]
        figures = [format_seconds(plan.step_seconds), times(plan.step_seconds, fastest), f"{plan.idle_share:.0%}"]
        table.add_row(plan.policy, *figures, *map(size, (max(peaks), min(peaks), plan.host or None)))
    return table
