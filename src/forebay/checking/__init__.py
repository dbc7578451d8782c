"""Proves a plan right before anything is loaded. No torch; shares no code with planners, lowering or simulation.

What is proved holds for every timing that the program's dependencies allow, not for one run of a clock:

fitting     the plan is one for this trace; what stands in every tier has room
order       which action is done before which, whatever the lanes' speeds
treated     what the plan says of single ops is about ops that there are, and may be done
computing   every op runs once in every pass, in order, on tensors that are in memory (``live``, ``step``)
transfers   what is moved to the host or to disk, or made into codes, gets there, once in every pass, and is back when
            it is read
ring        what is on its way to disk, or from there, is not overwritten in the ring on the host
residency   a parameter is read from a slot that holds its block, with the values of the step: of a block that is
            updated ahead of its step, out of the copy that the updates of the steps before have made
rounds      blocks that are updated in turns have one turn in every round of steps
gradients   every gradient lands once in every pass, when it is complete
passing     gradients that are used up in backward are left alone in their slots until their updates have read them
in_backward of blocks that stay on the device and are updated in backward all gradients are there by then, and nothing
            reads the block behind that
updates     every trainable element is updated once in every step that is its turn, after its gradient, with its
            states; what of that is done on the device for a block whose home is elsewhere gets there and home again
            (``cells``)
capacity    the device has room at every instant, within the budget and within what the plan promises (``transit``)

All of it is proved for the trace and for each of its extremes: the routes that take the most memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import final

from forebay.arguments import expect, expect_records
from forebay.checking.capacity import check_account, check_device
from forebay.checking.cells import check_window
from forebay.checking.computing import largest, walk
from forebay.checking.fitting import allowances, check_names, check_standing, layouts, standing, staying_gradients
from forebay.checking.gradients import landings
from forebay.checking.in_backward import InBackward
from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.passing import check_gradient_slots
from forebay.checking.residency import Residency
from forebay.checking.ring import check_ring
from forebay.checking.rounds import Turns
from forebay.checking.step import Step
from forebay.checking.treated import Treated, check_room, check_treatments, treated_by
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
    something twice or never; ``DoesNotFit``, which names the op and the tensor at the peak, for a tier without room;
    ``ConfigError`` for several ``micro_batches`` under a plan that uses up gradients in backward.
    """
    expect_records(trace=trace, machine=machine, plan=plan)
    expect("program", program, (Program, NoneType), "a plan lowered, or None")
    check_names(trace, plan)
    chunks = layouts(trace, plan)
    check_window(trace, plan, chunks)
    stands = standing(trace, plan, chunks)
    most = {**stands, Tier.DEVICE: stands[Tier.DEVICE] + staying_gradients(trace, plan)}
    check_standing(most, machine, plan)
    steps = [Step(one) for one in trace.routings]
    check_treatments(plan, steps)
    treated = [treated_by(step, plan, extreme=step is not steps[0]) for step in steps]
    check_room(plan, steps, treated)
    passes = program.micro_batches if program is not None else micro_batches
    for step, what in zip(steps, treated, strict=True):
        # Other routes make other ops, so that the program of these is another. What stands is the same.
        given = program if step is steps[0] else None
        _Proof(step, what, machine, plan, chunks, stands).check(given or _lowered(step.trace, plan, passes))


def _lowered(trace: Trace, plan: Plan, micro_batches: int) -> Program:
    from forebay.lowering import lower

    return lower(trace, plan, micro_batches=micro_batches)


@final
@dataclass(frozen=True)
class _Proof:
    """What is the same for all programs of a plan."""

    step: Step
    treated: Treated
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
        live = Live(step, resident, plan.recompute, self.treated)
        in_backward = InBackward(step, plan, program, self.layouts)
        passes = walk(step, live, program, order, in_backward)
        check_ring(step, self.treated, program, order, plan.streaming.disk_window)
        turns = Turns(plan, program)
        residency = Residency(step, program, order, plan, passes, turns)
        residency.check()
        landed = landings(step, program, order, placements, passes, turns)
        check_gradient_slots(step.trace.model, plan, program, order)
        Updates(step, plan, program, order, self.layouts, passes, landed, residency.sources, turns).check()
        check_device(
            step,
            live,
            program,
            order,
            passes,
            landed,
            self.layouts,
            self.standing[Tier.DEVICE],
            allowances(self.machine, plan)[Tier.DEVICE],
            plan.device,
            lambda moment: largest(step, live, program, order, in_backward, moment),
        )
