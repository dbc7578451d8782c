"""``angel-ptm``: all room on the device is pages, given to what is used next; as early as there is room for it.

Nie, Liu, Fu, Xue, Jiao, Miao, Tao and Cui, "Angel-PTM: a scalable and economical large-scale pre-training system in
Tencent", VLDB 2023 (arXiv 2303.02868). Tensors lie in pages of a fixed size, which any tensor may take, so that nothing
is lost to fragments between tensors of different sizes. One scheduler knows the life of every tensor of a step and
orders page moves, computation and communication by it: what is used next is brought as early as there are free pages.
What the host has no room for is on SSD. Their lock-free update lets the states on SSD be updated apart from forward and
backward, which then see older parameters.

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
- The lock-free update is not offered: it makes other numbers, and forebay's delayed updates (``zero_offload``) ask for
  parameters that stay on the device. Updates are over before the next forward begins.

Several devices are not planned for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, roomy, sizes_at_once
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import all_stays, expect_trace, finished, most_slots, serial, streamed, with_homes
from forebay.plans import Plan
from forebay.trace import Block
from forebay.units import format_bytes

__all__ = ["angel_ptm", "pages"]


def angel_ptm(problem: Problem, bench: Bench | None = None) -> Plan:
    """Slots for the longest run of blocks that the device has room for, fetched as early as they are free; homes on the
    host and, as far as need be, on disk. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "angel-ptm", "the life of every tensor of a step")
    base = serial(streamed(bench))
    draft = _early(all_stays(bench, base) or most_slots(bench, base, partial(pages, bench.streamed(base))))
    draft = with_homes(bench, draft)
    return finished(bench, "angel-ptm", draft, *_said(draft))


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
