"""Which blocks are updated in backward, and through how many slots on the host their gradients pass.

Where a user allows it (``Problem.update``), gradients are used up by all blocks that can: the host has a few slots for
them in the place of the gradients of the whole model. With few slots backward waits for the updates of the host, which
without them could go on under the next forward; so there are more of them as long as the simulated step gains by it.

LoHan ("active gradient offloading", section 4.1 of arXiv 2403.06504) has a slot for the layer that lands and one for
the layer that is updated; ours begins with one more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from forebay.arenas import gradient_nbytes
from forebay.lowering.index import TraceIndex
from forebay.lowering.liveness import Liveness
from forebay.memory import Tier
from forebay.planners.parts import Draft, repeated
from forebay.plans import Plan, Update
from forebay.trace import Block, Model, Phase
from forebay.units import format_bytes

if TYPE_CHECKING:
    from forebay.planners.bench import Bench

__all__ = ["FEWEST", "passed", "slots_of", "usable", "with_enough_slots"]

FEWEST = 3
"""Slots for gradients: those of one block land, those of another are read, and a third one's are waited for."""

GAIN = 0.01
"""Twice as many slots that save less than this share of a step are not worth their bytes."""


def usable(liveness: Liveness) -> frozenset[str]:
    """The blocks that can be updated in backward, whatever the routes: their gradients are complete one after the
    other, with no other block's between them, and no op after the last one reads the block."""
    every = [_usable(liveness.index), *(_usable(extreme.index) for extreme in liveness.extremes)]
    return frozenset.intersection(*every)


def _usable(index: TraceIndex) -> frozenset[str]:
    done = sorted((done.op, index.blocks[done.parameter]) for visit in index.completed for done in visit)
    last = {block: op for op, block in done}
    runs = [block for block, _ in groupby(block for _, block in done)]
    able = {block for block in runs if runs.count(block) == 1}
    for place, visit in enumerate(index.trace.visits):
        if visit.phase is Phase.BACKWARD:
            able -= {block for op, block in index.block_reads(place) if visit.first_op + op > last.get(block, 0)}
    return frozenset(able)


def passed(model: Model, draft: Draft, able: frozenset[str]) -> Draft:
    """``draft`` with updates in backward of those blocks that are ``able`` and are updated in no other way, and slots
    for their gradients: its own, if those are large enough."""
    streaming = draft.streaming
    if streaming.delay_after is not None:
        return draft
    free = (Update.STEP, Update.BACKWARD)
    pairs = zip(model.blocks, draft.placements, strict=True)
    blocks = [b for b, p in pairs if b.name in able and not p.resident and p.update in free]
    slots = slots_of(blocks)
    if streaming.gradient_slots[:1] < slots[:1]:
        streaming = replace(streaming, gradient_slots=slots)
    return replace(draft.updating(Update.BACKWARD, [block.name for block in blocks]), streaming=streaming)


def slots_of(blocks: Iterable[Block], count: int = FEWEST) -> tuple[int, ...]:
    """``count`` slots (bytes, largest first) of the size that most of ``blocks`` take, one of them of the largest; as
    many as there are blocks at most."""
    sizes = [gradient_nbytes(block) for block in blocks]
    if not sizes:
        return ()
    return (max(sizes), *[repeated(sizes)] * (min(count, len(sizes)) - 1))


def with_enough_slots(bench: Bench, plan: Plan) -> Plan:
    """``plan`` with as many slots for gradients as make its step faster and as the host has room for, and what they
    save in words."""
    names = frozenset(plan.updated(Update.BACKWARD))
    if not names and bench.problem.update == "backward":
        why = "nothing is updated in backward: no gradient leaves the device of a block that could be"
        return replace(plan, reasons=(*plan.reasons, why))
    if not names:
        return plan
    blocks = [block for block in bench.model.blocks if block.name in names]
    best, count = Draft.of(plan), FEWEST
    while count < len(blocks):
        count = min(2 * count, len(blocks))
        more = replace(best, streaming=replace(best.streaming, gradient_slots=slots_of(blocks, count)))
        sizes = bench.arenas(more)
        fits = sizes.host <= bench.problem.limit(Tier.HOST) and bench.pageable(sizes) <= bench.pageable(
            bench.arenas(best)
        )
        if not fits or bench.seconds(more) > bench.seconds(best) * (1 - GAIN):
            break
        best = more
    reasons = (*plan.reasons, _said(blocks, best.streaming.gradient_slots, len(bench.model.blocks)))
    return bench.timed(bench.plan(plan.planner, best, reasons=reasons))


def _said(blocks: Sequence[Block], slots: tuple[int, ...], every: int) -> str:
    held, otherwise = sum(slots), sum(map(gradient_nbytes, blocks))
    return (
        f"{len(blocks)} of {every} blocks are updated in backward, which uses their gradients up: {len(slots)} slots "
        f"of {format_bytes(held)} together hold them on the host, in the place of {format_bytes(otherwise)}"
    )
