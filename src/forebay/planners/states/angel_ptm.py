"""``angel-ptm``: all room on the device is pages, given to what is used next; as early as there is room for it.

Nie, Liu, Fu, Xue, Jiao, Miao, Tao and Cui, "Angel-PTM: a scalable and economical large-scale pre-training system in
Tencent", VLDB 2023 (arXiv 2303.02868). Tensors lie in pages of a fixed size, which any tensor may take, so that nothing
is lost to fragments between tensors of different sizes. One scheduler knows the life of every tensor of a step and
orders page moves, computation and communication by it: what is used next is brought as early as there are free pages.
What the host has no room for is on SSD. Their lock-free update lets the states on SSD be updated apart from forward and
backward, which then see older parameters.

``angel-ptm`` is the exact schedule: updates are over before the next forward begins. ``angel-ptm-lock-free`` is the
same with the lock-free update. In the paper one thread goes round the layers, updates each with what has been added up
of its gradients since the last round, and clears that; another adds what the GPU sends; the GPU takes whatever
parameters are there. A round takes as many steps as the SSDs make it take. Here that is a number of the plan
(``Streaming.update_every``): of 2, 4, 8 and 16 steps, no more than there are blocks, the fewest with which a step is as
fast, within 2 %, as with any. Each step updates the blocks whose turn it is, under the next forward, with the sum of
their gradients since their last turn; so a run is the same each time, a gradient waits for fewer steps than a round
has, and no forward sees half an update. It changes the numbers, so it is asked for by its name, and plan and report say
it. Clipping sees the sums, and each parameter's count of steps is that of its updates.

Ours departs in five things.

- A plan cuts slots before the step, of the sizes with which any run of blocks that follow each other has room, as many
  blocks as fit; pages would be cut anew for each. Slots are as long as the blocks and not rounded up to pages: no
  fragments either, and less is lost in each.
- Which block is where, and when it comes, follows from the recorded order: a block comes as soon as a slot is free
  whose block is used later (``scheduling.slots``), up to as many blocks ahead as there are slots. Activations are no
  part of that: they stay, or run again.
- Where all parameters fit, room that is left goes to gradients and states of blocks, whose update then runs on the
  device.
- What goes to disk first are states, then parameters, those of the last blocks first, as in every policy with a disk.
- Of the lock-free update there is one copy of the parameters, not a second in which the GPU finds older ones: a block
  that had its turn is waited for by the forward that wants it, where the paper's GPU goes on without it.

Several devices are not planned for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.nearest import with_larger
from forebay.planners.parts import Draft, roomy, sizes_at_once
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import (
    all_stays,
    cannot_serve,
    expect_trace,
    finished,
    most_slots,
    serial,
    streamed,
    with_homes,
)
from forebay.plans import Plan
from forebay.units import format_bytes

__all__ = ["ROUNDS", "angel_ptm", "angel_ptm_lock_free", "pages"]

LOCK_FREE = "angel-ptm-lock-free"

ROUNDS: Final = (2, 4, 8, 16)
"""Steps that a round of updates may take."""

NO_FASTER: Final = 1.02
"""A longer round is worth its older parameters where a step gains more than this ratio."""


def angel_ptm(problem: Problem, bench: Bench | None = None) -> Plan:
    """Slots for the longest run of blocks that the device has room for, fetched as early as they are free; homes on the
    host and, as far as need be, on disk. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    draft = _draft(bench, "angel-ptm")
    return finished(bench, "angel-ptm", draft, *_said(draft))


def angel_ptm_lock_free(problem: Problem, bench: Bench | None = None) -> Plan:
    """The same with updates in turns, which change the numbers. Raises what that raises, and ``CannotServe`` where
    updates shall be made in backward, or where all of them are made on the device."""
    if problem.update == "backward":
        why = "adds gradients up over several steps, and update='backward' uses them up at once"
        raise cannot_serve(LOCK_FREE, why, "angel-ptm, or this one with update='step'")
    bench = bench or Bench(problem)
    try:
        draft = _draft(bench, LOCK_FREE)
    except DoesNotFit as error:
        raise _without_turns(bench, error) from None
    if _all_resident(draft):
        why = "makes updates of what is off the device in turns, and the device has room for everything"
        raise cannot_serve(LOCK_FREE, why, "angel-ptm or auto")
    blocks = sum(not placed.resident for placed in draft.placements)
    every = {steps: _in_turns(draft, steps) for steps in ROUNDS if steps <= max(blocks, ROUNDS[0])}
    best = min(bench.seconds(each) for each in every.values())
    steps = next(steps for steps, each in every.items() if bench.seconds(each) <= NO_FASTER * best)
    said = f"each step updates one in {steps} of the blocks whose states are off the device, as lock-free update"
    return finished(bench, LOCK_FREE, every[steps], *_said(draft), said)


def _all_resident(draft: Draft) -> bool:
    return all(placed.resident for placed in draft.placements)


def _without_turns(bench: Bench, error: DoesNotFit) -> DoesNotFit:
    """``error``, and with a device so large that there is nothing to take turns, the policy without."""
    first = error.nearest[0]
    if first.what != Tier.DEVICE.value or any(remedy.what == "machine" for remedy in first.at_once):
        return error
    problem = bench.problem
    for remedy in (first, *first.at_once):
        problem = with_larger(problem, Tier(remedy.what), remedy.needed)
    with suppress(DoesNotFit):
        if not _all_resident(_draft(bench.with_limits(problem), LOCK_FREE)):
            return error
    words = f"policy angel-ptm with {first.words}"
    other = replace(first, what="policy", words=words, policy="angel-ptm", at_once=(first,))
    message = str(error).replace(first.words, words, 1)
    nearest = (other, *error.nearest[1:])
    return DoesNotFit(message, tier=error.tier, needed=error.needed, allowed=error.allowed, nearest=nearest)


def _draft(bench: Bench, policy: str) -> Draft:
    expect_trace(bench, policy, "the life of every tensor of a step")
    base = serial(streamed(bench))
    draft = _early(all_stays(bench, base) or most_slots(bench, base, partial(pages, bench.streamed(base))))
    return with_homes(bench, draft)


def _in_turns(draft: Draft, steps: int) -> Draft:
    return replace(draft, streaming=replace(draft.streaming, overlap_update=True, update_every=steps))


def pages(blocks: Sequence[Block], count: int) -> tuple[int, ...]:
    """Slots in which any ``count`` of ``blocks`` that follow each other have room, each in one of its own, and what a
    module needs at once."""
    runs = [blocks[first : first + count] for first in range(len(blocks) - count + 1)]
    sizes = [sorted((block.nbytes for block in run), reverse=True) for run in runs]
    return roomy(tuple(max(places) for places in zip(*sizes, strict=True)), sizes_at_once(blocks))


def _early(draft: Draft) -> Draft:
    """``draft`` with every block brought as early as there is a slot for it."""
    own = sum(p.parameters is Tier.DEVICE and not p.resident for p in draft.placements)
    distance = max(len(draft.streaming.slots) - 1, own, 0)
    return replace(draft, streaming=replace(draft.streaming, prefetch_distance=distance))


def _said(draft: Draft) -> tuple[str, ...]:
    slots = draft.streaming.slots
    if not slots:
        return ()
    return (f"{format_bytes(sum(slots))} on the device for the {len(slots)} blocks that are used next",)
