"""Proves a plan right before anything is loaded. No torch; shares no code with planners, lowering or simulation.

What is proved holds for every timing that the program's dependencies allow, not for one run of a clock:

fitting     the plan is one for this trace; what stands in every tier has room
order       which action is done before which, whatever the lanes' speeds
computing   every op runs once in every pass, in order, on tensors that are in memory (``live``, ``step``)
residency   a parameter is read from a slot that holds its block, with the values of the step
gradients   every gradient lands once in every pass, when it is complete
updates     every trainable element is updated once in every step, after its gradient, with its states
capacity    the device has room at every instant, within the budget and within what the plan promises

All of it is proved for the trace and for each of its extremes: the routes that take the most memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from forebay.checking.capacity import check_account, check_device
from forebay.checking.computing import walk
from forebay.checking.fitting import allowances, check_names, check_standing, layouts, standing, staying_gradients
from forebay.checking.gradients import landings
from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.residency import Residency
from forebay.checking.step import Step
from forebay.checking.updates import Updates
from forebay.layout import StateLayout
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.program import Program
from forebay.trace import Trace

__all__ = ["check"]


def check(
    trace: Trace, machine: Machine, plan: Plan, program: Program | None = None, *, micro_batches: int = 1
) -> None:
    """Raises unless ``plan`` trains the model of ``trace`` right and within its budgets on ``machine``.

    ``program`` is the plan lowered; by default it is made here, for steps of ``micro_batches`` passes each. Raises
    ``PlanInvalid``, which names action, op and tensor, for a plan or program that would read what is not there, or do
    something twice or never; ``DoesNotFit``, which names the op and the tensor at the peak, for a tier without room.
    """
    check_names(trace, plan)
    chunks = layouts(trace, plan)
    stands = standing(trace, plan, chunks)
    most = {**stands, Tier.DEVICE: stands[Tier.DEVICE] + staying_gradients(trace, plan)}
    check_standing(most, machine, plan)
    _Proof(Step(trace), machine, plan, chunks, stands).check(program or _lowered(trace, plan, micro_batches))
    passes = program.micro_batches if program is not None else micro_batches
    for extreme in trace.extremes:
        # Other routes make other ops, so that the program of these is another. What stands is the same.
        _Proof(Step(extreme), machine, plan, chunks, stands).check(_lowered(extreme, plan, passes))


def _lowered(trace: Trace, plan: Plan, micro_batches: int) -> Program:
    from forebay.lowering import lower

    return lower(trace, plan, micro_batches=micro_batches)


@final
@dataclass(frozen=True)
class _Proof:
    """What is the same for all programs of a plan."""

    step: Step
    machine: Machine
    plan: Plan
    layouts: Mapping[str, StateLayout]
    standing: Mapping[Tier, int]

    def check(self, program: Program) -> None:
        step, plan = self.step, self.plan
        check_account(program, self.standing)
        order = Order(program)
        placements = {p.block: p for p in plan.placements}
        resident = {i for i, block in step.block_of.items() if placements[block].resident}
        live = Live(step, resident, plan.recompute)
        passes = walk(step, live, program)
        residency = Residency(step, program, order, placements)
        residency.check()
        landed = landings(step, program, order, placements, passes)
        Updates(step, plan, program, order, self.layouts, passes, landed, residency.sources).check()
        allowed = allowances(self.machine, plan)[Tier.DEVICE]
        stands = self.standing[Tier.DEVICE]
        check_device(step, live, program, order, passes, landed, self.layouts, stands, allowed, plan.device)
