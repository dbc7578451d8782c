"""Recomputed blocks of which some ops do not run again: what a trace says about those, and plans that name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from forebay.layout import MOVED_LEAST
from forebay.memory import ALIGNMENT
from forebay.plans import Plan
from forebay.trace import Phase, Segment, Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.parity.models import CASES, Case
from tests.parity.offloading import larger, trace_of
from tests.parity.recomputing import DROPOUT, plan_of, recomputable

__all__ = ["SUBJECTS", "Eligible", "eligible", "treated", "treated_plan"]

SUBJECTS: Mapping[str, Case] = {
    **{name: larger(case) for name, case in DROPOUT.items()},
    **{
        name: larger(CASES[name])
        for name in ("llama", "llama-tied", "albert", "t5", "mixtral", "vit", "convnet", "used-twice")
    },
}


@dataclass(frozen=True)
class Eligible:
    """An op that may be named: ``index`` is its place among the ops of the block's forward, ``nbytes`` are those of the
    roots that it makes. ``again`` says that a recomputation comes as far as this op."""

    block: str
    op: str
    occurrence: int
    index: int
    nbytes: tuple[int, ...]
    again: bool


def eligible(trace: Trace) -> list[Eligible]:
    """Every op that makes roots which nothing changes later, of the blocks with a module of their own; of a block that
    is called several times, those that are so in its first call."""
    allowed, found, seen = set(recomputable(trace.model)), [], set[str]()
    for visit in trace.visits:
        if visit.phase is Phase.FORWARD and visit.block in allowed and visit.block not in seen:
            seen.add(visit.block)
            found += _of_segment(trace, visit.block, trace.segments[visit.segment])
    return found


def _of_segment(trace: Trace, block: str, segment: Segment) -> list[Eligible]:
    found, born, count = dict[int, Eligible](), dict[int, int](), Counter[str]()
    for index, op in enumerate(segment.ops):
        work = trace.works[op.work]
        occurrence = count[work.op]
        count[work.op] += 1
        roots = dict.fromkeys(segment.tensors[r].root if r >= 0 else r for r in op.outputs)
        for root in roots:
            if root in born and (work.nbytes or work.flops):  # no view: it writes
                found.pop(born[root], None)
        # A constant that is lifted from the host (``lift_fresh``) is a root without bytes.
        made = [r for r in roots if r >= 0 and r not in born and segment.tensors[r].nbytes]
        born.update({r: index for r in roots if r not in born})
        if made:
            nbytes = tuple(segment.tensors[r].nbytes for r in made)
            found[index] = Eligible(block, work.op, occurrence, index, nbytes, index < segment.saves_until)
    return list(found.values())


def treated(plan: Plan, named: Mapping[Eligible, Fate], *, window: int = 0) -> Plan:
    """``plan``, and the ops in ``named`` do not run again; ``window`` is that of offloads and of reloads (bytes)."""
    blocks = dict.fromkeys(one.block for one in named)
    chosen = tuple(
        Selection((b,), tuple(Treatment(o.op, o.occurrence, fate) for o, fate in named.items() if o.block == b))
        for b in blocks
    )
    arena = host_nbytes(one for one, fate in named.items() if fate is Fate.OFFLOAD)
    streaming = replace(plan.streaming, host_activations=arena, offload_window=window, reload_window=window)
    return replace(plan, activations=chosen, streaming=streaming, host=plan.host + arena)


def host_nbytes(moved: Iterable[Eligible]) -> int:
    """Bytes of the arena, for blocks that are called once: what is large enough, each rounded up to the alignment."""
    large = [nbytes for one in moved for nbytes in one.nbytes if nbytes >= MOVED_LEAST]
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in large)


def treated_plan(
    case: Case,
    dtype: torch.dtype,
    fate: Fate | None,
    *,
    resident: bool,
    slots: int = 1,
    window: int = 0,
    device: str = "cpu",
) -> Plan:
    """Every block recomputes, and of all ops that may be named, all have ``fate`` (None: each other one KEEP)."""
    trace = trace_of(case, dtype, device)
    plan = plan_of(trace.model, recomputable(trace.model), resident=resident, slots=slots)
    fates = (Fate.KEEP, Fate.OFFLOAD) if fate is None else (fate,)
    return treated(plan, {one: fates[i % len(fates)] for i, one in enumerate(eligible(trace))}, window=window)
