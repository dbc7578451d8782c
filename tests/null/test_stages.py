"""One model in stages over several devices: closed forms, and what places and root complexes are worth. No torch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.planners.parallel.mapping import crossed, in_order
from forebay.servers import Server
from forebay.simulation import Costs
from forebay.simulation.stages import Stage, stages_of
from forebay.simulation.swapping import alike, wrapped
from forebay.states import Masters
from forebay.timeline import Lane
from tests.null.planning import chain, machine
from tests.null.simulating import MACHINE, RATE, seconds_trace

COSTS = Costs(seconds_trace([1.0]), MACHINE, Masters.WHOLE)
ALONE = Server((0,), 1e12)


def stage(
    forward: float = 1.0, backward: float = 2.0, parameters: float = 0.0, *, handed: float = 0.0, touched: float = 0.0
) -> Stage:
    """Bytes as seconds of a link, or of an update, alone."""
    sizes = [round(RATE * seconds) for seconds in (parameters, parameters, touched, handed)]
    return Stage(forward, backward, *sizes)


def last(stages: list[Stage], server: Server, placed: tuple[int, ...], micro_batches: int = 1) -> float:
    """Seconds of a step that is like all that follow, on the device that takes longest."""
    return max(wrapped(stages, COSTS, server, placed, micro_batches).step_seconds)


# Wrapped.


def test_without_transfers_one_device_computes_all_the_time() -> None:
    assert last([stage()] * 4, ALONE, (0,) * 4, 3) == pytest.approx(4 * 3 * (1 + 2))


@pytest.mark.parametrize("devices", [2, 4])
def test_a_pipeline_is_as_long_as_its_first_micro_batch_and_what_follows_it(devices: int) -> None:
    """A stage on each of n devices and m micro-batches: m + n - 1 forwards, and as many backwards."""
    count, server = 6, Server(tuple(range(devices)), 1e12)
    expected = (count + devices - 1) * (1 + 2)
    assert last([stage()] * devices, server, in_order(server, devices), count) == pytest.approx(expected)


def test_each_stage_comes_once_in_forward_and_once_in_backward_for_all() -> None:
    """All but the two that are still there when backward begins."""
    stages, count = [stage(parameters=0.25)] * 5, 4
    found = wrapped(stages, COSTS, ALONE, (0,) * 5, count)
    brought, steps = 0.25 * (5 + 3), 3
    assert found.busy[Lane.H2D] == pytest.approx(steps * brought)
    assert found.busy[Lane.D2H] == pytest.approx(steps * 5 * 0.25)


def test_the_next_stage_comes_under_the_one_that_computes() -> None:
    """Only the first of a step is waited for, and where it takes longer than what computes, what is left of each."""
    quick = [stage(parameters=0.5)] * 4
    assert last(quick, ALONE, (0,) * 4, 2) == pytest.approx(4 * 2 * 3 + 0.5 + 0.5)  # and the last gradient
    slow = [stage(1.0, 1.0, parameters=3.0)] * 4
    # A stage takes 2: of three fetches 1 is left, and of two in backward too; and the first one, and the landing.
    assert last(slow, ALONE, (0,) * 4, 2) == pytest.approx(4 * 2 * 2 + 3.0 + 5 * 1.0 + 3.0, rel=0.1)


def test_what_stages_hand_on_goes_by_way_of_the_host() -> None:
    """Two devices, one micro-batch: out and in once in forward, and in backward too."""
    server = Server((0, 1), 1e12)
    assert last([stage(handed=0.5)] * 2, server, (0, 1)) == pytest.approx(2 * 3 + 2 * (0.5 + 0.5))


def test_an_update_comes_under_the_backward_of_what_is_before() -> None:
    """Only the first stage's, which is the last one's, is waited for."""
    updated = [stage(touched=1.0)] * 3
    assert last(updated, ALONE, (0,) * 3) == pytest.approx(3 * 3 + 1.0)


# Root complexes.


def test_stages_on_one_root_complex_do_not_bring_theirs_at_once() -> None:
    """Four devices, of which two at a time share a channel as fast as one link."""
    server = Server((0, 0, 1, 1), RATE)
    stages = [stage(1.0, 2.0, parameters=6.0)] * 12
    times = {how: last(stages, server, how(server, 12), 4) for how in (in_order, crossed)}
    free = last(stages, Server((0, 0, 1, 1), 4 * RATE), in_order(server, 12), 4)
    assert free <= times[crossed] < times[in_order]


@given(roots=st.lists(st.integers(0, 2), min_size=1, max_size=4), count=st.integers(1, 4), more=st.integers(0, 5))
@settings(max_examples=15)
def test_nothing_is_faster_than_its_busiest_lane(roots: list[int], count: int, more: int) -> None:
    server = Server(tuple(roots), RATE)
    stages = [stage(1.0, 2.0, parameters=0.7, handed=0.1, touched=0.3)] * (len(roots) + more)
    for placed in (in_order(server, len(stages)), crossed(server, len(stages))):
        found = wrapped(stages, COSTS, server, placed, count)
        share = max(placed.count(device) for device in range(len(roots)))
        assert found.seconds >= 3 * share * count * 3 - 1e-6  # steps, and what the fullest device computes in each
        # A channel moves no more than it can: what all of them bring, over as many as there are.
        moved = 3 * len(stages) * (0.7 + 2 * 0.1 * count)
        assert found.seconds >= moved / len(set(roots)) * 0.5 - 1e-6 or len(stages) < 6


# Alike.


def test_devices_that_are_alike_bring_everything_for_every_micro_batch() -> None:
    """Twice a micro-batch, but for what is still there; and land as many gradients."""
    stages, server = [stage(parameters=3.0)] * 4, Server((0, 0), RATE)
    found = alike(stages, COSTS, server, 4)
    once = alike(stages, COSTS, ALONE, 1)
    # A channel for two: as many seconds as one device needs for four times as much at least.
    assert found.busy[Lane.D2H] >= once.busy[Lane.D2H] * 4 - 1e-6
    assert found.seconds > wrapped(stages, COSTS, server, in_order(server, 4), 4).seconds


def test_one_device_that_is_alike_is_one_that_is_wrapped() -> None:
    stages = [stage(parameters=0.5, touched=0.1)] * 4
    assert alike(stages, COSTS, ALONE, 1).seconds == pytest.approx(wrapped(stages, COSTS, ALONE, (0,) * 4, 1).seconds)


# A model in stages.


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_stages_are_all_of_the_model_in_even_parts(count: int) -> None:
    trace = chain(8)
    costs = Costs(trace, machine(), Masters.WHOLE)
    stages = stages_of(costs, count)
    assert len(stages) == count
    assert sum(one.parameters for one in stages) == sum(block.nbytes for block in trace.model.blocks)
    assert sum(one.gradients for one in stages) == sum(block.gradient_nbytes for block in trace.model.blocks)
    assert all(one.touched > one.parameters and one.handed > 0 and one.backward > one.forward for one in stages)
    longest, shortest = (best(one.forward for one in stages) for best in (max, min))
    assert longest <= 2 * shortest if count < 8 else longest == pytest.approx(shortest, rel=0.5)


@pytest.mark.parametrize("count", [0, 9])
def test_no_more_stages_than_blocks(count: int) -> None:
    with pytest.raises(ConfigError, match="8 blocks"):
        stages_of(Costs(chain(8), machine(), Masters.WHOLE), count)


def test_what_makes_no_sense() -> None:
    for placed, count in (((0,), 1), ((0, 1), 1), ((0, 0), 0)):
        with pytest.raises(ConfigError, match="one micro-batch or more"):
            wrapped([stage()] * 2, COSTS, ALONE, placed, count)
    with pytest.raises(ConfigError, match="not as many for each"):
        alike([stage()], COSTS, Server((0, 1), 1.0), 3)
