"""Plans by every planner for activations, timed: from a trace to a plan, with nothing known from the plan before.

scripts/bench solving
scripts/bench solving 12 100
scripts/bench solving 100 --policies rotor rockmate

Models are those of ``benchmarks.planning``, layers of Llama 3.1 8B, and the links those of an RTX 4090, with room for
everything on the host. The device has room for half of the activations: beside all parameters, gradients and states, as
in the papers, and beside the slots that parameters stream through. What a policy decides is then decided for more than
one way of placing them (``planners.activations.literature.placing``), and the time of that is in the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.case import BenchmarkError, among
from benchmarks.planning import HOST, LAYERS, MOST_LAYERS, traced
from benchmarks.provenance import provenance
from benchmarks.solving.record import Comparison, Room, Solved
from forebay.budgets import Budget
from forebay.catalogue import read_machine
from forebay.collector import collector_paused
from forebay.errors import DoesNotFit
from forebay.planners import LITERATURE, Bench, Problem, make_plan
from forebay.planners.activations.literature.layers import layers_of
from forebay.planners.parts import all_resident
from forebay.planners.shapes import options, streamed_through, usual_window
from forebay.planning import problem_of
from forebay.trace import Trace
from forebay.units import TiB

__all__ = ["EXACT", "POLICIES", "asked", "compare", "in_words", "solved"]

POLICIES: Final = ("auto", "keep", "chen", "offload-all", *LITERATURE)

EXACT: Final = frozenset({"checkmate", "moccasin", "autotm"})
"""Integer programmes over all ops: they stop at a limit and say how far from the optimum they may be."""

OPTIMUM: Final = "optimum"
"""The word by which what a policy says of its proof is known among its reasons."""

SHARE: Final = 0.5
"""Of the bytes that layers keep from forward to backward, so many have no room on the device."""

ENDLESS: Final = 1024 * TiB

ROUNDS: Final = 2
"""Plans of each model by each planner: the least seconds count, for others may use the processor."""


def compare(layers: Sequence[int], policies: Sequence[str], command: str, say: Callable[[str], None]) -> Comparison:
    """Plans by all of ``policies`` for models of all of ``layers`` (none: all that there are); ``say`` gets a line
    about each. Raises ``BenchmarkError`` for a depth that is none, or a policy that is not among them."""
    for count in layers:
        if not 0 < count <= MOST_LAYERS:
            raise BenchmarkError(f"a model here has 1 to {MOST_LAYERS} layers, got {count}")
    chosen = among("policy", policies, POLICIES)
    origin = provenance(command)
    rows = []
    for count in layers or LAYERS:
        trace = traced(count)
        for room in Room:
            problem = asked(trace, room)
            for name in chosen:
                rows.append(solved(name, count, room, problem))
                say(in_words(rows[-1]))
    return Comparison(**origin, rows=tuple(rows))


def asked(trace: Trace, room: Room) -> Problem:
    """What is planned for ``trace`` within a device that has ``room``, and room for the rest of the activations."""
    machine = replace(read_machine("rtx-4090"), device_capacity=ENDLESS, host_capacity=HOST, pinned_capacity=HOST)
    bench = Bench(problem_of(trace, machine, Budget(ENDLESS)))
    draft = all_resident(bench.model)
    if room is Room.SLOTS:
        draft = streamed_through(bench, options(bench)[0], usual_window(bench))
    held = sum(layer.items.held for layer in layers_of(bench))
    return problem_of(trace, machine, Budget(bench.device(draft) - round(SHARE * held)))


def solved(policy: str, layers: int, room: Room, problem: Problem) -> Solved:
    """What ``policy`` takes for ``problem``, of a model of so many ``layers`` within ``room``."""
    return min((_once(policy, layers, room, problem) for _ in range(ROUNDS)), key=lambda one: one.cpu_seconds)


def _once(policy: str, layers: int, room: Room, problem: Problem) -> Solved:
    wall, cpu = time.perf_counter(), time.process_time()
    step, proof = None, ""
    with collector_paused():  # as everyone has it who asks for a plan
        try:
            plan = make_plan(problem, policy, Bench(problem))
        except DoesNotFit:
            pass
        else:
            step = plan.step_seconds
            proof = "; ".join(reason for reason in plan.reasons if policy in EXACT and OPTIMUM in reason)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    device = problem.budget.device
    return Solved(policy, layers, room, device, cpu_seconds, seconds, step, policy in EXACT, proof)


def in_words(one: Solved) -> str:
    """A line about ``one``."""
    answer = "nothing fits" if one.step_seconds is None else f"{one.step_seconds:.2f} s a step"
    slow = ", TOO SLOW" if one.slow else ""
    proof = f", {one.proof}" if one.proof else ""
    spent = f"{one.cpu_seconds:.2f} s of the processor, {one.seconds:.2f} s on the wall"
    return f"{one.policy}, {one.layers} layers, {one.room}: {spent}{slow}; {answer}{proof}"
