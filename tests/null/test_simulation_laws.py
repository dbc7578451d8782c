"""Laws that every play keeps, whatever the program and the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.machine import Curve, Link, Machine
from forebay.memory import Kind, Tier
from forebay.program import Action, Change, Outline, Program, Verb
from forebay.simulation.clock import Clock, Witness
from forebay.simulation.costs import Costs
from forebay.simulation.play import pace, play
from forebay.simulation.score import Score
from forebay.states import Masters
from forebay.timeline import Event, Lane, Timeline
from tests.null.simulating import seconds_trace
from tests.null.strategies import machines

SECONDS = (0.0, 1e-3, 0.5, 2.0)
TRACE = seconds_trace(SECONDS)
STANDING = {Tier.DEVICE: {Kind.PARAMETER: 1000, Kind.BUFFER: 24}, Tier.HOST: {Kind.STATE: 500}}
VERBS = (
    (Lane.COMPUTE, Verb.COMPUTE),
    (Lane.COMPUTE, Verb.UPDATE),
    (Lane.H2D, Verb.FETCH),
    (Lane.D2H, Verb.LAND),
    (Lane.D2H, Verb.ACCUMULATE),
    (Lane.UPDATE, Verb.UPDATE),
    (Lane.DISK_READ, Verb.READ),
    (Lane.DISK_WRITE, Verb.WRITE),
)
INSTANT = 1e-9
"""Relative: what rounding may add to a time that is a sum of hundreds."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Actions on all lanes that wait for any earlier ones. Compute leaves bytes, what lands frees them."""
    count = draw(st.integers(1, 25))
    steps = draw(st.integers(1, min(3, count)))
    actions: list[Action] = []
    for i in range(count):
        lane, verb = draw(st.sampled_from(VERBS))
        after = tuple(draw(st.lists(st.integers(0, i - 1), max_size=3))) if i else ()
        size = draw(st.sampled_from([0, 1, 100, 5000, 1_000_000]))
        op = draw(st.integers(0, len(SECONDS) - 1))
        ops = (op, draw(st.integers(op, len(SECONDS)))) if verb is Verb.COMPUTE else (0, 0)
        peak = draw(st.integers(0, 300)) if verb is Verb.COMPUTE else 0
        freed = min(0, -draw(st.integers(0, 10))) if verb in (Verb.LAND, Verb.ACCUMULATE) else 0
        left = draw(st.integers(0, peak)) + freed
        changes = (Change(Kind.GRADIENT, left),) if left else ()
        nbytes = 0 if verb is Verb.COMPUTE else size
        step = i * steps // count
        actions.append(
            Action(lane, verb, f"{verb} {i}", step, after=after, nbytes=nbytes, ops=ops, peak=peak, changes=changes)
        )
    return Program(tuple(actions), (), STANDING, steps, 1)


def unshared(machine: Machine) -> Machine:
    return replace(machine, duplex=1.0, shared_cores=0.0, host_bandwidth=1e18)


def by_what(timeline: Timeline) -> dict[str, Event]:
    """The event of every action: ``what`` is unique here."""
    return {e.what: e for e in timeline.events if e.lane is not Lane.STALL}


ANY = machines("cpu", disk=True) | machines("cuda", disk=True)


@given(program=programs(), machine=ANY)
def test_lanes_keep_their_order_and_do_one_thing_at_a_time(program: Program, machine: Machine) -> None:
    timeline = play(program, Costs(TRACE, machine, Masters.WHOLE))
    events = by_what(timeline)
    assert len(events) == len(program.actions)
    starts = [e.start for e in timeline.events]
    assert starts == sorted(starts)
    for lane in Lane:
        if lane is not Lane.STALL:
            issued = [a.what for a in program.actions if a.lane is lane]
            assert [e.what for e in timeline.events if e.lane is lane] == issued
            assert all(events[a].end <= events[b].start for a, b in pairwise(issued))
    for action in program.actions:
        event = events[action.what]
        assert event.start <= event.end
        assert all(events[program.actions[i].what].end <= event.start for i in action.after)


@given(program=programs(), machine=ANY)
def test_nothing_is_faster_than_alone_and_waiting_is_all_that_overlap_can_cost(
    program: Program, machine: Machine
) -> None:
    costs = Costs(TRACE, machine, Masters.WHOLE)
    timeline = play(program, costs)
    span = max(e.end for e in timeline.events)
    slack = INSTANT * span
    alone = [costs.action(a) for a in program.actions]
    for action, seconds in zip(program.actions, alone, strict=True):
        event = by_what(timeline)[action.what]
        assert event.end - event.start >= seconds - slack
    assert all(busy <= span + slack for busy in timeline.busy().values())
    # The lanes of a machine do at least the work of one: duplex is 1/2 or more, shared cores conserve work.
    assert span <= sum(alone) + slack


@given(program=programs(), machine=ANY)
def test_compute_is_busy_or_stalls(program: Program, machine: Machine) -> None:
    timeline = play(program, Costs(TRACE, machine, Masters.WHOLE))
    computed = [e.end for e in timeline.events if e.lane is Lane.COMPUTE]
    busy = timeline.busy()
    assert busy[Lane.COMPUTE] + busy[Lane.STALL] == pytest.approx(max(computed, default=0.0))
    assert sum(timeline.step_seconds) == pytest.approx(max(computed, default=0.0))


@given(program=programs(), machine=ANY, factor=st.sampled_from([0.5, 3.0, 1000.0]))
def test_times_scale_with_the_rates(program: Program, machine: Machine, factor: float) -> None:
    def link(old: Link) -> Link:
        return Link(Curve(tuple((n, r * factor) for n, r in old.curve.points)), old.latency / factor)

    disk = machine.disk
    assert disk is not None
    faster = replace(
        machine,
        compute={name: rate * factor for name, rate in machine.compute.items()},
        device_bandwidth=machine.device_bandwidth * factor,
        host_bandwidth=machine.host_bandwidth * factor,
        update_rate=machine.update_rate * factor,
        launch_seconds=machine.launch_seconds / factor,
        watch_seconds=machine.watch_seconds / factor,
        handover_seconds=machine.handover_seconds / factor,
        replay_seconds=machine.replay_seconds / factor,
        treat_seconds=machine.treat_seconds / factor,
        together_seconds=machine.together_seconds / factor,
        h2d=link(machine.h2d),
        d2h=link(machine.d2h),
        offload=machine.offload and link(machine.offload),
        disk=replace(disk, read=link(disk.read), write=link(disk.write)),
    )
    before, after = (by_what(play(program, Costs(TRACE, on, Masters.WHOLE))) for on in (machine, faster))
    span = max(e.end for e in before.values())
    for what, event in before.items():
        assert after[what].end * factor == pytest.approx(event.end, abs=1e-6 * span)


@given(program=programs(), machine=ANY)
def test_sharing_never_makes_anything_earlier(program: Program, machine: Machine) -> None:
    # An accumulation's own time has the host's bandwidth in it: the same for both.
    actions = tuple(replace(a, verb=Verb.LAND) if a.verb is Verb.ACCUMULATE else a for a in program.actions)
    program = replace(program, actions=actions)
    shared, alone = (by_what(play(program, Costs(TRACE, on, Masters.WHOLE))) for on in (machine, unshared(machine)))
    for what, event in alone.items():
        assert shared[what].end >= event.end * (1 - INSTANT)


@given(program=programs(), machine=ANY, data=st.data())
def test_another_dependency_never_makes_anything_earlier(
    program: Program, machine: Machine, data: st.DataObject
) -> None:
    # Where lanes share, it can: what waits leaves the others alone.
    machine = unshared(machine)
    index = data.draw(st.integers(0, len(program.actions) - 1))
    actions = list(program.actions)
    if index:
        more = data.draw(st.integers(0, index - 1))
        actions[index] = replace(actions[index], after=(*actions[index].after, more))
    before = by_what(play(program, Costs(TRACE, machine, Masters.WHOLE)))
    after = by_what(play(replace(program, actions=tuple(actions)), Costs(TRACE, machine, Masters.WHOLE)))
    assert all(after[what].end >= event.end for what, event in before.items())


@given(program=programs(), machine=ANY)
def test_the_account_of_the_device_adds_up(program: Program, machine: Machine) -> None:
    timeline = play(program, Costs(TRACE, machine, Masters.WHOLE))
    usage = timeline.tiers[0]
    standing = sum(STANDING[Tier.DEVICE].values())
    assert usage.live == standing + sum(c.nbytes for a in program.actions for c in a.changes)
    assert sum(usage.at_peak.values()) == usage.peak >= max(usage.live, standing)
    least, most = peak_between(program, timeline)
    assert least <= usage.peak <= most


def peak_between(program: Program, timeline: Timeline) -> tuple[int, int]:
    """The peak counted anew for every compute action: what stands, what had ended when it began, its own peak.

    Two figures, since what ends at that very instant may have come before or after it.
    """
    events = by_what(timeline)
    least = most = sum(STANDING[Tier.DEVICE].values())
    standing = least
    for action in program.actions:
        if action.lane is Lane.COMPUTE:
            start = events[action.what].start
            ended = [(events[a.what].end, c.nbytes) for a in program.actions for c in a.changes if a is not action]
            before = standing + sum(n for end, n in ended if end < start) + action.peak
            least = max(least, before + sum(n for end, n in ended if end == start and n < 0))
            most = max(most, before + sum(n for end, n in ended if end == start and n > 0))
    return least, most


class Onlooker(Witness):
    """Sees everything in the order of time, and says nothing."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def begin(self, index: int) -> None:
        pass

    def ended(self, index: int, end: list[float]) -> None:
        self.instants.append(end[index])

    def mark(self, computing: int) -> None:
        pass


@settings(max_examples=50)
@given(program=programs(), machine=ANY, settled=st.booleans())
def test_lanes_that_run_ahead_of_the_clock_are_where_it_would_have_them(
    program: Program, machine: Machine, settled: bool
) -> None:
    """To the last bit, and so are those that share with others."""
    costs = Costs(TRACE, machine, Masters.WHOLE)
    score, onlooker = Score.of(program, costs, settled=settled), Onlooker()
    ahead, watched = Clock(score), Clock(score, onlooker)
    ahead.run()
    watched.run()
    assert (ahead.start, ahead.end) == (watched.start, watched.end)
    assert onlooker.instants == sorted(watched.end)
    assert pace(score) == play(program, costs, settled=settled).step_seconds


@settings(max_examples=50)
@given(program=programs(), machine=ANY, data=st.data())
def test_a_score_with_others_instead_is_that_of_another_program(
    program: Program, machine: Machine, data: st.DataObject
) -> None:
    costs, actions = Costs(TRACE, machine, Masters.WHOLE), program.actions
    updates = [i for i, action in enumerate(actions) if action.lane is Lane.UPDATE]
    fetches = [i for i, action in enumerate(actions) if action.verb is Verb.FETCH]
    idle = data.draw(st.sets(st.sampled_from(updates))) if updates else set[int]()
    before = {}
    for index in sorted(data.draw(st.sets(st.sampled_from(fetches)))) if fetches else ():
        after = tuple(data.draw(st.lists(st.integers(0, index - 1), max_size=2))) if index else ()
        nbytes = data.draw(st.sampled_from([0, 100, 1_000_000]))
        before[index] = Outline(Lane.H2D, Verb.LOAD, "load", actions[index].step, after, nbytes)
    other, places = list[Action](), list[int]()
    for index, action in enumerate(actions):
        if index in before:
            more = before[index]
            waits = tuple(places[i] for i in more.after)
            other.append(Action(more.lane, more.verb, more.what, more.step, after=waits, nbytes=more.nbytes))
        places.append(len(other))
        waits = () if index in idle else tuple(places[i] for i in action.after)
        other.append(replace(action, after=waits, nbytes=0 if index in idle else action.nbytes))
    score = Score.of(program, costs).instead(idle, before, costs)
    assert pace(score) == pace(Score.of(replace(program, actions=tuple(other)), costs))
