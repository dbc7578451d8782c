"""Which blocks are updated in backward, and through how many slots on the host their gradients pass.

Where a user allows it (``Problem.update``), gradients are used up by all blocks that can. Of those that stay on the
device the gradients of one are there at a time, until it is updated (Lv et al., "LOMO", arXiv 2306.09782, section 3.1,
does so parameter by parameter). For all others the host has a few slots in the place of the gradients of the whole
model. With few slots backward waits for the updates of the host, which with more of them could go on under the next
forward; so there are as many as the fastest simulated step asks for.

LoHan ("active gradient offloading", section 4.1 of arXiv 2403.06504) has a slot for the layer that lands and one for
the layer that is updated; ours begins with one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, final

from forebay.arenas import gradient_nbytes
from forebay.lowering.index import TraceIndex
from forebay.lowering.liveness import Liveness, update_workspaces
from forebay.memory import Tier
from forebay.model import Block, Model
from forebay.planners.parts import Draft, repeated
from forebay.plans import Placement, Plan, Update, used_up
from forebay.states import Masters
from forebay.trace import Phase, Trace
from forebay.units import format_bytes

if TYPE_CHECKING:
    from forebay.planners.bench import Bench
    from forebay.planners.problem import Problem

__all__ = ["FEWEST", "Early", "Usable", "passed", "searched", "slots_of", "with_enough_slots"]

FEWEST = 3
"""Slots for gradients: those of one block land, those of another are read, and a third one's are waited for."""

SHARE = 0.25
"""Of the host's memory, for the slots with which a search begins."""

GAIN = 0.01
"""More slots that save less than this share of a step are not worth their bytes."""


@dataclass(frozen=True)
class Usable:
    """The blocks that can be updated in backward: ``there`` those that can if they stay on the device, ``away`` those
    that can if they do not."""

    there: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()

    @classmethod
    def of(cls, liveness: Liveness) -> Usable:
        """Whatever the routes are: their gradients are complete one after the other, with no other block's between
        them, and no op after the last one reads the block. Of a block that stays on the device each pass must complete
        all gradients, with whose last one they are let go, and none shares its memory with another block's: of one that
        does not, what lacks a gradient is waited for by nobody but its step."""
        indices = [liveness.index, *(extreme.index for extreme in liveness.extremes)]
        away = frozenset.intersection(*map(_in_turn, indices))
        return cls(away & frozenset.intersection(*map(_complete, indices)), away)

    def admits(self, placement: Placement) -> bool:
        """Whether a block so placed can be updated in backward."""
        return placement.block in (self.there if placement.resident else self.away)


def _complete(index: TraceIndex) -> frozenset[str]:
    """The blocks of which all that is trained has a gradient, and whose gradients are complete behind ops, and lie in
    memory, of their own."""
    trained = {b.name: sum(p.trainable for p in b.parameters) for b in index.trace.model.blocks}
    found: Counter[str] = Counter()
    shared: set[str] = set()
    owners: dict[tuple[str, int], str] = {}
    for done in (done for visit in index.completed for done in visit):
        block = index.blocks[done.parameter]
        found[block] += 1
        for place in (("op", done.op), ("root", done.root)):
            other = owners.setdefault(place, block)
            if other != block:
                shared |= {block, other}
    return frozenset(name for name, count in trained.items() if found[name] == count) - shared


def _in_turn(index: TraceIndex) -> frozenset[str]:
    """The blocks whose gradients are complete one after the other, and that no op reads after the last of them, be it
    one that runs again there if its block is recomputed."""
    done = sorted((done.op, index.blocks[done.parameter]) for visit in index.completed for done in visit)
    last = {block: op for op, block in done}
    runs = [block for block, _ in groupby(block for _, block in done)]
    able = {block for block in runs if runs.count(block) == 1}
    for place, visit in enumerate(index.trace.visits):
        if visit.phase is Phase.BACKWARD:
            able -= {block for op, block in index.block_reads(place) if visit.first_op + op > last.get(block, 0)}
    for place, earlier in index.triggers(index.partners(frozenset(b.name for b in index.trace.model.blocks))).items():
        before = index.trace.visits[place].first_op
        for again in earlier:
            reads, length = index.block_reads(again), index.length_again(again)
            able -= {block for op, block in reads if op < length and before > last.get(block, 0)}
    return frozenset(able)


@final
class Early:
    """Updates in backward in drafts of plans for ``trace``, whose ``masters`` are kept so, of those blocks that are
    ``able``; gradients that leave pass through ``count`` slots in a draft that has none."""

    def __init__(self, trace: Trace, masters: Masters, able: Usable, count: int) -> None:
        self._trace = trace
        self._masters = masters
        self._able = able
        self._workspaces: dict[int, Mapping[str, int]] = {}
        self.count = count

    def settled(self, draft: Draft) -> Draft:
        """``draft`` with them (``passed``)."""
        chunk = draft.streaming.update_chunk
        if chunk not in self._workspaces:
            streaming = replace(draft.streaming, masters=self._masters)
            self._workspaces[chunk] = update_workspaces(self._trace, streaming)
        return passed(self._trace.model, draft, self._able, self._workspaces[chunk], self.count)

    def kept_nbytes(self, block: Block) -> int:
        """Bytes of gradients that wait on the device for their step where ``block`` stays there."""
        return 0 if block.name in self._able.there else block.gradient_nbytes


def passed(model: Model, draft: Draft, able: Usable, workspaces: Mapping[str, int], count: int = FEWEST) -> Draft:
    """``draft`` with updates in backward of those blocks that are ``able`` and are updated in no other way, and
    ``count`` slots for their gradients where they go to the host: its own, if those are large enough. ``workspaces``
    are the bytes that the update of each block takes on the device: of those that stay there only whose it pays for
    (``_paying``)."""
    streaming = draft.streaming
    if streaming.delay_after is not None:
        return draft
    free = (Update.STEP, Update.BACKWARD)
    pairs = zip(model.blocks, draft.placements, strict=True)
    blocks = [(b, p) for b, p in pairs if able.admits(p) and p.update in free and b.gradient_nbytes]
    leaving, staying = ([b for b, p in blocks if p.resident is stays] for stays in (False, True))
    slots = slots_of(leaving, count)
    if streaming.gradient_slots[:1] < slots[:1]:
        streaming = replace(streaming, gradient_slots=slots)
    names = [block.name for block in (*leaving, *_paying(staying, workspaces))]
    return replace(draft.updating(Update.BACKWARD, names), streaming=streaming)


def _paying(staying: Sequence[Block], workspaces: Mapping[str, int]) -> Sequence[Block]:
    """Those of the blocks ``staying`` on the device that had better be updated in backward.

    In backward an update takes its workspace beside activations, behind it not. So a block whose update takes much (an
    embedding whose states are made at once) may do better to keep its gradients until the step: of all bounds on the
    workspace the one with the least sum of it and of the gradients that are kept because their updates take more."""
    ranked = sorted(staying, key=lambda block: workspaces[block.name])
    kept = sum(block.gradient_nbytes for block in ranked)
    least, count = kept, 0
    for number, block in enumerate(ranked, 1):
        kept -= block.gradient_nbytes
        if kept + workspaces[block.name] <= least:
            least, count = kept + workspaces[block.name], number
    return ranked[:count]


def searched(problem: Problem) -> int:
    """With how many slots a search goes through drafts: those that ``SHARE`` of the host has room for. Drafts with few
    slots wait for the host's updates, and so look slower beside others than they are with as many as they need."""
    sizes = [gradient_nbytes(block) for block in problem.model.blocks if block.gradient_nbytes]
    room = int(problem.limit(Tier.HOST) * SHARE) // max(1, repeated(sizes)) if sizes else 0
    return max(FEWEST, min(len(sizes), room))


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
    if bench.problem.update != "backward":
        return plan
    if not plan.updated(Update.BACKWARD):
        why = (
            "nothing is updated in backward: of no block the gradients are complete one after the other, or such an "
            "update takes more than they do"
        )
        return replace(plan, reasons=(*plan.reasons, why))
    staying = frozenset(used_up(plan.placements, resident=True))
    if len(staying) > 1:
        plan = replace(plan, reasons=(*plan.reasons, _said_of(bench.model, staying)))
    names = frozenset(used_up(plan.placements, resident=False))
    if not names:
        return plan
    blocks = [block for block in bench.model.blocks if block.name in names]
    best = _with_fewest_enough(bench, Draft.of(plan), blocks)
    reasons = (*plan.reasons, _said(blocks, best.streaming.gradient_slots, len(bench.model.blocks)))
    return bench.timed(bench.plan(plan.planner, best, reasons=reasons))


def _with_fewest_enough(bench: Bench, draft: Draft, blocks: Sequence[Block]) -> Draft:
    """``draft`` with the fewest slots, its own or twice as many again and again, whose step is ``GAIN`` from the
    fastest's at the most. All are tried for which the host has room: with too few for the updates that come late no
    more are any faster, until there are enough."""
    own = len(draft.streaming.gradient_slots)
    counts, pageable, found = {min(own, len(blocks)), len(blocks)}, bench.pageable(bench.arenas(draft)), list[Draft]()
    counts |= {FEWEST << double for double in range(len(blocks).bit_length()) if FEWEST << double < len(blocks)}
    for count in sorted(counts):
        one = replace(draft, streaming=replace(draft.streaming, gradient_slots=slots_of(blocks, count)))
        sizes = bench.arenas(one)
        if sizes.host <= bench.problem.limit(Tier.HOST) and bench.pageable(sizes) <= pageable:
            found.append(one)
    enough = min(map(bench.seconds, found), default=0.0) / (1 - GAIN)
    return next((one for one in found if bench.seconds(one) <= enough), draft)


def _said_of(model: Model, staying: Collection[str]) -> str:
    sizes = [block.gradient_nbytes for block in model.blocks if block.name in staying]
    return (
        f"{len(sizes)} of {len(model.blocks)} blocks stay on the device and are updated there in backward: of their "
        f"gradients {format_bytes(max(sizes))} at most are there at a time, in the place of {format_bytes(sum(sizes))}"
    )


def _said(blocks: Sequence[Block], slots: tuple[int, ...], every: int) -> str:
    held, otherwise = sum(slots), sum(map(gradient_nbytes, blocks))
    return (
        f"{len(blocks)} of {every} blocks are updated in backward, which uses their gradients up: {len(slots)} slots "
        f"of {format_bytes(held)} together hold them on the host, in the place of {format_bytes(otherwise)}"
    )
