"""One step out of a timeline, and what of a timeline a run keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.memory import Kind, Tier
from forebay.reporting.chart_data import lane_data, loss_data, memory_data, thinned
from forebay.reporting.losses import StepLine
from forebay.reporting.steps import for_keeping, last_step, seen_step, typical_step
from forebay.timeline import Event, Lane, Timeline
from tests.null.reported import LOSSES, REPORT, MiB, measured, predicted, step_events


def test_where_steps_begin_and_end() -> None:
    assert measured().steps() == ((100.0, 102.0), (103.0, 105.0))
    assert predicted().steps() == ((0.0, 2.0), (2.0, 4.0))
    assert Timeline((), ()).steps() == ()


def test_the_last_step_of_a_prediction_counts_from_its_start() -> None:
    step = last_step(predicted())
    assert step is not None
    assert (step.number, step.seconds) == (1, 2.0)
    assert step.events == step_events(0.0)
    held = [
        (level.time, level.live.get(Kind.ACTIVATION, 0) // MiB, level.high // MiB) for level in step.levels[Tier.DEVICE]
    ]
    # What held when it began is its first level, and no more than that was held then.
    assert held == [(0.0, 0, 2), (1.0, 4, 7), (2.0, 0, 6)]
    assert last_step(Timeline((), ())) is None


def test_an_event_that_reaches_over_is_cut_with_its_bytes() -> None:
    late = Event(Lane.UPDATE, 1.5, 2.5, 8 * MiB, "update late")
    step = last_step(replace(predicted(), events=(late, Event(Lane.H2D, 0.0, 1.0, MiB, "before"))))
    assert step is not None
    assert step.events == (Event(Lane.UPDATE, 0.0, 0.5, 4 * MiB, "update late"),)
    assert step.moved()[Lane.UPDATE] == 4 * MiB and step.busy()[Lane.UPDATE] == 0.5


def test_the_typical_step_is_near_the_median_and_not_the_first() -> None:
    starts, seconds = (0.0, 10.0, 20.0, 30.0), (2.0, 5.0, 2.5, 2.5)
    events = tuple(Event(Lane.COMPUTE, start, start + 1, 0, "forward") for start in starts)
    found = typical_step(Timeline(events, (), seconds, {}, (), starts))
    assert found is not None and found.number == 3  # the later of two that are as near
    one = typical_step(Timeline(events[:1], (), seconds[:1], {}, (), starts[:1]))
    assert one is not None and one.number == 0
    # The events of the first steps are forgotten.
    late = typical_step(Timeline(events[3:], (), (2.5, 2.5, 2.5, 9.0), {}, (), starts))
    assert late is not None and late.number == 3
    assert typical_step(Timeline((), (), seconds)) is None


def test_the_seen_step_is_the_one_with_levels() -> None:
    step = seen_step(measured())
    assert step is not None and step.number == 1
    assert [level.time for level in step.levels[Tier.DEVICE]] == [0.0, 1.0, 2.0]
    assert [level.live for level in step.levels[Tier.HOST]] == [{Kind.STATE: 24 * MiB}]
    assert seen_step(replace(measured(), levels=())) is None


def test_a_run_keeps_the_events_of_whole_last_steps() -> None:
    timeline = measured()
    assert for_keeping(timeline, 8) is timeline
    for most in (7, 5, 4):
        assert for_keeping(timeline, most).events == timeline.events[4:]
    # A step that has more by itself is cut.
    assert for_keeping(timeline, 2).events == timeline.events[6:]
    assert for_keeping(timeline, 4).steps() == timeline.steps()


def test_shares_are_of_the_time_that_events_cover() -> None:
    assert REPORT.seen_seconds == REPORT.elapsed == 5.0
    assert REPORT.busy_shares()[Lane.UPDATE] == pytest.approx(1.0 / 5.0)
    kept = replace(REPORT, timeline=for_keeping(REPORT.timeline, 4))
    assert kept.seen_seconds == 2.0
    assert kept.busy_shares()[Lane.UPDATE] == pytest.approx(0.5 / 2.0)


def test_many_events_become_few_that_move_the_same_bytes() -> None:
    events = tuple(Event(Lane.H2D, i / 1000, (i + 0.5) / 1000, 10, f"fetch {i}") for i in range(1000))
    assert thinned(events, 1.0, 1000) == events
    few = thinned(events, 1.0, 100)
    assert 5 <= len(few) <= 100
    assert sum(event.nbytes for event in few) == 10_000
    assert few[0].start == 0.0 and few[-1].end == events[-1].end
    assert few[0].what.endswith(" events")


def test_losses_are_means_where_there_are_many() -> None:
    found = loss_data(LOSSES, 320, 100.0)
    assert found == {"xs": [1, 2], "loss": [5.5, 5.25], "speed": [128.0, 160.0], "predicted": 100.0, "mean_of": 1}
    many = tuple(StepLine(i + 1, None if i == 4001 else float(i % 2), 0.1) for i in range(4002))
    found = loss_data(many, 320, None)
    assert (found["mean_of"], len(found["xs"]), found["xs"][-1]) == (3, 1334, 4002)
    assert found["loss"][:2] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert set(found["speed"]) == {None}  # nobody kept the seconds
    assert loss_data((StepLine(1, None, 0.1),), None, None)["loss"] == [None]


def test_memory_and_lanes_are_columns() -> None:
    step = last_step(predicted())
    assert step is not None
    found = memory_data(step.levels, step.seconds, seen_step(measured()), {Tier.DEVICE: 8 * MiB})
    device, host = found["tiers"]
    assert (device["name"], device["limit"]) == ("device", 8 * MiB)
    assert device["predicted"]["kinds"] == {"parameter": [2 * MiB] * 3, "activation": [0, 4 * MiB, 0]}
    assert device["measured"]["high"] == [2 * MiB, 6 * MiB, 4 * MiB]
    assert "predicted" not in host and host["measured"]["kinds"] == {"state": [24 * MiB]}
    lanes = lane_data(step, typical_step(measured()))
    assert lanes["names"] == ["compute", "h2d", "update"]
    assert lanes["predicted"]["events"] == lanes["measured"]["events"]
    first = lanes["measured"]["events"][0]
    assert (first[:4], lanes["words"][first[4]]) == ([1, 0.0, 0.5, 2 * MiB], "fetch embed")
