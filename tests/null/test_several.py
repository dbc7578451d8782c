"""Several programs against one clock: closed forms, and what one program alone takes. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError, DoesNotFit
from forebay.lowering import lower
from forebay.machine import Machine
from forebay.planners import make_plan
from forebay.plans import Update
from forebay.program import Action, Program
from forebay.simulation import Costs, Score, alternating, pace, play, side_by_side
from forebay.simulation.several import Rules, SeveralForecast, run_together
from forebay.simulation.sharing import LANES
from forebay.states import Masters
from forebay.timeline import Lane
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.simulating import MACHINE, RATE, compute, fetch, programmed, seconds_trace, update
from tests.null.test_simulation_laws import ANY, TRACE, programs

ALL = Rules(frozenset(LANES))
OWN = Rules(frozenset())


def together(*alone: list[Action], rules: Rules, seconds: float = 1.0, on: Machine = MACHINE) -> SeveralForecast:
    costs = Costs(seconds_trace([seconds]), on, Masters.WHOLE)
    made = [programmed(*actions) for actions in alone]
    return run_together(made, [costs] * len(made), [False] * len(made), rules)


def turns(count: int, nbytes: int) -> list[Action]:
    """A fetch of ``nbytes`` and an op that needs it, so often, with nothing fetched ahead."""
    actions: list[Action] = []
    for _ in range(count):
        before = (len(actions) - 1,) if actions else ()
        actions += [fetch(nbytes, *before), compute(0, len(actions))]
    return actions


# One program.


@given(program=programs(), on=ANY)
@settings(max_examples=12)
@pytest.mark.parametrize("rules", [ALL, OWN], ids=["shared", "own"])
def test_one_program_takes_what_it_takes_alone(rules: Rules, program: Program, on: Machine) -> None:
    costs = Costs(TRACE, on, Masters.WHOLE)
    for settled in (False, True):
        alone = pace(Score.of(program, costs, settled=settled))
        found = run_together([program], [costs], [settled], rules)
        assert found.step_seconds[-1] == pytest.approx(alone[-1], abs=1e-9 * (1 + sum(alone)))
        assert found.seconds == pytest.approx(sum(alone))
    busy = play(program, costs).busy()
    assert all(found.busy[lane] == pytest.approx(busy[lane], abs=1e-9 * (1 + sum(alone))) for lane in LANES)


def test_a_real_step_takes_what_it_takes_alone() -> None:
    trace, on = chain(4), machine(disk=1e8)
    costs = Costs(trace, on, Masters.WHOLE)
    for policy in ("stream", "offload-all", "l2l", "zero-infinity"):
        plan = make_plan(asked(trace, on, device=ENOUGH), policy)
        settled = not plan.streaming.overlap_update
        alone = pace(Score.of(lower(trace, plan, steps=4), costs, settled=settled))
        found = alternating([plan], [costs], 4)
        assert found.step_seconds[-1] == pytest.approx(alone[-1]) and found.seconds == pytest.approx(sum(alone))


# In turns on one device.


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_fetches_of_one_model_hide_under_the_other(share: float) -> None:
    """n layers that fetch for t and compute for c each take n (c + t). Two models in turns, with t no longer than c:
    the device computes from the first fetch to the end, 2 n c + t."""
    count, nbytes = 6, round(share * RATE)
    alone = together(turns(count, nbytes), rules=ALL).seconds
    assert alone == pytest.approx(count * (1 + share))
    both = together(turns(count, nbytes), turns(count, nbytes), rules=ALL)
    assert both.seconds == pytest.approx(2 * count + share)
    assert both.busy[Lane.COMPUTE] == pytest.approx(2 * count)


def test_where_the_link_is_the_slower_it_is_never_idle() -> None:
    count = 6
    both = together(turns(count, 300), turns(count, 300), rules=ALL)
    assert both.seconds == pytest.approx(2 * count * 3 + 1)


def test_whoever_is_ready_first_goes_first_and_then_the_other() -> None:
    """One that waits for nothing does not keep the device from the other: they take turns."""
    busy = [compute(0) for _ in range(5)]
    late = [fetch(150), compute(0, 0), compute(0, 1)]
    found = together(busy, late, rules=ALL)
    # 0-1, 1-2, then the late one's first at 2 (ready since 1.5, before the third at 2), then one each.
    assert found.seconds == pytest.approx(7.0)
    costs = Costs(seconds_trace([1.0]), MACHINE, Masters.WHOLE)
    alone = run_together([programmed(*busy), programmed(*late)], [costs] * 2, [False] * 2, ALL)
    assert alone.step_seconds[1] == pytest.approx(5.0)


def test_two_models_by_their_plans() -> None:
    """Layers that come one at a time, as l2l has them with room for one: in turns they take less than one after the
    other, and no less than what all of their computation takes, or all that crosses."""
    on = machine(h2d=1e8)
    traces = [chain(6), chain(4, activation=16384)]
    plans = []
    for trace in traces:
        with pytest.raises(DoesNotFit) as least:
            make_plan(asked(trace, on, device=1), "l2l")
        plans.append(make_plan(asked(trace, on, device=least.value.needed), "l2l"))
    costs = [Costs(t, on, Masters.WHOLE) for t in traces]
    each = [alternating([plan], [own], 3).seconds for plan, own in zip(plans, costs, strict=True)]
    found = alternating(plans, costs, 3)
    assert max(*each, *found.busy.values()) - 1e-9 <= found.seconds < 0.7 * sum(each)


def test_ops_take_longer_where_models_take_turns() -> None:
    """Two models that compute all the time: so much more for every op, in every step; updates go on meanwhile."""
    trace, more = chain(4), 1e-3
    ops = sum(len(trace.segments[visit.segment].ops) for visit in trace.visits)
    plan = make_plan(asked(trace, machine(), device=ENOUGH), "keep")
    slow = replace(machine(), together_seconds=more)
    quick, longer = (alternating([plan] * 2, [Costs(trace, on, Masters.WHOLE)] * 2, 3) for on in (machine(), slow))
    assert longer.busy[Lane.COMPUTE] - quick.busy[Lane.COMPUTE] == pytest.approx(2 * 3 * ops * more)
    assert longer.seconds >= longer.busy[Lane.COMPUTE]


# Side by side.


def test_links_share_the_channel_equally() -> None:
    """Two copies at once get half of a channel that is as fast as one link; with one of twice that nobody waits. A copy
    of a second, and an op of a second behind it."""
    one = turns(1, 100)
    assert together(one, one, rules=Rules(frozenset(), channel=RATE)).seconds == pytest.approx(3.0)
    assert together(one, one, rules=Rules(frozenset(), channel=2 * RATE)).seconds == pytest.approx(2.0)
    assert together(one, one, one, rules=Rules(frozenset(), channel=RATE)).seconds == pytest.approx(4.0)


def test_in_turns_the_first_has_its_bytes_when_it_would_have_half() -> None:
    """No byte more crosses, but half of the devices compute the earlier: with one layer each, 1 + 1 and 2 + 1 seconds
    in turns, where both take 2 + 1 otherwise."""
    one = turns(1, 100)
    shared, alike = Rules(frozenset({Lane.H2D}), channel=RATE), Rules(frozenset(), channel=RATE)
    assert together(one, one, rules=shared).step_seconds == pytest.approx((2.0, 3.0))
    assert together(one, one, rules=alike).step_seconds == pytest.approx((3.0, 3.0))


def test_in_turns_transfers_hide_under_the_computation_of_the_other() -> None:
    """n layers, each fetched for t = c and computed for c, nothing ahead. Side by side both fetch for 2 t at once and
    then compute: n (2 t + c). In turns one fetches while the other computes: n (t + c), and t more for the second."""
    count = 6
    shared, alike = Rules(frozenset({Lane.H2D}), channel=RATE), Rules(frozenset(), channel=RATE)
    assert together(turns(count, 100), turns(count, 100), rules=alike).seconds == pytest.approx(3.0 * count)
    assert together(turns(count, 100), turns(count, 100), rules=shared).seconds == pytest.approx(2.0 * count + 1.0)


def test_the_host_updates_for_one_after_the_other() -> None:
    host = Rules(frozenset({Lane.UPDATE}))
    assert together([update(100)], [update(100)], rules=host).seconds == 0.0  # no compute, and nobody waits for it
    step = [update(100), compute(0, 0)]
    assert together(step, step, rules=host).step_seconds == pytest.approx((2.0, 3.0))


def test_no_update_before_all_have_computed() -> None:
    """The gradients are exchanged in between."""
    slow = [compute(0), compute(0), update(100, 1), compute(0, 2, step=1)]
    fast = [compute(0), update(100, 0), compute(0, 1, step=1)]
    apart = Rules(frozenset())
    assert together(slow, fast, rules=apart).step_seconds == pytest.approx((2.0, 2.0))
    both = together(slow, fast, rules=replace(apart, synchronised=True))
    assert both.seconds == pytest.approx(4.0) and both.step_seconds == pytest.approx((2.0, 3.0))


@given(count=st.integers(2, 3), in_turns=st.booleans())
@settings(max_examples=6)
def test_with_a_channel_for_all_and_no_host_a_device_is_as_if_alone(count: int, in_turns: bool) -> None:
    trace, on = chain(3), machine()
    costs = Costs(trace, on, Masters.WHOLE)
    plan = make_plan(asked(trace, on, device=ENOUGH), "resident")
    alone = pace(Score.of(lower(trace, plan, steps=3), costs))
    found = side_by_side([plan] * count, costs, 3, channel=count * 1e8, in_turns=in_turns)
    assert found.step_seconds == pytest.approx((alone[-1],) * count)


# What cannot be.


def test_programs_of_several_machines_do_not_run_together() -> None:
    costs = [Costs(seconds_trace([1.0]), replace(MACHINE, name=name), Masters.WHOLE) for name in ("one", "other")]
    program = programmed(compute(0))
    for programs_, own in (([program] * 2, costs), ([], [])):
        with pytest.raises(ConfigError, match="one or more, on one machine"):
            run_together(programs_, own, [False] * len(own), ALL)


def test_gradients_that_are_used_up_cannot_be_exchanged() -> None:
    trace, on = chain(3), machine()
    problem = replace(asked(trace, on, device=ENOUGH), update="backward")
    plan = make_plan(problem, "stream")
    assert plan.updated(Update.BACKWARD)
    with pytest.raises(ConfigError, match="cannot be exchanged"):
        side_by_side([plan] * 2, Costs(trace, on, Masters.WHOLE), 2, channel=1e8, in_turns=True)


@pytest.mark.parametrize("channel", [0.0, -1.0])
def test_a_channel_moves_something(channel: float) -> None:
    with pytest.raises(ConfigError, match="more than 0 bytes/s"):
        Rules(frozenset(), channel)
