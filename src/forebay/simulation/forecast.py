"""What a plan would do, in a few figures: step time with its error band, the physical limit, what binds. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import NoneType

from forebay.arguments import expect, expect_records
from forebay.lowering import lower
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.program import Program, Verb
from forebay.simulation.costs import Costs, is_copy_beside
from forebay.simulation.play import play, settled_seconds
from forebay.simulation.sharing import LANES
from forebay.timeline import Lane, Timeline, covered
from forebay.trace import Trace

__all__ = [
    "LINK_ERROR",
    "MEASURED_ERROR",
    "NOMINAL_ERROR",
    "ROOFLINE_ERROR",
    "Forecast",
    "forecast",
    "limits",
    "simulate",
    "summarise",
]

MEASURED_ERROR = 0.10
"""Relative error of op seconds that were measured on the machine: clocks, caches and other processes differ between
two runs of the same op by this much. An assumption until a benchmark of predicted against measured replaces it."""

ROOFLINE_ERROR = 0.30
"""Relative error of op seconds from rates of the machine: kernels reach 50 to 90 % of what large matrices do, by their
shape. An assumption, as above."""

LINK_ERROR = 0.10
"""Relative error of transfers and updates at rates measured on the machine. An assumption, as above."""

NOMINAL_ERROR = 0.30
"""Relative error of transfers and updates at rates from the catalogue: mainboards and disks of one name differ by this
much. An assumption, as above."""


@dataclass(frozen=True)
class Forecast:
    """What one step is predicted to take once all steps are alike: the last of a program, or the mean of its last round
    (``Program.round``).

    Seconds: ``step_seconds``, between ``low`` and ``high`` by the error stated for where the figures are from;
    ``busy`` of each lane in the step; ``limits``, the least that each lane needs for what the step must do
    (``limits()``), the largest of which is ``limit_seconds``. ``binding`` is the lane that is busy longest.
    Bytes: ``moved`` by each lane in the step, ``disk_written`` whoever writes it, ``peaks`` of every tier.
    ``tokens_per_second`` counts the tokens of all micro-batches. ``measured_share`` is the share of op seconds that
    were measured; ``notes`` say what stood in for something else.
    """

    step_seconds: float
    low: float
    high: float
    tokens_per_second: float
    limit_seconds: float
    binding: Lane
    limits: Mapping[Lane, float]
    busy: Mapping[Lane, float]
    moved: Mapping[Lane, int]
    disk_written: int
    peaks: Mapping[Tier, int]
    measured_share: float
    notes: tuple[str, ...] = ()


def simulate(
    trace: Trace, machine: Machine, plan: Plan, *, micro_batches: int = 1, costs: Costs | None = None
) -> Timeline:
    """What happens when ``machine`` trains with ``plan`` on batches like that of ``trace``.

    A step has ``micro_batches`` forward and backward passes. The accounts of the tiers have the limits of the plan's
    budget, which nothing here enforces: ``forebay.checking`` does. ``costs`` are those of the trace on the machine
    with masters as the plan keeps them, for who simulates many plans. Raises what lowering the plan raises,
    ``PlanInvalid`` and ``ConfigError``.
    """
    expect_records(trace=trace, machine=machine, plan=plan)
    expect("costs", costs, (Costs, NoneType), "those of forebay.simulation.Costs, or None")
    program = lower(trace, plan, micro_batches=micro_batches)
    return _played(program, plan, costs or Costs(trace, machine, plan.streaming.masters), levels=True)


def limits(trace: Trace, machine: Machine, plan: Plan, *, micro_batches: int = 1) -> dict[Lane, float]:
    """The least seconds that each lane needs for one step of ``plan``: the physical limit.

    Compute: the trace's FLOPs at the machine's stated rates, without what is computed again, and the bytes of the
    updates that run there at the device's bandwidth. The others: bytes of the step at the best rate of their link,
    without latencies. A lane with nothing to do has 0.
    """
    return _limits(lower(trace, plan, micro_batches=micro_batches), Costs(trace, machine, plan.streaming.masters))


def forecast(
    trace: Trace, machine: Machine, plan: Plan, *, micro_batches: int = 1, costs: Costs | None = None
) -> Forecast:
    """``simulate``, summed up."""
    costs = costs or Costs(trace, machine, plan.streaming.masters)
    program = lower(trace, plan, micro_batches=micro_batches)
    return summarise(_played(program, plan, costs), program, costs)


def summarise(timeline: Timeline, program: Program, costs: Costs) -> Forecast:
    """The forecast in ``timeline``, which came of playing ``program`` at ``costs``."""
    step = settled_seconds(timeline.step_seconds, program)
    busy = _busy(timeline, program.round)
    floor = _limits(program, costs)
    error = _error(busy, step, costs)
    tokens = costs.trace.tokens * program.micro_batches
    return Forecast(
        step_seconds=step,
        low=step * (1 - error),
        high=step * (1 + error),
        tokens_per_second=tokens / step if step else 0.0,
        limit_seconds=max(floor.values()),
        binding=max(LANES, key=lambda lane: busy[lane]),
        limits=floor,
        busy=busy,
        moved=_moved(program),
        disk_written=_written(program, costs),
        peaks=timeline.peaks,
        measured_share=costs.measured_share,
        notes=costs.notes,
    )


def _played(program: Program, plan: Plan, costs: Costs, *, levels: bool = False) -> Timeline:
    timeline = play(program, costs, settled=not plan.streaming.overlap_update, levels=levels)
    budget = plan.budget
    allowed = {
        Tier.DEVICE: budget.device,
        Tier.HOST: budget.host,
        Tier.PINNED: budget.pinned,
        Tier.DISK: budget.disk.nbytes if budget.disk is not None else None,
    }
    return replace(timeline, tiers=tuple(replace(usage, limit=allowed[usage.tier]) for usage in timeline.tiers))


def _limits(program: Program, costs: Costs) -> dict[Lane, float]:
    machine = costs.machine
    rates = {
        Lane.COMPUTE: machine.device_bandwidth,
        Lane.H2D: machine.h2d.curve.best,
        Lane.D2H: machine.out_rate,
        Lane.DEVICE_UPDATE: costs.update_rate if machine.device_kind == "cpu" else machine.device_bandwidth,
    }
    if machine.disk is not None:
        rates |= {
            Lane.DISK_READ: machine.disk.read.curve.best,
            Lane.DISK_WRITE: machine.disk.write.curve.best,
            Lane.STORAGE_UPDATE: costs.storage_rate,
        }
    moved = _moved(program)
    seconds = {lane: nbytes / rates[lane] if lane in rates else 0.0 for lane, nbytes in moved.items()}
    settled = program.settled
    updates = (a for a in program.actions if a.lane is Lane.UPDATE and a.step in settled)
    seconds[Lane.UPDATE] = sum(costs.update_seconds(a.block, a.nbytes) for a in updates) / program.round
    if machine.disk is not None and machine.disk.update_rate is None:
        # What goes to a process on the host that updates beside the storage goes from memory to memory.
        for action in program.actions:
            if action.step in settled and action.lane in rates and is_copy_beside(action):
                seconds[action.lane] += (costs.action(action) - action.nbytes / rates[action.lane]) / program.round
    seconds[Lane.COMPUTE] += costs.arithmetic_seconds * program.micro_batches
    return seconds


def _moved(program: Program) -> dict[Lane, int]:
    """Bytes of each lane in a step; of compute those of updates that run there (an op's are in its seconds)."""
    moved: dict[Lane, int] = dict.fromkeys(LANES, 0)
    settled = program.settled
    for action in program.actions:
        if action.step in settled and action.verb is not Verb.COMPUTE:
            moved[action.lane] += action.nbytes
    return {lane: nbytes // program.round for lane, nbytes in moved.items()}


def _written(program: Program, costs: Costs) -> int:
    """Bytes that go to disk in a step, those of updates beside the storage among them."""
    settled = program.settled
    last = [action for action in program.actions if action.step in settled]
    beside = sum(a.nbytes for a in last if a.lane is Lane.STORAGE_UPDATE)
    return (sum(a.nbytes for a in last if a.verb is Verb.WRITE) + round(costs.states_share * beside)) // program.round


def _busy(timeline: Timeline, steps: int) -> dict[Lane, float]:
    """Seconds of each lane inside the last ``steps``, for each of them: work of one step that runs under the next
    counts there."""
    ends = [*accumulate(timeline.step_seconds, initial=0.0)]
    start, end = ends[-1 - steps], ends[-1]
    inside: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in Lane}
    for event in timeline.events:
        if event.end > start and event.start < end:
            inside[event.lane].append((max(event.start, start), min(event.end, end)))
    return {lane: covered(spans) / steps for lane, spans in inside.items()}


def _error(busy: Mapping[Lane, float], step: float, costs: Costs) -> float:
    """Relative error of the step: that of compute while compute runs, that of the links while it waits for them."""
    measured = costs.measured_share
    ops = MEASURED_ERROR * measured + ROOFLINE_ERROR * (1 - measured)
    links = LINK_ERROR if costs.machine.source == "measured" else NOMINAL_ERROR
    computing = min(1.0, busy[Lane.COMPUTE] / step) if step else 1.0
    return ops * computing + links * (1 - computing)
