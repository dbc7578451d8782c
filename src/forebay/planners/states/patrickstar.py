"""``patrickstar``: chunks of equal size, brought when they are asked for; the one that goes is used again last.

Fang, Yu, Zhu, Li, You and Zhou, "PatrickStar: parallel training of pre-trained models via chunk-based memory
management", 2021 (arXiv 2108.05818; TPDS 2023). Parameters lie in chunks of equal size in the order of their creation,
each parameter in one of them; the size is the one that leaves the least of the chunks empty. A warm-up iteration notes
what the device holds beside model data; what it leaves is for chunks. A chunk moves when an operator asks for one of
its parameters, and where there is no room that chunk goes whose next use is furthest away: the order of a step is
known, which is Belady's rule. Where all parameters fit, the margin beside them is given to optimizer states, whose
update then runs on the device; all others are updated on the host, after backward.

Here a chunk is a slot, and which uses of a block find it in its slot follows from the rule, which every plan has
(``scheduling.slots``): a plan gives the size of the slots and their number. Ours departs in six things.

- A block is what moves. It lies in a slot as a whole, so that a slot is at least as large as the blocks that are alike;
  smaller blocks do not share one, larger ones take turns in one slot of their size. The paper's rule chooses among the
  sizes that blocks have: the least is left empty if every block took whole chunks.
- What the device holds beside model data is taken at its peak, by the trace in the place of a warm-up iteration; the
  paper's room for chunks goes up and down with it during a step.
- A gradient does not take the place of its parameter. It leaves as it is made, and has bytes of its own on the host (2
  bytes a 16-bit parameter more): backward may run again before a step, and parameters may be read before it.
- A block that goes need not be copied to the host, where its home has stayed (again 2 bytes a parameter, and one way
  over the link less).
- Embeddings are blocks like all others; the paper runs them on the host.
- Where the states of a block are on the device, so are its parameters and gradients.

More than one device, the other half of the paper, is not planned for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from forebay.model import Block
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, repeated_size, roomy, sizes_at_once
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import (
    all_stays,
    expect_trace,
    finished,
    most_slots,
    on_host,
    on_host_alone,
    serial,
    streamed,
)
from forebay.plans import Plan
from forebay.units import format_bytes

__all__ = ["chunk_size", "chunks", "patrickstar"]


def patrickstar(problem: Problem, bench: Bench | None = None) -> Plan:
    """As many chunks as the device has room for beside a step's activations; where all parameters fit, states in what
    is left. Raises ``DoesNotFit``, also where there is no room for a chunk as large as the largest block, and
    ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "patrickstar", "what a step takes beside its chunks")
    base = serial(streamed(bench, on_host_alone("patrickstar")))
    draft = all_stays(bench, base) or _chunked(bench, base)
    # On demand: a chunk moves when it is asked for.
    draft = replace(draft, streaming=replace(draft.streaming, prefetch_distance=0))
    return finished(bench, "patrickstar", on_host(bench, draft, "patrickstar"), _said(bench, draft))


def chunk_size(blocks: Sequence[Block]) -> int:
    """Bytes of a chunk: of the sizes of ``blocks``, from that of the ones that are alike on, the one that leaves the
    fewest bytes empty where each takes whole chunks; the largest such size."""
    least = repeated_size(blocks)
    sizes = {block.nbytes for block in blocks if block.nbytes >= least}
    return min(sizes, key=lambda size: (sum(-block.nbytes % size for block in blocks), -size))


def chunks(blocks: Sequence[Block], size: int, count: int) -> tuple[int, ...]:
    """``count`` chunks of ``size`` bytes, one slot for the ``blocks`` that are larger, and what a module needs at
    once."""
    larger = max((block.nbytes for block in blocks if block.nbytes > size), default=0)
    return roomy((*([larger] if larger else []), *[size] * count), sizes_at_once(blocks))


def _chunked(bench: Bench, base: Draft) -> Draft:
    moving = bench.streamed(base)
    return most_slots(bench, base, partial(chunks, moving, chunk_size(moving)))


def _said(bench: Bench, draft: Draft) -> str:
    beside = f"beside {format_bytes(bench.beside(draft))} that are no parameters"
    slots = draft.streaming.slots
    if not slots:
        states = len(draft.resident)
        return f"all parameters fit on the device, {beside}; the margin holds the states of {states} blocks"
    size = min(slots)
    larger = sum(slot > size for slot in slots)
    also = f" and {larger} of more for what is larger" if larger else ""
    return f"{len(slots) - larger} chunks on the device, {format_bytes(size)} each{also}, {beside}"
