"""Plans that move activations to the host, and what a trace says about what may be moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

import forebay
from forebay.arenas import DISK_BLOCK, DISK_BOUNCE
from forebay.budgets import DiskBudget
from forebay.layout import MOVED_LEAST, PAGE, align
from forebay.memory import ALIGNMENT
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.trace import Op, Phase, Trace, Visit
from forebay.treatments import Fate, Selection, Split, Treatment
from tests.parity.models import CASES, Case
from tests.parity.recomputing import AMPLE, plan_of

__all__ = [
    "SPLITS",
    "SUBJECTS",
    "Named",
    "disk_formula",
    "host_formula",
    "in_parts",
    "larger",
    "movable",
    "moving",
    "offload_plan",
    "selections",
    "trace_of",
    "with_disk",
]


def larger(case: Case, times: int = 4) -> Case:
    """The same model on a batch so many times as large: most of what a block saves is then large enough to be moved."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        parts = [case.batch(times * step + part) for part in range(times)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return Case(case.make, batch, case.dtypes)


SUBJECTS: Mapping[str, Case] = {
    **{
        name: larger(CASES[name])
        for name in ("llama", "llama-tied", "gpt2", "albert", "t5", "vit", "convnet", "mixtral")
    },
    "used-twice": larger(CASES["used-twice"], 16),
}


SPLITS = st.one_of(
    st.none(), st.integers(2, 9).flatmap(lambda parts: st.builds(Split, st.integers(1, parts - 1), st.just(parts)))
)


@dataclass(frozen=True)
class Named:
    """An op of one forward of a block, and the bytes of the saved roots that it makes and that are large enough."""

    block: str
    call: int
    op: str
    occurrence: int
    nbytes: tuple[int, ...]


@cache
def trace_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> Trace:
    """The trace of the case's first batch."""
    return forebay.profile(case.model(dtype), case.inputs(0, dtype), device=device)


def movable(trace: Trace) -> list[Named]:
    """Every op of a block with a module of its own that makes roots of which all large ones are saved for backward and
    that nothing changes later, in every call of the module."""
    alone = {b.name for b in trace.model.blocks if b.module is not None and not b.held}
    tensors = dict(trace.tensors())
    root_of = {number: tensor.root for number, tensor in tensors.items()}
    changed = _changed_in_place(trace, root_of)
    found, calls = [], defaultdict[str, set[int]](set)
    born, seen = set(range(len(trace.sources))), Counter[tuple[int, str]]()
    for _, visit, op in trace.ops():
        made = [r for r in dict.fromkeys(_roots(visit, op, root_of)) if r not in born]
        born.update(made)
        if visit.phase is not Phase.FORWARD or visit.block not in alone:
            continue
        calls[visit.block].add(visit.first_op)
        name = trace.works[op.work].op
        occurrence = seen[visit.first_op, name]
        seen[visit.first_op, name] += 1
        large = [r for r in made if tensors[r].nbytes >= MOVED_LEAST]
        if large and all(tensors[r].saved and r not in changed for r in large):
            nbytes = tuple(tensors[r].nbytes for r in large)
            found.append(Named(visit.block, visit.first_op, name, occurrence, nbytes))
    times = Counter((one.block, one.op, one.occurrence) for one in found)
    return [one for one in found if times[one.block, one.op, one.occurrence] == len(calls[one.block])]


def _roots(visit: Visit, op: Op, root_of: Mapping[int, int]) -> list[int]:
    return [root_of[visit.resolve(reference)] for reference in op.outputs]


def _changed_in_place(trace: Trace, root_of: Mapping[int, int]) -> set[int]:
    changed, born = set(), set(range(len(trace.sources)))
    for _, visit, op in trace.ops():
        work, roots = trace.works[op.work], _roots(visit, op, root_of)
        if work.nbytes or work.flops:  # no view
            changed.update(root for root in roots if root in born)
        born.update(roots)
    return changed


def selections(named: Iterable[Named], fates: Mapping[Named, Fate] | None = None) -> tuple[Selection, ...]:
    """One selection a block, which names all of its ops among ``named`` (of several calls, what any of them names).
    ``fates``: where they go, if not to the host."""
    by_block = defaultdict[str, dict[tuple[str, int], Fate]](dict)
    for one in named:
        by_block[one.block][one.op, one.occurrence] = (fates or {}).get(one, Fate.OFFLOAD)
    return tuple(
        Selection((block,), tuple(Treatment(op, occurrence, fate) for (op, occurrence), fate in ops.items()))
        for block, ops in by_block.items()
    )


def in_parts(plan: Plan, pick: Callable[[], Split | None]) -> Plan:
    """``plan``, and of what it moves or makes into codes only the parts that ``pick`` says, asked for each anew."""
    chosen = tuple(
        replace(s, treatments=tuple(replace(t, split=pick() if t.changes_bytes else None) for t in s.treatments))
        for s in plan.activations
    )
    return replace(plan, activations=chosen)


def host_formula(named: Iterable[Named]) -> int:
    """Bytes of the arena: everything that one micro-batch moves, each rounded up to the alignment."""
    return sum(align(nbytes, ALIGNMENT) for one in named for nbytes in one.nbytes)


def disk_formula(sizes: Iterable[int]) -> int:
    """Bytes of the file: everything that one micro-batch moves there, each rounded up to pages."""
    return sum(align(nbytes, PAGE) for nbytes in sizes)


def moving(
    plan: Plan, named: Iterable[Named], *, arena: int | None = None, offload_window: int = 0, reload_window: int = 0
) -> Plan:
    """``plan``, and ``named`` goes to an arena of ``arena`` bytes (None: just large enough)."""
    named = tuple(named)
    nbytes = host_formula(named) if arena is None else arena
    streaming = replace(
        plan.streaming, host_activations=nbytes, offload_window=offload_window, reload_window=reload_window
    )
    return replace(plan, streaming=streaming, activations=selections(named), host=plan.host + nbytes)


def with_disk(plan: Plan, folder: Path, sizes: Iterable[int], *, ring: int = 0, file: int | None = None) -> Plan:
    """``plan`` with room on disk for things of ``sizes`` bytes (or for ``file`` bytes) and a ring that holds the
    largest of them and ``ring`` bytes more."""
    sizes = tuple(sizes)
    if not sizes:
        return plan
    nbytes = disk_formula(sizes) if file is None else file
    window = align(max(sizes), PAGE) + ring
    return replace(
        plan,
        streaming=replace(plan.streaming, disk_activations=nbytes, disk_window=window),
        budget=replace(plan.budget, disk=DiskBudget(str(folder))),
        host=plan.host + window + DISK_BLOCK * DISK_BOUNCE,
        disk=plan.disk + nbytes,
    )


def offload_plan(
    case: Case,
    dtype: torch.dtype,
    *,
    resident: bool,
    slots: int = 1,
    offload_window: int = 0,
    reload_window: int = 0,
    device: str = "cpu",
) -> Plan:
    """All that may be moved is moved; blocks stream, or everything else stays on the device."""
    plan = plan_of(find_blocks(case.model(dtype)).model, (), resident=resident, slots=slots, device=AMPLE)
    named = movable(trace_of(case, dtype, device))
    return moving(plan, named, offload_window=offload_window, reload_window=reload_window)
