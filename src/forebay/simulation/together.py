"""A step of several micro-batches: one after the other, or together, block by block (``forebay.accumulate``). No torch.

Together they are the program of one micro-batch in which what each of them does (it computes, and its activations move)
is done as many times, and everything else once: a block is fetched for all of them, and a gradient leaves when it is
complete. Two things cross for each of them all the same (``runtime.accumulate``): gradients of parameters that several
blocks use, to the host and back; and where forward draws random numbers, or leaves something in its modules, the blocks
in forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.lowering import Liveness, parked_nbytes, sketch
from forebay.plans import Plan
from forebay.program import Sketch, Verb
from forebay.simulation.costs import Costs
from forebay.simulation.play import pace, settled_seconds
from forebay.simulation.score import Score
from forebay.timeline import CROSSING, Lane
from forebay.trace import Leaves, Phase, Trace

__all__ = ["PassesForecast", "by_turns", "in_turn", "together"]


@dataclass(frozen=True)
class PassesForecast:
    """What a step of some micro-batches is predicted to take (seconds) and to move (bytes of each lane of
    ``timeline.CROSSING``), once all steps are alike."""

    seconds: float
    moved: Mapping[Lane, int]


def together(plan: Plan, costs: Costs, micro_batches: int, *, liveness: Liveness | None = None) -> PassesForecast:
    """The step of ``micro_batches`` that pass each block before the next one. ``costs`` are those of the plan's trace,
    ``liveness`` is that of the trace, if the caller has it. Raises what ``lower`` raises."""
    trace, machine = costs.trace, costs.machine
    program = sketch(trace, plan, liveness=liveness)
    times = _times(program, trace, micro_batches)
    score = Score.of(program, costs, settled=not plan.streaming.overlap_update)
    seconds = settled_seconds(pace(score.in_threads(program.actions, machine).times(times)), program)
    moved = _moved(program, times)
    parked = parked_nbytes(trace, plan)
    if parked and micro_batches > 1:
        for lane in (Lane.D2H, Lane.H2D):
            moved[lane] += micro_batches * parked
        # On the way out they leave compute alone; on the way back it waits for them.
        seconds += micro_batches * machine.h2d.seconds(parked)
    return PassesForecast(seconds, moved)


def by_turns(plan: Plan, costs: Costs, micro_batches: int, *, liveness: Liveness | None = None) -> PassesForecast:
    """The step of ``micro_batches`` one after the other. Raises ``ConfigError`` for a plan without its figures
    (``figures.with_figures``)."""
    seconds = plan.seconds_of_step(micro_batches)
    if seconds is None:
        raise ConfigError("the plan does not say what a further micro-batch takes; give it its figures first")
    programs = (sketch(costs.trace, plan, micro_batches=count, liveness=liveness) for count in (1, 2))
    one, two = (_moved(program, [1] * len(program.actions)) for program in programs)
    # Like its seconds: from the second micro-batch on all are alike.
    more = micro_batches - 1
    return PassesForecast(seconds, {lane: one[lane] + more * (two[lane] - one[lane]) for lane in one})


def in_turn(trace: Trace) -> str:
    """Why micro-batches pass forward one after the other, in words; "" where they do not."""
    segments = {visit.segment for visit in trace.visits if visit.phase is Phase.FORWARD}
    works = {op.work for segment in segments for op in trace.segments[segment].ops}
    if any(trace.works[work].draws for work in works):
        return "draws random numbers"
    return "leaves something in the model's modules" if trace.leaves is Leaves.ALWAYS else ""


def _times(program: Sketch, trace: Trace, micro_batches: int) -> list[int]:
    """How often each action is done for all micro-batches."""
    forward = sum(len(trace.segments[v.segment].ops) for v in trace.visits if v.phase is Phase.FORWARD)
    end = forward + sum(len(trace.segments[v.segment].ops) for v in trace.visits if v.phase is not Phase.FORWARD)
    again, in_backward, times = bool(in_turn(trace)), False, []
    for action in program.actions:
        if action.verb is Verb.COMPUTE and not action.recomputed:
            # What is fetched behind the last op is for the next forward.
            in_backward = forward <= action.ops[1] < end
        fetched_again = again and action.verb is Verb.FETCH and not in_backward
        each = action.verb is Verb.COMPUTE or action.tensor >= 0 or fetched_again
        times.append(micro_batches if each else 1)
    return times


def _moved(program: Sketch, times: Sequence[int]) -> dict[Lane, int]:
    """Bytes that cross in a step that is like all that would follow, of which each action is done so many ``times``."""
    moved = dict.fromkeys(CROSSING, 0)
    for action, count in zip(program.actions, times, strict=True):
        if action.step in program.settled and action.lane in moved:
            moved[action.lane] += action.nbytes * count
    return {lane: nbytes // program.round for lane, nbytes in moved.items()}
