"""Treatments of the first parts of a tensor: what a plan says of them, closed forms of the bytes, what is refused, what
they cost and how they are shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.checking import check
from forebay.compression import encoded_nbytes
from forebay.errors import ConfigError, PlanInvalid
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Kind, Tier
from forebay.plans import Plan
from forebay.program import Program, Verb
from forebay.reporting.plan_rows import plan_rows
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.treatments import Fate, Selection, Split, StandIn, Treatment
from tests.null.programs import device_standing
from tests.null.test_check_transfers import changed, place_of, twice
from tests.null.test_codes_and_disk import EVERY, FIRST, MACHINE, OUT, PAGE, N, chain, planned

HALF, MOST = Split(1, 2), Split(3, 4)


def way(op: int, fate: Fate, split: Split, bits: int = 0) -> Treatment:
    return Treatment("linear", op, fate, bits, split)


@pytest.mark.parametrize(("treated", "parts"), [(0, 2), (2, 2), (3, 2), (-1, 4), (1, 1)])
def test_a_split_treats_some_and_leaves_some(treated: int, parts: int) -> None:
    with pytest.raises(ConfigError, match=f"got {treated} of {parts}; leave the split out to treat all"):
        Split(treated, parts)


def test_what_stays_as_it_is_is_not_split() -> None:
    with pytest.raises(ConfigError, match="stays on the device as it is, in parts or not; leave the split out"):
        way(0, Fate.KEEP, HALF)
    assert way(0, Fate.KEEP, HALF, 8).lossy


@pytest.mark.parametrize(
    ("split", "whole", "part"),
    [(HALF, 8192, 4096), (Split(1, 3), 8192, 2752), (Split(2, 3), 8192, 5504), (HALF, 100, 64), (MOST, 100, 100)],
)
def test_parts_are_whole_cache_lines_of_the_beginning(split: Split, whole: int, part: int) -> None:
    """8,192 / 3 is 2,730.7, which is in the 43rd line of 64 bytes."""
    assert split.nbytes(whole) == part


def test_what_stands_in_for_a_tensor() -> None:
    moved = StandIn.of(way(0, Fate.OFFLOAD, MOST), 8192, "float32")
    assert (moved.moved, moved.rest, moved.made, moved.in_transit) == (6144, 2048, 2048, 8192)
    codes = encoded_nbytes(1536, 4, 4)
    coded = StandIn.of(way(0, Fate.DISK, MOST, 4), 8192, "float32")
    assert (coded.moved, coded.rest, coded.made, coded.in_transit) == (codes, 2048, 2048 + codes, codes)


def test_a_plan_with_parts_goes_to_json_and_back() -> None:
    plan = planned(chain(), way(0, Fate.OFFLOAD, MOST), way(1, Fate.DISK, HALF, 8))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("fate", [Fate.OFFLOAD, Fate.DISK])
def test_between_forward_and_backward_there_is_the_rest(fate: Fate) -> None:
    trace = chain()
    profiles = [Liveness(trace).profile((), s) for s in ((), (Selection(EVERY, (way(0, fate, MOST),)),))]
    plain, profile = (sum(level[p.forward] for level in p.levels.values()) for p in profiles)
    assert plain - profile == N * FIRST * 3 // 4


def test_the_room_elsewhere_is_that_of_the_parts() -> None:
    """5,504 bytes of 8,192 go to disk: two pages."""
    trace = chain()
    plan = planned(trace, way(0, Fate.OFFLOAD, MOST), way(1, Fate.DISK, Split(2, 3)))
    assert plan.streaming.host_activations == N * FIRST * 3 // 4
    assert (plan.streaming.disk_activations, plan.streaming.disk_window) == (N * 2 * PAGE, 2 * PAGE)
    check(trace, MACHINE, plan)


@pytest.mark.parametrize("split", [HALF, MOST, Split(1, 8)], ids=str)
def test_what_each_action_takes_and_leaves(split: Split) -> None:
    """The rest is there from the op on; what leaves is gone as a whole when its part is on the host, and what comes
    back has its whole size from the beginning. The peak: the tensor, its gradient and that of the result."""
    trace = chain((FIRST,), 1)
    plan = planned(trace, way(0, Fate.OFFLOAD, split))
    program = lower(trace, plan)
    rest = FIRST - FIRST * split.treated // split.parts
    for verb, n in {Verb.ENCODE: rest, Verb.OFFLOAD: -FIRST, Verb.RELOAD: FIRST, Verb.DECODE: -rest}.items():
        action = program.actions[place_of(program, verb)]
        assert [c.nbytes for c in action.changes if c.kind is Kind.ACTIVATION] == [n]
    assert Liveness(trace).profile((), plan.activations).with_outputs[1] == FIRST + rest + OUT
    assert device_bound(trace, plan) - device_standing(trace, plan, gradients=True) == 2 * FIRST + OUT
    usage = play(program, Costs(trace, MACHINE, Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak - device_standing(trace, plan) == 2 * FIRST + OUT


@pytest.mark.parametrize(
    ("verb", "spoil", "words"),
    [
        (Verb.ENCODE, twice, "is encoded already"),
        (Verb.ENCODE, lambda p, i: changed(p, i, rest=64), "has other bytes that stay as they are than these 64"),
        (Verb.ENCODE, lambda p, i: changed(p, i, bits=8), "is kept as 0 bits an element, not as 8"),
        (Verb.OFFLOAD, lambda p, i: changed(p, i, nbytes=FIRST), f"has other bytes than the {FIRST} that this moves"),
        (Verb.DECODE, lambda p, i: changed(p, i, after=()), "may not be on the device again when it is decoded"),
    ],
)
def test_what_would_be_lost_is_refused(verb: Verb, spoil: Callable[[Program, int], Program], words: str) -> None:
    trace = chain((FIRST,), 1)
    plan = planned(trace, way(0, Fate.OFFLOAD, HALF), reload_window=FIRST)
    program = lower(trace, plan)
    check(trace, MACHINE, plan, program)
    with pytest.raises(PlanInvalid, match=words):
        check(trace, MACHINE, plan, spoil(program, place_of(program, verb)))


def test_the_rest_is_read_and_written_twice() -> None:
    trace = chain((FIRST,), 1)
    plan = planned(trace, way(0, Fate.OFFLOAD, MOST))
    each = 2 * (FIRST // 4) / MACHINE.device_bandwidth
    program = lower(trace, plan)
    events = play(program, Costs(trace, MACHINE, Masters.WHOLE)).events
    for verb in ("encode", "decode"):
        seconds = [e.end - e.start for e in events if e.what == f"{verb} layers.0 linear#0"]
        assert seconds == pytest.approx([each] * program.steps)
    assert [e.nbytes for e in events if e.what == "offload layers.0 linear#0"] == [FIRST * 3 // 4] * program.steps


def test_a_table_says_which_parts() -> None:
    plan = planned(chain(), way(0, Fate.OFFLOAD, MOST), way(1, Fate.KEEP, HALF, 8))
    words = "1 with 3 of 4 parts to the host, 1 with 1 of 2 parts kept as 8 bits; the rest kept"
    assert [row[-1] for row in plan_rows(plan, {})] == [words]
