"""The account of what is on its way, on programs of a few actions: what counts until when, whatever the timing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forebay.checking.capacity import check_device
from forebay.checking.computing import Left, Made, Moment, Passes
from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.transit import computes_around
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.memory import Kind, Tier
from forebay.program import Action, Change, Program, Verb
from forebay.timeline import Lane
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

STEP = Step(chain_trace([block("a", ((8,), "float32", True))], [Layer("a", (1024,), 0, 512)]))
ENOUGH = 1 << 20


def compute(*after: int) -> Action:
    return Action(Lane.COMPUTE, Verb.COMPUTE, "compute", 0, after=after, peak=ENOUGH)


def land(*after: int) -> Action:
    return Action(Lane.D2H, Verb.LAND, "gradient a.0", 0, after=after)


def back(*after: int) -> Action:
    return Action(Lane.H2D, Verb.RELOAD, "reload", 0, after=after, peak=ENOUGH, tensor=0)


def needed(actions: Sequence[Action], passes: Passes, landed: int, standing: int = 0) -> int:
    """The bytes at the peak, beside what stands; the action of which it is told is the peak's."""
    program = Program(tuple(actions), (), {Tier.DEVICE: {Kind.PARAMETER: standing}}, 1, 1)
    passes.around = computes_around(program)
    parts = STEP, Live(STEP, (), ()), program, Order(program), passes, {(0, 0): landed}, {}
    with pytest.raises(DoesNotFit, match="may be under way") as caught:
        check_device(*parts, standing, standing, ENOUGH, lambda moment: None)
    assert caught.value.needed is not None
    return caught.value.needed - standing


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_reload_has_waited_for_may_be_there_when_compute_goes_on(waits: bool) -> None:
    """A gradient of 1,000 bytes is on its way while a reload of 50 is issued that comes after it, and before compute
    that takes 100. Compute waits for neither: then there may be the gradient still, or what comes back, which has
    waited for it. At the reload there are 500, and not the gradient any more."""
    actions = compute(), land(0), compute(), back(1, 2), compute(*((3,) if waits else ()))
    passes = Passes(
        made=[Made(0, 0, 0, 1000)],
        moments=[Moment(0, 10, -1, 0), Moment(2, 20, -1, 0), Moment(3, 500, -1, 20, then=4), Moment(4, 100, -1, 0)],
        reloads=[(3, 50)],
    )
    # With the wait compute has 100 and the 50 are no longer on their way; the most is the second compute's, or when
    # the reload has yet to start: 20 and the gradient.
    assert needed(actions, passes, landed=1) == (1000 + 20 if waits else 1000 + 100)


def test_what_leaves_counts_from_the_action_that_gives_it_away() -> None:
    """Not in that action, whose own account has it, but in the one after it, unless that waits for the copy."""
    for waits, most in ((False, 300 + 70), (True, 300)):
        out = Action(Lane.D2H, Verb.OFFLOAD, "offload", 0, after=(0,), tensor=0, ops=(0, 0))
        actions = compute(), out, compute(*((1,) if waits else ()))
        moments = [Moment(0, 200, -1, 0), Moment(2, 300, -1, 0)]
        passes = Passes(left=[Left(7, 0, 0, 70)], moments=moments, offloads={(7, 0): 1})
        assert needed(actions, passes, landed=-1) == most
        passes = Passes(left=[Left(7, 0, 0, 70)], moments=moments[::-1], offloads={(7, 0): 1})
        assert needed(actions, passes, landed=-1) == most


@pytest.mark.parametrize(
    ("lane", "verb", "nbytes", "words"),
    [
        (Lane.H2D, Verb.FETCH, -1, "only compute and copies to the host free bytes on the device"),
        (Lane.UPDATE, Verb.UPDATE, -1, "only compute and copies to the host free bytes on the device"),
        (Lane.D2H, Verb.LAND, 1, "only compute and reloads make bytes on the device"),
    ],
)
def test_others_leave_the_device_as_it_is(lane: Lane, verb: Verb, nbytes: int, words: str) -> None:
    other = Action(lane, verb, "other", 0, changes=(Change(Kind.ACTIVATION, nbytes),))
    program = Program((compute(), other), (), {}, 1, 1)
    parts = STEP, Live(STEP, (), ()), program, Order(program), Passes(around=computes_around(program)), {}, {}
    with pytest.raises(PlanInvalid, match=words) as caught:
        check_device(*parts, 0, ENOUGH, ENOUGH, lambda moment: None)
    assert caught.value.action == 1


def test_a_claim_is_what_stands_and_what_is_on_its_way_by_the_programs_own_word() -> None:
    """30 bytes stay of the first compute; 40 come back before the second, which takes 25: one byte less is refused."""
    first = Action(Lane.COMPUTE, Verb.COMPUTE, "first", 0, ops=(0, 1), peak=90, changes=(Change(Kind.ACTIVATION, 30),))
    back = Action(
        Lane.H2D, Verb.RELOAD, "back", 0, after=(0,), peak=40, changes=(Change(Kind.ACTIVATION, 40),), tensor=0
    )
    second = Action(Lane.COMPUTE, Verb.COMPUTE, "second", 0, after=(1,), peak=25)
    program = Program((first, back, second), (), {Tier.DEVICE: {Kind.PARAMETER: 7}}, 1, 1)

    def claimed(nbytes: int, allowed: int) -> None:
        moments = [Moment(0, 90, -1, 0), Moment(2, nbytes, -1, 0)]
        passes = Passes(moments=moments, reloads=[(1, 40)], around=computes_around(program))
        parts = STEP, Live(STEP, (), ()), program, Order(program), passes, {}, {}
        check_device(*parts, 7, allowed, allowed, lambda moment: None)

    claimed(30 + 40 + 25, 7 + 95)
    with pytest.raises(PlanInvalid, match="the device holds 102 bytes while it runs, and 103 may be there") as caught:
        claimed(30 + 40 + 26, ENOUGH)
    assert caught.value.action == 2
    with pytest.raises(DoesNotFit, match="the program says it may hold") as short:
        claimed(10, 7 + 94)
    assert (short.value.needed, short.value.allowed) == (7 + 95, 7 + 94)
