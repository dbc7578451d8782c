"""A plan from elsewhere, read from JSON say, taken over for the model that is here; or refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from forebay.arenas import arenas_of
from forebay.budgets import Budget
from forebay.errors import ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.optim.rules import UpdateRule
from forebay.plans import Plan, Update
from forebay.profiler.batch import named_inputs
from forebay.runtime.blocks import BoundModel
from forebay.states import is_fp32, masters_fault
from forebay.trace import fingerprint_of
from forebay.units import format_apart, format_bytes

__all__ = ["adopt_plan", "expect_served"]


def adopt_plan(
    plan: Plan,
    batch: Any,
    bound: BoundModel,
    rule: UpdateRule,
    budget: Budget,
    limits_of: Callable[[Budget], Mapping[Tier, int]],
) -> Plan:
    """``plan`` under the budget that is promised now, which need not be the one that it was made for.

    ``batch`` is what the model will be called with, or None; ``limits_of`` says how many bytes of host and disk a
    budget comes to on this machine.

    Raises ``ConfigError`` for what is no plan, and for a plan that was made for another model, optimizer or (where a
    batch is given and the plan says what it was made for) batch shape, and ``DoesNotFit`` where it needs more than is
    allowed now.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"plan is a forebay.Plan, got a {type(plan).__name__}; forebay.Plan.from_json(text) reads one from the "
            f"text of a file that forebay plan --out wrote"
        )
    planned = {p.block for p in plan.placements}
    there = {b.name for b in bound.model.blocks}
    if planned != there or len(plan.placements) != len(there):
        odd = min(planned ^ there, default="a block named twice")
        raise ConfigError(f"the plan was made for another model: block {odd} is not in both; make the plan again")
    _check_blocks(plan, bound)
    _check_fingerprint(plan, batch, bound, rule)
    fault = masters_fault(plan.streaming.masters, rule.state_names, bound.model.trained_dtypes)
    if fault:
        raise ConfigError(f"{fault}; make the plan again")
    on_device = plan.updated(Update.DEVICE)
    if on_device and not is_fp32(rule.state_names):
        raise ConfigError(
            f"the plan updates block {on_device[0]} on the device, where states in fewer bits than fp32 need "
            f"memory beside the update_window; set its update to step, or keep the states in fp32"
        )
    sizes = arenas_of(bound.model, plan, rule.state_names)
    if sizes.device > plan.device or sizes.host > plan.host or sizes.disk > plan.disk:
        raise ConfigError(
            f"the plan was made for another model or optimizer: it has {format_bytes(plan.device)} on the device, "
            f"{format_bytes(plan.host)} on the host and {format_bytes(plan.disk)} on disk, and this one needs "
            f"{format_bytes(sizes.device)}, {format_bytes(sizes.host)} and {format_bytes(sizes.disk)}; "
            f"make the plan again"
        )
    if plan.disk and budget.disk is None:
        raise ConfigError(f"the plan keeps {format_bytes(plan.disk)} on disk; give disk=PATH or PATH:SIZE")
    limits = limits_of(budget)
    for tier, needed, allowed in (
        (Tier.DEVICE, plan.device, budget.planned_device),
        (Tier.HOST, plan.host, limits[Tier.HOST]),
        (Tier.DISK, plan.disk, limits[Tier.DISK]),
    ):
        if needed > allowed:
            what = tier.value if tier is Tier.DISK else f"{tier.value}_memory"
            shown = format_apart(needed, allowed)
            raise DoesNotFit(
                f"{tier.value}: the plan needs {shown[0]} and {shown[1]} are allowed; "
                f"raise {what}, or make another plan",
                tier=tier.value,
                needed=needed,
                allowed=allowed,
            )
    return replace(plan, budget=budget)


def expect_served(plan: Plan, *, two_places: bool, checksums: bool) -> None:
    """Raises ``ConfigError`` for a plan that has something on disk but one place for it, where an update would write
    over a checkpoint, or no memory for checksums of it."""
    on_disk = next((p.block for p in plan.placements if p.on_disk), None)
    if on_disk is None:
        return
    if two_places and plan.streaming.disk_copies == 1:
        raise ConfigError(
            f"the plan has one place on disk for block {on_disk}, and crash_safe needs two; make the plan with "
            f"crash_safe, or leave it out: forebay.save copies then"
        )
    if checksums and not plan.streaming.checksums:
        raise ConfigError(
            "the plan has no room for checksums of what is on disk; make the plan with checksums, or leave it out"
        )


def _check_blocks(plan: Plan, bound: BoundModel) -> None:
    """Refuses a plan that says of a block what the runtime cannot do to it."""
    blocks = {b.name: b for b in bound.model.blocks}
    chosen = [(name, "recomputes", "recompute") for name in plan.recompute]
    chosen += [(name, "names ops of", "activations") for s in plan.activations for name in s.blocks]
    unknown = min(set(plan.read_outside) - blocks.keys(), default=None)
    if unknown is not None:
        raise ConfigError(
            f"the plan has a block {unknown!r} read outside, which the model does not have; make the plan again"
        )
    for name, does, field in chosen:
        if name not in blocks:
            raise ConfigError(f"the plan {does} a block {name!r} that the model does not have; make the plan again")
        if blocks[name].module is None:
            raise ConfigError(
                f"the plan {does} block {name}, which is not one module: its parameters are used in several "
                f"places, or while other blocks run; take it out of {field}"
            )
    missing = min(set(plan.compiled) - set(bound.compiled), default=None)
    if missing is not None:
        raise ConfigError(
            f"the plan was made for {missing} compiled, which in this model is not; compile it before prepare "
            f"(.compile() of the module), or make the plan again"
        )
    for placed in plan.placements:
        if placed.update is not Update.STEP and not blocks[placed.block].gradient_nbytes:
            raise ConfigError(
                f"the plan has update {placed.update.value} for block {placed.block}, which trains nothing; set its "
                f"update to step"
            )
    if len(set(plan.recompute)) < len(plan.recompute):
        twice = max(plan.recompute, key=plan.recompute.count)
        raise ConfigError(f"the plan names block {twice} twice in recompute; make the plan again")


def _check_fingerprint(plan: Plan, batch: Any, bound: BoundModel, rule: UpdateRule) -> None:
    if not plan.fingerprint or batch is None:
        return
    here = fingerprint_of(bound.model, named_inputs(batch), rule.state_names)
    if here != plan.fingerprint:
        raise ConfigError(
            f"the plan was made for another model, batch shape or optimizer (fingerprint {plan.fingerprint}, this is "
            f"{here}); make the plan again, for a batch like this one"
        )
