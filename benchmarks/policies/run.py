"""Plans by ``auto`` and by every published policy, on machines of the catalogue."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from benchmarks.case import BenchmarkError, among
from benchmarks.policies.record import AUTO, Comparison, Instance, Outcome
from benchmarks.provenance import provenance
from forebay.budgets import Budget, DiskBudget
from forebay.catalogue import load_machine
from forebay.collector import collector_paused
from forebay.errors import CannotServe, DoesNotFit
from forebay.machine import Machine
from forebay.planners import STATES, Bench, make_plan
from forebay.planners.parts import Draft
from forebay.planners.reasons import limits
from forebay.planning import problem_of
from forebay.plans import Plan
from forebay.trace import Trace
from forebay.units import format_bytes

__all__ = ["MACHINES", "MODELS", "SHARES", "Batch", "compare", "instances", "traced"]


@dataclass(frozen=True)
class Batch:
    """``size`` sequences of ``seq`` tokens."""

    size: int
    seq: int


MODELS: Final[Mapping[str, Batch]] = MappingProxyType(
    {
        "gpt2-xl": Batch(1, 1024),
        "llama-3.2-3b": Batch(1, 2048),
        "llama-3.1-8b": Batch(1, 2048),
        "flan-t5-large": Batch(4, 512),
        "olmoe-1b-7b": Batch(1, 1024),
    }
)
"""Recipes and their micro-batches: decoders of three sizes, an encoder-decoder, a mixture of experts."""

MACHINES: Final = ("t4", "l4", "rtx-4090", "rtx-5090", "a100-40gb", "h100", "gh200", "mi300x")
"""From slow links and little host memory to plenty of both. What the host has no room for may go to the disk."""

SHARES: Final = (0.25, 0.5, 1.0)
"""Device budgets, as shares of what the machine has."""

DTYPE: Final = "bfloat16"


def compare(
    models: Sequence[str], machines: Sequence[str], command: str, say: Callable[[str], None], shares: Sequence[float]
) -> Comparison:
    """Plans all of ``models`` on all of ``machines`` (none: all that there are) with ``shares`` of their devices.

    ``say`` gets a line about each instance. Raises ``BenchmarkError`` for a name that is not among them, or no share.
    """
    chosen, on = among("model", models, tuple(MODELS)), among("machine", machines, MACHINES)
    if not all(0 < share <= 1 for share in shares):
        raise BenchmarkError(f"a device budget is a share of the device, above 0 and at most 1, got {list(shares)}")
    origin = provenance(command)
    found = []
    for model in chosen:
        trace = traced(model)
        for one in instances(model, MODELS[model], trace, [load_machine(name) for name in on], shares):
            found.append(one)
            say(in_words(one))
    return Comparison(**origin, instances=tuple(found))


def traced(model: str) -> Trace:
    """A step of the recipe ``model`` with its micro-batch. Nothing is computed, and no weight has memory."""
    import forebay
    from forebay.recipes.tasks import sample

    batch = MODELS[model]
    found = sample(model, batch=batch.size, seq=batch.seq, dtype=DTYPE)
    return forebay.profile(found.model, found.batch, device="cuda")


def instances(
    model: str, batch: Batch, trace: Trace, machines: Sequence[Machine], shares: Sequence[float]
) -> Iterator[Instance]:
    """The model called ``model`` on each machine with each share of its device."""
    for machine in machines:
        bench: Bench | None = None
        for share in shares:
            problem = problem_of(
                trace, machine, Budget(int(share * machine.device_capacity), disk=_whole_disk(machine))
            )
            # What was sized and simulated is used again. It counts again, too: nobody finds what another has tried.
            bench = Bench(problem) if bench is None else bench.with_limits(problem)
            with collector_paused():
                yield _instance(model, batch, bench, share)
        # All that is known for one machine refers to itself: gigabytes, which nobody would collect for long.
        bench = None
        gc.collect()


def _whole_disk(machine: Machine) -> DiskBudget | None:
    return None if machine.disk is None else DiskBudget("disk", machine.disk.capacity)


def _instance(model: str, batch: Batch, bench: Bench, share: float) -> Instance:
    problem, own = bench.problem, bench.with_limits(bench.problem)
    auto, plan = _planned(own, AUTO)
    published = tuple(found for policy in STATES if (found := _served(bench.with_limits(problem), policy)) is not None)
    return Instance(
        model=model,
        batch=batch.size,
        seq=batch.seq,
        machine="" if problem.machine is None else problem.machine.name,
        share=share,
        device=problem.budget.device,
        auto=auto,
        published=published,
        why=() if plan is None else limits(own, Draft.of(plan)),
        simulations=own.simulated,
    )


def _served(bench: Bench, policy: str) -> Outcome | None:
    """What ``policy`` answers; None if it is for other models, or for steps of several micro-batches."""
    try:
        return _planned(bench, policy)[0]
    except CannotServe:
        return None


def _planned(bench: Bench, policy: str) -> tuple[Outcome, Plan | None]:
    """What ``policy`` answers. Raises ``CannotServe``."""
    try:
        plan = make_plan(bench.problem, policy, bench)
    except CannotServe:
        raise
    except DoesNotFit as refusal:
        return Outcome(policy, None, refusal=str(refusal)), None
    return Outcome(policy, plan.step_seconds, not plan.changes_numbers), plan


def in_words(one: Instance) -> str:
    """A line about ``one``."""
    where = f"{one.model} on {one.machine}, {format_bytes(one.device)}"
    own = "nothing fits" if one.auto.step_seconds is None else f"auto {one.auto.step_seconds:.3f} s"
    if one.ratio is None or one.best is None:
        return f"{where}: {own}, no published policy fits"
    word = "BEHIND" if one.behind else "ties with" if one.ties else "ahead of"
    return f"{where}: {own}, {word} {one.best.policy} {one.best.step_seconds:.3f} s ({one.ratio:.3f} of it)"
