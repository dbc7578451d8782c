"""A run that was kept, made up: two steps of a model of three blocks, as predicted and as measured."""

from __future__ import annotations

from forebay.budgets import Budget
from forebay.memory import Kind, Tier, TierUsage
from forebay.plans import Placement, Plan, Streaming
from forebay.reporting.losses import StepLine
from forebay.reporting.run import RunReport
from forebay.reporting.run_page import RunPage
from forebay.timeline import Event, Lane, Level, Timeline

MiB = 2**20

BLOCKS = ("embed", "layers.0", "layers.1")

PLAN = Plan(
    planner="auto",
    budget=Budget(8 * MiB, 64 * MiB),
    placements=tuple(Placement(block, Tier.HOST, Tier.HOST, Tier.HOST) for block in BLOCKS),
    streaming=Streaming(slots=(2 * MiB,)),
    device=7 * MiB,
    host=24 * MiB,
    disk=0,
    step_seconds=2.0,
    reasons=("of 3 blocks all stream",),
)

TIERS = (
    TierUsage(Tier.DEVICE, 8 * MiB, 0, 6 * MiB, {Kind.PARAMETER: 2 * MiB, Kind.ACTIVATION: 4 * MiB}),
    TierUsage(Tier.HOST, 64 * MiB, 0, 24 * MiB, {Kind.STATE: 24 * MiB}),
)


def device_level(time: float, activation: int, high: int) -> Level:
    """The device with its slot and so many MiB of activations."""
    live = {Kind.PARAMETER: 2 * MiB} | ({Kind.ACTIVATION: activation * MiB} if activation else {})
    return Level(time, Tier.DEVICE, live, high * MiB)


def step_events(start: float) -> tuple[Event, ...]:
    """What lanes do in a step of 2 seconds."""
    return (
        Event(Lane.H2D, start, start + 0.5, 2 * MiB, "fetch embed"),
        Event(Lane.COMPUTE, start + 0.5, start + 1.0, 0, "forward embed"),
        Event(Lane.COMPUTE, start + 1.0, start + 1.5, 0, "backward embed"),
        Event(Lane.UPDATE, start + 1.5, start + 2.0, 6 * MiB, "update embed"),
    )


def measured(first: float = 100.0) -> Timeline:
    """Two steps with a pause of a second between them, the second of which was seen."""
    second = first + 3.0
    levels = (
        device_level(second, 0, 2),
        Level(second, Tier.HOST, {Kind.STATE: 24 * MiB}, 24 * MiB),
        device_level(second + 1.0, 3, 6),
        device_level(second + 2.0, 0, 4),
    )
    events = (*step_events(first), *step_events(second))
    return Timeline(events, TIERS, (2.0, 2.0), {"fetches on demand": 1}, levels, (first, second))


def predicted() -> Timeline:
    """Two steps, one after the other."""
    levels = (device_level(1.0, 3, 5), device_level(2.0, 0, 5), device_level(3.0, 4, 7), device_level(4.0, 0, 6))
    return Timeline((*step_events(0.0), *step_events(2.0)), TIERS, (2.0, 2.0), {}, levels)


REPORT = RunReport(PLAN, measured(), elapsed=5.0, steps=2, tokens=640)

LOSSES = (StepLine(1, 5.5, 1e-3, 2.5), StepLine(2, 5.25, 1e-3, 2.0))

PAGE = RunPage(
    title="a model: run",
    plan=PLAN,
    report=REPORT,
    forecast=predicted(),
    blocks={"embed": 2 * MiB, "layers.0": MiB, "layers.1": MiB},
    losses=LOSSES,
    steps=2,
    tokens_per_step=320,
    settings={"model": "a model", "batch": 2},
)
