"""What a plan is expected to take, written into the plan, and where those figures come from. No torch."""

from __future__ import annotations

from dataclasses import replace

from forebay.machine import Machine
from forebay.plans import Plan
from forebay.simulation import Costs, forecast
from forebay.trace import Trace

__all__ = ["source_of", "with_figures"]


def with_figures(trace: Trace, machine: Machine, plan: Plan, notes: tuple[str, ...] = ()) -> Plan:
    """``plan`` with the seconds of its simulated step and of each further micro-batch, and where they come from.

    ``notes`` are what else is to be said about ``machine``. Raises ``ConfigError`` where the plan and the machine do
    not go together.
    """
    costs = Costs(trace, machine)
    step = plan.step_seconds
    if step is None:
        step = forecast(trace, machine, plan, costs=costs).step_seconds
    two = forecast(trace, machine, plan, micro_batches=2, costs=costs).step_seconds
    # All rates of a machine that was never measured are typical ones: more about one of them says nothing new.
    more = notes if machine.source == "measured" else ()
    return replace(
        plan,
        step_seconds=step,
        micro_batch_seconds=max(0.0, two - step),
        notes=(source_of(machine, costs.measured_share), *more),
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
