"""The ring on the way to disk and back: bytes are given on when who had them is done, whatever the timing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.checking.order import Order
from forebay.checking.ring import check_ring
from forebay.checking.step import Step
from forebay.checking.treated import Treated
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane
from forebay.treatments import Fate, StandIn
from tests.null.synthetic import block
from tests.null.test_check_transfers import MACHINE, chain, planned, way
from tests.null.tracing import Layer, chain_trace

PAGE = 4096
STEP = Step(chain_trace([block("a", ((8,), "float32", True))], [Layer("a", (2 * PAGE, PAGE, PAGE, PAGE + 1), 0, 512)]))
FIRST, SECOND, THIRD, ODD = sorted(r for r, n in enumerate(STEP.nbytes) if n >= PAGE and STEP.saved[r])[:4]
"""Tensors of two pages, one, one, and one page and a byte."""
WAYS = {root: StandIn(STEP.nbytes[root], STEP.nbytes[root], Fate.DISK, None) for root in (FIRST, SECOND, THIRD, ODD)}


def out(root: int, ring: int, *after: int) -> Action:
    return Action(Lane.D2H, Verb.OFFLOAD, f"offload {root}", 0, after=after, tensor=root, ring=ring)


def write(root: int, ring: int, *after: int) -> Action:
    return Action(Lane.DISK_WRITE, Verb.WRITE, f"write {root}", 0, after=after, tensor=root, ring=ring)


def read(root: int, ring: int, *after: int) -> Action:
    return Action(Lane.DISK_READ, Verb.READ, f"read {root}", 0, after=after, tensor=root, ring=ring)


def back(root: int, ring: int, *after: int) -> Action:
    return Action(Lane.H2D, Verb.RELOAD, f"reload {root}", 0, after=after, tensor=root, ring=ring)


def ring(window: int, *actions: Action) -> None:
    program = Program(actions, (), {}, 1, 1)
    check_ring(STEP, Treated(ways=WAYS), program, Order(program), window)


def test_bytes_are_free_when_they_are_written() -> None:
    ring(2 * PAGE, out(FIRST, 0), write(FIRST, 0, 0), out(SECOND, PAGE, 1), write(SECOND, PAGE, 2))
    for after in ((), (0,)):  # the copy before it on its lane is done, the write may not be
        with pytest.raises(PlanInvalid, match=r"at bytes 4096 to 8192 of the ring, where action 1 \(write") as caught:
            ring(2 * PAGE, out(FIRST, 0), write(FIRST, 0, 0), out(SECOND, PAGE, *after), write(SECOND, PAGE, 2))
        assert (caught.value.action, caught.value.subject) == (2, STEP.name(FIRST))


def test_what_is_left_of_a_place_is_still_taken() -> None:
    """The first page of two is given on as it should be; the second is not free because of that."""
    ways = out(FIRST, 0), write(FIRST, 0, 0), read(SECOND, 0, 1), back(SECOND, 0, 2)
    ring(2 * PAGE, *ways, out(THIRD, PAGE, 1))
    with pytest.raises(PlanInvalid, match=r"bytes 4096 to 8192 of the ring, where action 1") as caught:
        ring(2 * PAGE, *ways, out(THIRD, PAGE))
    assert caught.value.action == 4


def test_bytes_are_free_when_they_are_back() -> None:
    """And those of a read that was made again elsewhere, when it is done."""
    ring(PAGE, read(SECOND, 0), back(SECOND, 0, 0), read(THIRD, 0, 1))
    with pytest.raises(PlanInvalid, match=r"where action 1 \(reload"):
        ring(PAGE, read(SECOND, 0), back(SECOND, 0, 0), read(THIRD, 0))
    ring(2 * PAGE, read(SECOND, 0), read(SECOND, PAGE), back(SECOND, PAGE, 1), read(THIRD, 0))
    with pytest.raises(PlanInvalid, match=r"where action 0 \(read"):
        ring(2 * PAGE, read(SECOND, 0), read(SECOND, PAGE), back(SECOND, PAGE, 1), out(THIRD, 0))


def test_a_place_is_whole_pages_inside_the_ring() -> None:
    ring(2 * PAGE, out(ODD, 0), write(ODD, 0, 0))
    for window, place in ((2 * PAGE - 1, 0), (2 * PAGE, 1), (2 * PAGE, -1)):
        with pytest.raises(
            PlanInvalid, match=f"at bytes {place} to {place + 2 * PAGE} of the ring, which has {window}"
        ):
            ring(window, out(ODD, place), write(ODD, place, 0))
        with pytest.raises(PlanInvalid, match=f"at bytes {place} to {place + 2 * PAGE} of the ring"):
            ring(window, read(ODD, place))
    # Its last byte is on the second page, of which nobody else has a part.
    with pytest.raises(PlanInvalid, match=r"at bytes 4096 to 8192 of the ring, where action 1"):
        ring(2 * PAGE, out(ODD, 0), write(ODD, 0, 0), out(SECOND, PAGE))


def test_only_what_goes_to_disk_is_put_there() -> None:
    trace = chain("a", "b")
    plan = planned(trace, way(Fate.OFFLOAD, 0, "a"), way(Fate.DISK, 0, "b"))
    program = lower(trace, plan, steps=1)
    check(trace, MACHINE, plan, program)
    index = next(i for i, a in enumerate(program.actions) if a.verb is Verb.OFFLOAD and a.block == "a")
    actions = list(program.actions)
    actions[index] = replace(actions[index], ring=0)
    with pytest.raises(PlanInvalid, match=r"the plan does not move tensor .* of block a\) to disk"):
        check(trace, MACHINE, plan, replace(program, actions=tuple(actions)))
    with pytest.raises(PlanInvalid, match="the plan does not move tensor 0 to disk"):
        ring(PAGE, read(0, 0))


def test_what_goes_to_disk_has_a_place() -> None:
    trace = chain("a")
    plan = planned(trace, way(Fate.DISK))
    program = lower(trace, plan, steps=1)
    nowhere = tuple(replace(a, ring=-1) for a in program.actions)
    with pytest.raises(PlanInvalid, match="at bytes -1 to 65535 of the ring"):
        check(trace, MACHINE, plan, replace(program, actions=nowhere))
