"""The dtype ledger: how many bytes of a run are of which dtype, and where they are at home. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from forebay.layout import LOWER, STATE_ITEMSIZE, needs_master
from forebay.memory import Kind, Tier
from forebay.model import Block, Parameter
from forebay.plans import Placement, Plan
from forebay.states import Masters, form_of, plain_name
from forebay.trace import Trace

__all__ = ["DtypeEntry", "dtype_ledger"]

MASTER = "fp32 master"
HALF = "lower half of fp32 master"


@dataclass(frozen=True)
class DtypeEntry:
    """``nbytes`` of ``what`` are ``dtype``, at home on ``tier``; padding is not counted."""

    what: str
    dtype: str
    tier: Tier
    nbytes: int

    def to_json_dict(self) -> dict[str, str | int]:
        """The figures for ``--json``."""
        return {"what": self.what, "dtype": self.dtype, "tier": self.tier.value, "bytes": self.nbytes}


def dtype_ledger(trace: Trace, plan: Plan) -> tuple[DtypeEntry, ...]:
    """Of the model of ``trace`` under ``plan``: parameters, gradients as they wait for the update, states by name, and
    what forward saves for backward, as it is made and wherever the plan then puts it."""
    placed = {placement.block: placement for placement in plan.placements}
    found: Counter[tuple[str, str, Tier]] = Counter()
    for block in trace.model.blocks:
        if block.name in placed:
            _add_block(found, block, placed[block.name], trace.state_names, plan.streaming.masters)
    for _, tensor in trace.tensors():
        if tensor.saved and tensor.kind in (Kind.ACTIVATION, Kind.TEMPORARY):
            found["saved for backward", tensor.dtype, Tier.DEVICE] += tensor.nbytes
    order = list(dict.fromkeys(what for what, _, _ in found))
    keys = sorted(found, key=lambda key: (order.index(key[0]), key[1], list(Tier).index(key[2])))
    return tuple(DtypeEntry(*key, found[key]) for key in keys if found[key])


def _add_block(
    found: Counter[tuple[str, str, Tier]],
    block: Block,
    placed: Placement,
    state_names: tuple[str, ...],
    masters: Masters,
) -> None:
    for parameter in block.parameters:
        found["parameters", parameter.dtype, placed.parameters] += parameter.nbytes
        if not parameter.trainable:
            continue
        found["gradients", parameter.dtype, placed.gradients] += parameter.nbytes
        if needs_master(parameter) and masters is Masters.LOWER:
            form = form_of(LOWER)
            found[HALF, form.dtype, placed.states] += form.nbytes(parameter.numel)
        elif needs_master(parameter):
            found[MASTER, "float32", placed.states] += STATE_ITEMSIZE * parameter.numel
        _add_states(found, parameter, placed.states, state_names)


def _add_states(
    found: Counter[tuple[str, str, Tier]], parameter: Parameter, tier: Tier, state_names: tuple[str, ...]
) -> None:
    for name in state_names:
        form = form_of(name)
        # Codes are bytes to torch: the form says how many bits of them an element has.
        dtype = f"{form.name} codes" if form.dtype == "uint8" else form.dtype
        found[f"state {plain_name(name)}", dtype, tier] += form.nbytes_for(parameter)
