"""What a probe learns from small models that stream: arithmetic on their events, and that nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import forebay.device.cpu
from forebay.machine import Curve, Link
from forebay.profiler.capture import capture
from forebay.profiler.effort import CPU_EFFORT
from forebay.profiler.in_step import Rate, Rates, as_in_a_step, lane_rates, rates_of
from forebay.profiler.nominal import typical
from forebay.profiler.overhead import MOVED, MOVING, TINY, attached, close, host_overhead, stream
from forebay.profiler.stopwatch import Stopwatch, WallStopwatch
from forebay.timeline import Event, Lane
from forebay.trace import Phase

MACHINE = typical("cpu", "here", 1 << 30, 1 << 30, 0)


def test_rates_are_bytes_over_busy_seconds() -> None:
    events = (
        Event(Lane.H2D, 0.0, 1.0, 300, "fetch a"),
        Event(Lane.H2D, 5.0, 7.0, 300, "fetch b"),
        Event(Lane.UPDATE, 0.0, 0.5, 100, "update a"),
        Event(Lane.COMPUTE, 0.0, 9.0, 0, "forward"),
        Event(Lane.D2H, 0.0, 0.5, 50, "gradient a"),
        Event(Lane.D2H, 0.5, 1.0, 0, "accumulate a"),  # moves nothing: the copy before it did
        Event(Lane.D2H, 1.0, 5.0, 100, "offload a"),
    )
    assert rates_of(events) == Rates(Rate(200.0, 300), Rate(100.0, 50), Rate(25.0, 100), Rate(200.0, 100))


def test_links_are_as_slow_as_in_the_step_and_keep_the_form_of_their_curve() -> None:
    nbytes = 1 << 20
    alone = MACHINE.h2d.seconds(nbytes)
    found = as_in_a_step(MACHINE, Rates(Rate(nbytes / (2 * alone), nbytes), update=Rate(1e9, nbytes)))
    assert [r for _, r in found.h2d.curve.points] == pytest.approx([r / 2 for _, r in MACHINE.h2d.curve.points])
    assert found.h2d.latency == MACHINE.h2d.latency
    assert (found.d2h, found.update_rate) == (MACHINE.d2h, 1e9)


def test_activations_leave_at_a_rate_of_their_own() -> None:
    nbytes, fast = 1 << 20, Link(Curve(((1 << 20, 1e10),)), latency=0.0)
    assert MACHINE.leaving is MACHINE.d2h
    found = as_in_a_step(replace(MACHINE, offload=fast), Rates(offload=Rate(4e9, nbytes)))
    assert found.leaving.seconds(nbytes) == pytest.approx(nbytes / 4e9)
    assert found.d2h == MACHINE.d2h


def test_what_cores_bind_loses_the_same_share_as_other_updates() -> None:
    machine = replace(MACHINE, update_elements={"exp_avg:float32": 8e9})
    found = as_in_a_step(machine, Rates(update=Rate(machine.update_rate / 4, 1 << 20)))
    assert found.update_elements == {"exp_avg:float32": 2e9}


def test_nothing_is_faster_in_a_step_than_alone() -> None:
    machine, fast = replace(MACHINE, offload=MACHINE.d2h), Rate(1e15, 1 << 20)
    found = as_in_a_step(machine, Rates(fast, fast, fast, fast))
    assert replace(found, shared_cores=machine.shared_cores) == machine


def test_a_model_that_streams_shows_all_lanes_and_leaves_nothing_behind() -> None:
    threads, state = threading.active_count(), torch.get_rng_state()
    rates = lane_rates()
    for found in (rates.h2d, rates.d2h, rates.offload, rates.update):
        assert found is not None and found.rate > 0 and found.nbytes > 0
    assert threading.active_count() == threads
    assert torch.equal(torch.get_rng_state(), state)


class Scripted(Stopwatch):
    """Says 1 s for every sixth run, which is a plain one, 3 s for the streamed ones behind it, 5 s where layers run
    again and 6 s where ops of them are kept, and 4 and 10 s where activations stay and where they move; it runs them
    all."""

    def __init__(self) -> None:
        self.runs = 0
        self._wall = WallStopwatch()

    def seconds(self, work: Callable[[], Any]) -> float:
        self._wall.seconds(work)
        self.runs += 1
        return (1.0, 3.0, 5.0, 6.0, 4.0, 10.0)[(self.runs - 1) % 6]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("inline", [False, True])
def test_the_hosts_part_of_an_op_is_the_step_over_its_ops(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, copies, made_by = Scripted(), forebay.device.cpu._copy_bytes, set[int]()

    def noting(here: Any, *tensors: torch.Tensor) -> None:
        made_by.add(threading.get_ident())
        copies(here, *tensors)

    monkeypatch.setattr(forebay.device.cpu, "_copy_bytes", noting)
    monkeypatch.setattr(forebay.device.cpu, "cores", lambda: torch.get_num_threads() + (not inline))
    found = host_overhead(stopwatch, replace(CPU_EFFORT, rounds=2))
    # Small as they are: what is measured is for those that are handed over to a lane, or would be made inline.
    assert made_by and (threading.get_ident() in made_by) == inline
    assert stopwatch.runs == 6 * (3 + 4 * 2)
    assert found.watch == pytest.approx(2 * found.launch)
    assert 1 / found.launch > 20 * TINY.layers  # ops: a layer has more than twenty
    trace = capture(TINY.model(), (TINY.batch(),), "sgd").trace
    layers = [trace.segments[visit.segment] for visit in trace.visits if visit.block and visit.phase is Phase.FORWARD]
    again, kept = sum(layer.saves_until for layer in layers), 5 * TINY.layers
    assert len(layers) == TINY.layers and again > 20 * TINY.layers
    assert again * (found.launch + found.replay) == pytest.approx(5.0 - 3.0)
    forward = sum(len(trace.segments[visit.segment].ops) for visit in trace.visits if visit.phase is Phase.FORWARD)
    treated = (forward + again - kept) * found.treat - kept * (found.launch + found.replay)
    assert treated == pytest.approx(6.0 - 5.0)
    # 5 tensors a layer, there and back, of layers whose ops nobody sees any more.
    assert 2 * kept * found.handover == pytest.approx(10.0 - 4.0)


def test_what_is_taken_for_transfers_of_activations_are_that() -> None:
    model = MOVING.model()
    model, _ = stream(model, torch.optim.SGD(model.parameters(), lr=0.0), MOVED)
    try:
        model(MOVING.batch()).sum().backward()
        session = attached(model).session
        session.synchronize()
        crossed = [event.what.split()[0] for event in session.measure.collect() if event.lane in (Lane.H2D, Lane.D2H)]
    finally:
        close(model)
    assert crossed.count("offload") == crossed.count("reload") == len(MOVED) * MOVING.layers
