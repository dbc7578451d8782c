"""Pipelines with one forward and one backward in turn: closed forms, the order of passes, what moves. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import ConfigError
from forebay.servers import Server
from forebay.simulation import Costs
from forebay.simulation.pipeline import Chunk, PipelineStage, in_flight, order, pipelined
from forebay.simulation.several import SeveralForecast
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Phase
from tests.null.simulating import MACHINE, RATE, seconds_trace

COSTS = Costs(seconds_trace([1.0]), MACHINE, Masters.WHOLE)
FREE = 1e12


def stage(*chunks: tuple[float, float], handed: float = 0.0, update: float = 0.0) -> PipelineStage:
    """Seconds of forward and backward of each chunk, of what is handed on over a link alone, and of the update."""
    return PipelineStage(tuple(Chunk(*chunk) for chunk in chunks), round(handed * RATE), update)


def moving(one: PipelineStage, host: float = 0.0, peers: float = 0.0) -> PipelineStage:
    """``one`` whose chunks move so many seconds of a link each, each way."""
    return replace(
        one, chunks=tuple(replace(c, to_host=round(host * RATE), to_peers=round(peers * RATE)) for c in one.chunks)
    )


def played(*stages: PipelineStage, micro_batches: int, peer: float | None = None) -> SeveralForecast:
    return pipelined(stages, COSTS, Server(tuple(range(len(stages))), FREE, peer), micro_batches)


# The order.


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 9])
def test_each_micro_batch_passes_forward_and_then_backward_and_early_stages_hold_the_most(
    stages: int, micro_batches: int
) -> None:
    """Stage p of P has min(P - p, m) micro-batches between their forward and their backward at the most."""
    for place in range(stages):
        passes = list(order(place, stages, micro_batches))
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert [number for own, number in passes if own is phase] == list(range(micro_batches))
        held = most = 0
        for phase, number in passes:
            held += 1 if phase is Phase.FORWARD else -1
            assert phase is Phase.FORWARD or passes.index((Phase.FORWARD, number)) < passes.index((phase, number))
            most = max(most, held)
        assert most == in_flight(place, stages, micro_batches) == min(stages - place, micro_batches)


# Seconds.


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5])
def test_a_pipeline_is_as_long_as_its_first_micro_batch_and_what_follows_it(devices: int, count: int) -> None:
    """m + P - 1 forwards and as many backwards, and the update."""
    found = played(*[stage((0.5, 1.0), (0.5, 1.0), update=0.25)] * devices, micro_batches=count)
    assert found.seconds == pytest.approx((count + devices - 1) * (1 + 2) + 0.25)
    assert sum(found.moved.values()) == 0


def test_what_is_handed_on_goes_by_way_of_the_host_or_over_links_between_devices() -> None:
    """Of one micro-batch over two devices: in and out by the host, once between devices, in forward and in backward."""
    pair = [stage((1.0, 2.0), handed=0.5)] * 2
    assert played(*pair, micro_batches=1).seconds == pytest.approx(2 * 3 + 2 * (0.5 + 0.5))
    direct = played(*pair, micro_batches=1, peer=2 * RATE)
    assert direct.seconds == pytest.approx(2 * 3 + 2 * 0.25)
    assert direct.moved[Lane.PEER_OUT] == 2 * 0.5 * RATE and direct.moved[Lane.D2H] == 0


@pytest.mark.parametrize("peers", [False, True])
def test_what_moves_of_the_last_micro_batch_under_way_is_waited_for(peers: bool) -> None:
    """One stage, one chunk: backward comes right behind forward, and waits until all has gone and come back."""
    one = moving(stage((1.0, 2.0)), **({"peers": 0.5} if peers else {"host": 0.5}))
    found = played(one, micro_batches=3, peer=RATE)
    assert found.seconds == pytest.approx(3 * (1 + 0.5 + 0.5 + 2))
    ways = (Lane.PEER_OUT, Lane.PEER_IN) if peers else (Lane.D2H, Lane.H2D)
    assert [found.moved[lane] for lane in ways] == [3 * 0.5 * RATE] * 2


def test_on_an_early_stage_it_hides_under_other_micro_batches() -> None:
    """The first of four devices has three micro-batches to compute for in between."""
    plain = [stage((1.0, 2.0))] * 4
    swapping = [moving(plain[0], host=0.9), *plain[1:]]
    assert played(*swapping, micro_batches=8).seconds == pytest.approx(played(*plain, micro_batches=8).seconds)
    slow = [moving(plain[0], host=5.0), *plain[1:]]
    assert played(*slow, micro_batches=8).seconds > 8 * 5.0


def test_only_some_chunks_of_what_moves_are_there_at_a_time() -> None:
    """Six micro-batches through a first stage of 1 s, whose copies take 4 s each way, with nothing behind it.

    Forward k >= 2 waits until what forward k - 2 saved has left, at 1 + 4 (k - 1): the last one begins at 17, and the
    last copy out ends at 25. Backward 1 waits for that (two chunks earlier); from its end, 26, on each copy back
    begins when the one before it ends, for backwards 3 to 5: 26 + 3 * 4, and the last backward.
    """
    count = 6
    first, others = moving(stage((1.0, 1.0)), host=4.0), [stage((0.0, 0.0))] * (count - 1)
    assert played(first, *others, micro_batches=count).seconds == pytest.approx(26 + 3 * 4 + 1)


# What makes no sense.


@pytest.mark.parametrize(("stages", "devices", "micro_batches"), [(1, 2, 1), (2, 1, 1), (2, 2, 0)])
def test_a_stage_on_each_device_and_a_micro_batch(stages: int, devices: int, micro_batches: int) -> None:
    with pytest.raises(ConfigError, match="a stage on each device and one micro-batch or more"):
        pipelined([stage((1.0, 1.0))] * stages, COSTS, Server((0,) * devices, 1.0), micro_batches)


def test_without_links_nothing_goes_to_other_devices() -> None:
    with pytest.raises(ConfigError, match="no links between devices"):
        played(moving(stage((1.0, 1.0)), peers=1.0), micro_batches=1)
