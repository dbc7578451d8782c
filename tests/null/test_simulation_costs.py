"""What ops and actions take alone: closed forms of the roofline and of the links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.calls import Calls
from forebay.errors import ConfigError
from forebay.machine import Curve, Disk, Link, Machine
from forebay.model import Model
from forebay.program import Verb
from forebay.simulation.costs import ADD_TRAFFIC, SUM_TRAFFIC, VIEW_SHARE, Costs, Source
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import NO_SAVES, Op, Phase, Segment, Trace, Visit, Work
from tests.null.simulating import (
    MACHINE,
    RATE,
    accumulate,
    compute,
    fetch,
    flat_link,
    land,
    read,
    seconds_trace,
    update,
    write,
)


def costs_of(*works: Work, machine: Machine = MACHINE) -> Costs:
    trace = replace(
        seconds_trace([]),
        works=works,
        segments=(Segment(tuple(Op(i, (), ()) for i in range(len(works))), (), NO_SAVES),),
    )
    return Costs(trace, machine, Masters.WHOLE)


def test_an_op_takes_the_longer_of_arithmetic_and_memory_and_never_less_than_its_launch() -> None:
    machine = replace(MACHINE, device_kind="cuda", launch_seconds=0.5)  # 1000 FLOP/s, 100 bytes/s
    costs = costs_of(
        Work("mm", "a", "float32", 5000, 100),  # max(5, 1, 0.5)
        Work("add", "b", "float32", 100, 300),  # max(0.1, 3, 0.5)
        Work("add", "c", "float32", 10, 10),  # max(0.01, 0.1, 0.5)
        machine=machine,
    )
    assert [costs.work(i).seconds for i in range(3)] == [5.0, 3.0, 0.5]
    assert {costs.work(i).source for i in range(3)} == {Source.ROOFLINE}
    assert costs.measured_share == 0
    assert costs.arithmetic_seconds == pytest.approx((5000 + 100 + 10) / 1000)


def test_a_view_costs_what_the_host_needs() -> None:
    cost = costs_of(Work("view", "v", "float32", 0, 0), machine=replace(MACHINE, launch_seconds=0.5)).work(0)
    assert (cost.seconds, cost.source) == (VIEW_SHARE * 0.5, Source.HOST)


def test_what_was_measured_goes_before_the_roofline() -> None:
    machine = replace(MACHINE, op_seconds={"a": 0.25})
    costs = costs_of(Work("mm", "a", "float32", 5000, 0), Work("mm", "b", "float32", 750, 0), machine=machine)
    assert (costs.work(0).seconds, costs.work(0).source) == (0.25, Source.MEASURED)
    assert costs.measured_share == 0.25 / (0.25 + 0.75)


def test_on_a_cpu_the_host_and_the_kernel_follow_each_other() -> None:
    works = (Work("mm", "m", "float32", 1, 1), Work("mm", "r", "float32", 1000, 0))
    for kind, seconds in (("cpu", [2.0, 1.125]), ("cuda", [2.0, 1.0])):
        machine = replace(MACHINE, device_kind=kind, launch_seconds=0.125, op_seconds={"m": 2.0})
        costs = costs_of(*works, machine=machine)
        assert [costs.work(i).seconds for i in range(2)] == seconds


def test_every_op_that_is_looked_at_takes_longer() -> None:
    costs = costs_of(Work("mm", "m", "float32", 1000, 0), machine=replace(MACHINE, watch_seconds=0.125))
    assert costs.action(compute(0), watched=True) - costs.action(compute(0)) == 0.125


@pytest.mark.parametrize(
    ("dtype", "rates", "used"),
    [
        ("bfloat16", {"float16": 500.0, "float32": 100.0}, "float16"),
        ("bfloat16", {"float64": 50.0, "float32": 100.0}, "float32"),
        ("float64", {"bfloat16": 500.0, "float32": 100.0}, "float32"),
        ("int32", {"bfloat16": 500.0, "float32": 100.0}, "float32"),  # nothing is near: the slowest
    ],
)
def test_a_dtype_without_a_rate_takes_that_of_the_nearest_and_says_so(
    dtype: str, rates: dict[str, float], used: str
) -> None:
    costs = costs_of(Work("mm", "a", dtype, 1000, 0), machine=replace(MACHINE, compute=rates))
    cost = costs.work(0)
    assert cost.seconds == 1000 / rates[used]
    assert cost.note == f"paper states no rate for {dtype}: that of {used} is used"
    assert costs.notes == (cost.note,)


def test_ops_without_arithmetic_need_no_rate_of_their_dtype() -> None:
    costs = costs_of(Work("embedding", "e", "int64", 0, 100))
    assert (costs.work(0).seconds, costs.notes) == (1.0, ())


def visited(lengths: list[int]) -> tuple[Trace, list[float]]:
    """Visits of two segments in turn, of 3 and of 2 ops, and the seconds of every op."""
    segments = (
        Segment(tuple(Op(i, (), ()) for i in (0, 1, 2)), (), NO_SAVES),
        Segment((Op(2, (), ()), Op(0, (), ())), (), NO_SAVES),
    )
    visits, seconds, of_work = [], list[float](), (1.0, 0.5, 0.25)
    for i in lengths:
        visits.append(Visit(i, "", Phase.FORWARD, (), len(seconds), 0))
        seconds += [of_work[op.work] for op in segments[i].ops]
    works = tuple(Work("op", f"op{i}", "float32", round(1000 * s), 0) for i, s in enumerate(of_work))
    return replace(seconds_trace([]), works=works, segments=segments, visits=tuple(visits)), seconds


def test_ranges_of_ops_add_up_inside_a_visit_and_across_visits() -> None:
    trace, seconds = visited([0, 1, 1, 0, 1])
    costs = Costs(trace, MACHINE, Masters.WHOLE)
    for first in range(len(seconds) + 1):
        for last in range(first, len(seconds) + 1):
            assert costs.ops(first, last) == sum(seconds[first:last]), (first, last)


def test_a_trace_without_ops_costs_nothing() -> None:
    trace = replace(seconds_trace([]), model=Model(()), segments=(), visits=())
    costs = Costs(trace, MACHINE, Masters.WHOLE)
    assert (costs.ops(0, 0), costs.arithmetic_seconds, costs.measured_share) == (0.0, 0.0, 0.0)


def test_actions_take_latency_and_the_rate_for_their_size() -> None:
    link = Link(Curve(((100, 50.0), (300, 150.0))), latency=0.25)
    machine = replace(MACHINE, h2d=link, host_bandwidth=400.0, launch_seconds=2.0)
    costs = Costs(seconds_trace([]), machine, Masters.WHOLE)
    assert costs.action(fetch(200)) == 0.25 + 200 / 100  # half way between the points
    assert costs.action(fetch(0)) == 0
    assert costs.action(land(200)) == 200 / 100
    assert costs.action(accumulate(200)) == 200 / 100 + ADD_TRAFFIC * 200 / 400
    assert costs.action(update(300)) == 300 / 100
    assert costs.action(update(300, lane=Lane.COMPUTE)) == 300 / 100
    assert costs.action(update(10, lane=Lane.COMPUTE)) == 2.0  # a launch
    assert [costs.action(read(50)), costs.action(write(150))] == [0.5, 1.5]


@pytest.mark.parametrize("depth", [1, 2])
def test_checksums_take_time_of_the_lanes_of_the_disk(depth: int) -> None:
    disk = Disk(1 << 40, flat_link(RATE), flat_link(RATE), reads=Calls(64, depth), writes=Calls(64, depth))
    machine = replace(MACHINE, disk=disk, host_bandwidth=400.0)
    costs = Costs(replace(seconds_trace([]), state_names=("exp_avg",)), machine, Masters.WHOLE)
    of_one = {1: 200, 2: 64}[depth]  # bytes: with several calls in flight only those of the last are looked at alone
    for action in (read(200), write(200)):
        assert costs.action(action, summed=True) == 200 / RATE + SUM_TRAFFIC * of_one / 400
        assert costs.action(action) == 200 / RATE
        assert costs.action(replace(action, tensor=3), summed=True) == 200 / RATE  # activations have none
    for action in (fetch(200), land(200), update(200)):
        assert costs.action(action, summed=True) == costs.action(action)
    beside = update(200, lane=Lane.STORAGE_UPDATE)
    more = 2 * SUM_TRAFFIC * costs.states_share * 200 / 400  # read and written there
    assert costs.action(beside, summed=True) == pytest.approx(costs.action(beside) + more)


def test_a_process_beside_the_storage_is_told_and_reads_and_writes_by_turns() -> None:
    disk = Disk(1 << 40, flat_link(RATE), flat_link(RATE))
    slow = replace(disk, alternation=0.5, order_seconds=0.25)
    own = replace(slow, update_rate=50.0)
    trace = replace(seconds_trace([]), state_names=("exp_avg",))
    costs, later, inside = (Costs(trace, replace(MACHINE, disk=one), Masters.WHOLE) for one in (disk, slow, own))
    beside = update(200, lane=Lane.STORAGE_UPDATE)
    moved = 2 * round(costs.states_share * 200) / RATE  # read and written
    assert later.action(beside) == pytest.approx(costs.action(beside) + 0.25 + moved)
    assert later.action(read(50)) == costs.action(read(50))
    assert inside.action(beside) == 200 / 50  # a device inside the disk is no process on the host


@pytest.mark.parametrize(
    ("states", "times"),
    [
        (("exp_avg", "exp_avg_sq"), 1.2),
        ((), 1.2),
        (("exp_avg:8bit", "exp_avg_scale:scale"), 1.04),
        (("exp_avg:4bit", "exp_avg_scale:scale"), 1.1),
        (("exp_avg:bfloat16",), 1.2),
    ],
)
def test_an_update_into_another_copy_takes_longer_than_in_place(states: tuple[str, ...], times: float) -> None:
    costs = Costs(replace(seconds_trace([]), state_names=states), MACHINE, Masters.WHOLE)
    in_place = costs.action(update(300))
    assert costs.action(replace(update(300), apart=True)) == pytest.approx(times * in_place)
    assert costs.action(update(300)) == in_place


@pytest.mark.parametrize(("kind", "bandwidth"), [("cuda", 400.0), ("cpu", 100.0)])
def test_updates_on_the_device_take_its_bandwidth_and_their_way_that_of_the_link(kind: str, bandwidth: float) -> None:
    """On ``cpu`` what is on the device is updated as at home, at 100 bytes/s."""
    slow = Link(Curve(((1, 50.0),)))
    on = replace(MACHINE, device_kind=kind, device_bandwidth=400.0, h2d=slow)
    costs = Costs(seconds_trace([]), on, Masters.WHOLE)
    assert costs.action(update(800, lane=Lane.DEVICE_UPDATE)) == 800 / bandwidth
    assert costs.action(replace(fetch(100), verb=Verb.LOAD)) == 100 / 50
    assert costs.action(replace(land(100), verb=Verb.STORE, changes=())) == 100 / 100


def test_an_action_on_a_disk_that_is_not_there_is_named() -> None:
    costs = Costs(seconds_trace([]), replace(MACHINE, disk=None), Masters.WHOLE)
    with pytest.raises(ConfigError, match=r"needs a disk \(read a\) and machine paper has none"):
        costs.action(read(1))
