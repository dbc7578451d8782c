"""The plan of a run block by block, blocks that are treated alike in one row. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from forebay.plans import Placement, Plan
from forebay.treatments import Fate, Treatment
from forebay.units import format_bytes

__all__ = ["PLAN_HEADER", "plan_rows"]

PLAN_HEADER = ("blocks", "how many", "bytes", "parameters", "gradients", "states", "update", "activations")

_UPDATES = {
    "step": "at the step",
    "ahead": "under backward, ahead of the step",
    "device": "on the device, at the step",
    "backward": "in backward, as gradients land",
    "storage": "beside the storage",
}


@dataclass(frozen=True)
class _Row:
    """What is said of a block, beside its name and its bytes."""

    parameters: str
    gradients: str
    states: str
    update: str
    activations: str


def plan_rows(plan: Plan, nbytes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """A row under ``PLAN_HEADER`` for all neighbours that are treated alike. ``nbytes`` are the bytes of the parameters
    of each block, as far as they are known."""
    groups: list[tuple[_Row, list[str]]] = []
    for placed in plan.placements:
        row = _row(plan, placed)
        # Whether the blocks have the same bytes is worth a row of its own too.
        if groups and groups[-1][0] == row and nbytes.get(groups[-1][1][-1]) == nbytes.get(placed.block):
            groups[-1][1].append(placed.block)
        else:
            groups.append((row, [placed.block]))
    return [(_names(blocks), str(len(blocks)), _size(blocks, nbytes), *astuple(row)) for row, blocks in groups]


def _row(plan: Plan, placed: Placement) -> _Row:
    update = "on the device" if placed.resident else _UPDATES[placed.update.value]
    again = placed.block in plan.recompute
    return _Row(
        placed.parameters.value,
        placed.gradients.value,
        placed.states.value,
        update,
        _activations(plan.treatments(placed.block), again=again),
    )


def _activations(treatments: Sequence[Treatment], *, again: bool) -> str:
    rest = "run again" if again else "kept"
    if not treatments:
        return rest
    counted = Counter(_fate(treatment) for treatment in treatments)
    named = ", ".join(f"{count} {fate}" for fate, count in counted.items())
    return f"{named}; the rest {rest}"


def _fate(treatment: Treatment) -> str:
    where = {Fate.KEEP: "kept", Fate.OFFLOAD: "to the host", Fate.DISK: "to disk"}[treatment.fate]
    how = f"{where} as {treatment.bits} bit{'s' if treatment.bits > 1 else ''}" if treatment.bits else where
    return how if treatment.split is None else f"with {treatment.split} {how}"


def _names(blocks: Sequence[str]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def _size(blocks: Sequence[str], nbytes: Mapping[str, int]) -> str:
    known = [nbytes[block] for block in blocks if block in nbytes]
    return format_bytes(sum(known)) if known else "-"
