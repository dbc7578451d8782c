"""What ``prepare`` asks a planner: a step is captured, and a plan is made for it and for this machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, final

import torch
from torch import nn

from forebay.arguments import expect_micro_batches
from forebay.budgets import Budget
from forebay.device.base import Device
from forebay.errors import CaptureFailed, NoRoomTogether
from forebay.figures import with_figures
from forebay.loss import Cut, Loss
from forebay.memory import Tier
from forebay.opening import limits_of
from forebay.optim.reading import read_optimizer
from forebay.planners import Bench, Problem, make_plan, make_room
from forebay.planning import choose_plan
from forebay.plans import Plan, UpdateTime
from forebay.profiler.as_compiled import as_compiled
from forebay.profiler.capture import Captured, capture
from forebay.profiler.here import this_machine
from forebay.profiler.loss import cut_for, forced_cut
from forebay.profiler.modes import as_trained
from forebay.runtime.blocks import BoundModel
from forebay.runtime.losses import LossFunction
from forebay.trace import Footprint

__all__ = ["Asking"]


@final
@dataclass(frozen=True)
class Asking:
    """What there is to plan for: the arguments of ``prepare``, read."""

    model: nn.Module
    batch: Any
    bound: BoundModel
    blocks: Sequence[str] | None
    optimizer: torch.optim.Optimizer
    budget: Budget
    policy: str
    device: Device
    compress: int
    micro_batches: int
    accumulates: bool
    update: UpdateTime
    disk_copies: int
    checksums: bool
    returning: int
    loss_fn: LossFunction | None

    def plan(self, loss: Loss) -> Plan:
        """The plan with the loss computed as ``loss`` says. Raises ``DoesNotFit``, and ``ModelError`` for a loss that
        cannot be computed so."""
        expect_micro_batches(self.micro_batches)
        here = torch.device(self.device.name)
        if loss == "chunked":
            cut = forced_cut(self.model, self.batch, self.budget.planned_device, here)
            return self._in_pieces(cut, inf)
        if loss != "auto" or self.batch is None:
            return self._made(0, inf)

        def find(allowed: int | None) -> Cut | str:
            return cut_for(self.model, self.batch, self.budget.planned_device if allowed is None else allowed, here)

        return choose_plan(lambda: self._made(0, inf), self._in_pieces, find)

    def _in_pieces(self, cut: Cut, faster_than: float) -> Plan:
        try:
            return cut.of(self._made(cut.piece, faster_than))
        except NoRoomTogether as refusal:
            raise refusal.having(cut.of(refusal.alone)) from None

    def _made(self, piece: int, faster_than: float) -> Plan:
        limits = limits_of(self.budget, self.returning)
        captured, unseen = self._captured(piece)
        trace = None if captured is None else captured.trace
        machine, notes = (None, ()) if trace is None else this_machine(self.device.name, self.budget.disk)
        if captured is not None and machine is not None and machine.source == "measured":
            machine = replace(machine, op_seconds={**machine.op_seconds, **captured.seconds})
        problem = Problem(
            model=self.bound.model if trace is None else trace.model,
            footprint=unseen,
            budget=self.budget,
            host_limit=limits[Tier.HOST],
            disk_limit=limits[Tier.DISK],
            state_names=read_optimizer(self.optimizer).state_names,
            # On the cpu the update and the compute share the cores: beside each other both are slower.
            overlap_update=torch.device(self.device.name).type != "cpu",
            trace=trace,
            machine=machine,
            compress=self.compress,
            update=self.update,
            disk_copies=self.disk_copies,
            checksums=self.checksums,
            accumulates=self.accumulates,
            faster_than=faster_than,
        )

        def settled(plan: Plan, bench: Bench, many: int) -> Plan:
            if trace is None or machine is None:
                return plan
            bench.prove(plan)
            return with_figures(trace, machine, plan, notes, liveness=bench.liveness, micro_batches=many)

        benches: list[Bench] = []

        def make(asked: Problem, bench: Bench) -> Plan:
            benches.append(bench)
            return make_plan(asked, self.policy, bench)

        try:
            room = make_room(problem, self.policy, self.micro_batches, make)
        except NoRoomTogether as refusal:
            # Of those for masters like its own the first has all the room.
            own = next(b for b in benches if b.problem.masters is refusal.alone.streaming.masters)
            raise refusal.having(settled(refusal.alone, own, 1)) from None
        return settled(room.plan, room.bench, self.micro_batches)

    def _captured(self, piece: int) -> tuple[Captured | None, Footprint]:
        """What a step on the batch is; None, and the reason, where that is not to be had."""
        if self.batch is None:
            return None, Footprint(0, 0, measured=False)
        try:
            kind = torch.device(self.device.name).type
            # Micro-batches that pass the model together run as written (``runtime.accumulate``).
            take = partial(capture, self.model, self.batch, self.optimizer, kind, self.blocks, piece, self.loss_fn)
            with as_trained(self.model):
                captured = as_compiled(self.model, kind, take) if self.micro_batches == 1 else take()
        except CaptureFailed as error:
            # Whatever a model does with values it does not have ends here; the plan says that it does not know.
            warnings.warn(
                f"the activations are not planned: a step on the batch cannot be looked at beforehand ({error})",
                stacklevel=2,
            )
            return None, Footprint(0, 0, measured=False, note=str(error))
        return captured, Footprint(0, 0, measured=True)
