"""What a plan is expected to take, written into the plan, and where those figures come from. No torch."""

from __future__ import annotations

from dataclasses import replace

from forebay.lowering import Liveness, accumulation_of, sketch
from forebay.machine import Machine
from forebay.plans import Plan, Update
from forebay.simulation import Costs, Score, pace, settled_seconds, together
from forebay.trace import Trace

__all__ = ["source_of", "with_figures"]


UNSEEN = "what compiled blocks take only while they run was measured beforehand; the account of a run does not see it"
"""Said of every plan for compiled blocks (``runtime.unseen``)."""


def with_figures(
    trace: Trace,
    machine: Machine,
    plan: Plan,
    notes: tuple[str, ...] = (),
    *,
    liveness: Liveness | None = None,
    micro_batches: int = 1,
) -> Plan:
    """``plan`` with the seconds of its simulated step and of each further micro-batch, where they come from, and the
    bytes that several micro-batches take which pass the model together; of ``micro_batches`` of them the seconds too.

    ``notes`` are what else is to be said about ``machine``. ``liveness`` is that of the trace, if the caller has it.
    Raises ``ConfigError`` where the plan and the machine do not go together.
    """
    costs, liveness = Costs(trace, machine, plan.streaming.masters), liveness or Liveness(trace)

    def seconds(micro_batches: int) -> float:
        program = sketch(trace, plan, micro_batches=micro_batches, liveness=liveness)
        return settled_seconds(pace(Score.of(program, costs, settled=not plan.streaming.overlap_update)), program)

    step = seconds(1) if plan.step_seconds is None else plan.step_seconds
    # Where updates use gradients up in backward, a step is one backward.
    once = bool(plan.updated(Update.BACKWARD)) or not plan.accumulates
    further = None if once else max(0.0, seconds(2) - step)
    accumulation = accumulation_of(trace, plan, liveness=liveness) if plan.accumulates else None
    if accumulation is not None and micro_batches > 1:
        found = together(plan, costs, micro_batches, liveness=liveness)
        accumulation = replace(accumulation, micro_batches=micro_batches, step_seconds=found.seconds)
    # All rates of a machine that was never measured are typical ones: more about one of them says nothing new.
    more = notes if machine.source == "measured" else ()
    return replace(
        plan,
        step_seconds=step,
        micro_batch_seconds=further,
        accumulation=accumulation,
        notes=(source_of(machine, costs.measured_share), *more, *([UNSEEN] if plan.compiled else [])),
    )


def source_of(machine: Machine, measured_share: float) -> str:
    """Where the predicted seconds come from, in words. ``measured_share`` of the op seconds were measured, 0 to 1."""
    if machine.source == "measured":
        rates = f"the measured rates of {machine.name}"
        if not measured_share:
            return f"predicted seconds follow from {rates}"
        return f"{100 * measured_share:.0f} % of the op seconds were measured op by op; all else follows from {rates}"
    ops = f"{100 * measured_share:.0f} % of the op seconds were measured and " if measured_share else ""
    return (
        f"the step time is a rough guess: {ops}rates are typical for {machine.name}, not measured; run forebay doctor "
        f"to measure its own"
    )
