"""A timeline summed up: step time, its band, the limit of every lane, what binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.memory import Kind, Tier
from forebay.program import Program
from forebay.simulation.costs import Costs
from forebay.simulation.forecast import (
    LINK_ERROR,
    MEASURED_ERROR,
    NOMINAL_ERROR,
    ROOFLINE_ERROR,
    Forecast,
    summarise,
)
from forebay.simulation.play import play
from forebay.states import Masters
from forebay.timeline import Lane
from tests.null.simulating import MACHINE, compute, fetch, land, programmed, seconds_trace, update, write

STANDING = {Tier.DEVICE: {Kind.PARAMETER: 100}, Tier.HOST: {Kind.STATE: 70}, Tier.DISK: {Kind.STATE: 5000}}


def two_steps(fetched: int) -> Program:
    """Each step: a fetch, 2 s of compute after it, a gradient of 100 bytes, an update of 150, a write of 50."""
    actions = []
    for step in range(2):
        first = len(actions)
        after = (first - 3,) if step else ()  # the gradient of the step before
        actions += [
            fetch(fetched, *after, step=step),
            compute(0, first, step=step, peak=130, changes=[(Kind.GRADIENT, 100)]),
            land(100, first + 1, step=step),
            update(150, first + 2, step=step),
            write(50, first + 3, step=step),
        ]
    return programmed(*actions, standing=STANDING)


def summed_up(program: Program, **machine: object) -> Forecast:
    costs = Costs(seconds_trace([2.0], tokens=8), replace(MACHINE, **machine), Masters.WHOLE)  # type: ignore[arg-type]
    return summarise(play(program, costs), program, costs)


def test_the_last_step_is_the_one_that_counts() -> None:
    # Step 1 begins when step 0 has computed (5 s): 1 s until its gradient has landed, 3 s of fetch, 2 s of compute.
    made = summed_up(two_steps(fetched=300))
    assert made.step_seconds == 1 + 3 + 2
    assert made.tokens_per_second == 8 / 6
    # The update and the write of step 0 run under step 1; those of step 1 are the next step's.
    assert made.busy == {
        Lane.COMPUTE: 2,
        Lane.STALL: 4,
        Lane.H2D: 3,
        Lane.D2H: 1,
        Lane.UPDATE: 1.5,
        Lane.DEVICE_UPDATE: 0,
        Lane.STORAGE_UPDATE: 0,
        Lane.NORM: 0,
        Lane.DISK_READ: 0,
        Lane.DISK_WRITE: 0.5,
        Lane.PEER_OUT: 0,
        Lane.PEER_IN: 0,
    }
    assert made.binding is Lane.H2D
    assert made.moved[Lane.DISK_WRITE] == 50
    assert made.peaks == {Tier.DEVICE: 100 + 130, Tier.HOST: 70, Tier.DISK: 5000}


def test_the_limit_is_flops_and_bytes_over_rates() -> None:
    made = summed_up(two_steps(fetched=300))
    assert made.limits == {
        Lane.COMPUTE: 2.0,  # 2000 FLOP at 1000/s
        Lane.H2D: 300 / 100,
        Lane.D2H: 100 / 100,
        Lane.UPDATE: 150 / 100,
        Lane.DEVICE_UPDATE: 0,
        Lane.STORAGE_UPDATE: 0,
        Lane.DISK_READ: 0,
        Lane.DISK_WRITE: 50 / 100,
    }
    assert made.limit_seconds == 3.0
    assert made.limit_seconds <= made.step_seconds


def test_updates_on_the_device_are_computes_work() -> None:
    actions = (compute(0), update(500, lane=Lane.COMPUTE))
    made = summed_up(replace(programmed(*actions), micro_batches=1))
    assert made.limits[Lane.COMPUTE] == 2 + 500 / 100
    assert made.limits[Lane.UPDATE] == 0
    assert (made.step_seconds, made.binding) == (7, Lane.COMPUTE)


def test_every_micro_batch_has_its_tokens_and_its_flops() -> None:
    made = summed_up(replace(programmed(compute(0), compute(0), compute(0)), micro_batches=3))
    assert made.limits[Lane.COMPUTE] == 3 * 2.0
    assert made.tokens_per_second == 3 * 8 / 6


@pytest.mark.parametrize(
    ("source", "op_seconds", "compute_error", "link_error"),
    [
        ("measured", {"op0": 2.0}, MEASURED_ERROR, LINK_ERROR),
        ("measured", {}, ROOFLINE_ERROR, LINK_ERROR),
        ("catalogue", {}, ROOFLINE_ERROR, NOMINAL_ERROR),
    ],
)
def test_the_band_is_that_of_where_the_figures_are_from(
    source: str, op_seconds: dict[str, float], compute_error: float, link_error: float
) -> None:
    made = summed_up(two_steps(fetched=300), source=source, op_seconds=op_seconds)
    error = (2 * compute_error + 4 * link_error) / 6  # 2 s of compute, 4 s of waiting for links
    assert (made.low, made.high) == (pytest.approx(6 * (1 - error)), pytest.approx(6 * (1 + error)))
    assert made.measured_share == (1 if op_seconds else 0)
