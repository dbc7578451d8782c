"""Plans in which gradients may be used up: less of the host for all that streams, and more slots where a step gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from forebay.arenas import gradient_nbytes
from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.figures import with_figures
from forebay.machine import Machine
from forebay.model import Model
from forebay.planners import INEXACT, PLANNERS, Bench, Problem, make_plan
from forebay.planners.in_backward import FEWEST, Usable, passed, searched, slots_of
from forebay.planners.parts import Draft, all_resident
from forebay.plans import Plan, Streaming, Update, UpdateTime, used_up
from forebay.units import format_seconds
from tests.null.passing import run_late
from tests.null.planning import ENOUGH, asked, chain, lopsided, machine
from tests.null.synthetic import block, problem

pytestmark = pytest.mark.usefixtures("short_searches")

N = 12
ELEMENTS = 2 * 64 * 64
GRADIENTS = 4 * ELEMENTS
"""Bytes of the gradients of one block, in fp32."""

TRACE = chain(N, saved=2)
QUICK = machine(compute=4e8, h2d=1e9, d2h=1e9, update=1e10)
SLOW = machine(compute=4e8, h2d=1e9, d2h=1e9, update=2e8)
EVEN = machine(compute=1.2e9, h2d=1.5e8, d2h=1.5e8, update=7e8)
"""Neither the host, nor a link, nor the device waits much."""


def allowed(on: Machine = QUICK, *, host: int = ENOUGH) -> Problem:
    """Something that streams: the device has room for little more than three blocks and what a step makes."""
    return replace(asked(TRACE, on, device=400_000, host=host), update="backward")


def gradients(plan: Plan) -> int:
    """Bytes of gradients on the host: of slots, and of blocks that keep theirs."""
    kept = {p.block for p in plan.placements if not p.resident} - set(plan.updated(Update.BACKWARD))
    return sum(plan.streaming.gradient_slots) + sum(gradient_nbytes(TRACE.model.block(name)) for name in kept)


@pytest.mark.parametrize("policy", ["stream", "auto", "zero-infinity", "lohan"])
def test_every_policy_uses_them_up_where_it_may(policy: str) -> None:
    problem = allowed()
    plan, other = make_plan(problem, policy), make_plan(replace(problem, update="step"), policy)
    assert plan.updated(Update.BACKWARD) == tuple(p.block for p in plan.placements)
    assert used_up(plan.placements, resident=False)
    assert not plan.updated(Update.AHEAD) and not plan.updated(Update.DEVICE)
    assert gradients(plan) == FEWEST * GRADIENTS < gradients(other)
    assert any("updated in backward, which uses their gradients up: 3 slots" in reason for reason in plan.reasons)
    check(TRACE, QUICK, plan)
    assert not other.updated(Update.BACKWARD) and not other.streaming.gradient_slots


def test_what_fits_by_it() -> None:
    """All gradients but those of the slots are spared, and a host that is as much smaller is enough."""
    room = make_plan(allowed(), "zero-infinity").host
    plan = make_plan(allowed(host=room), "zero-infinity")
    assert plan.host <= room
    with pytest.raises(DoesNotFit, match="host memory"):
        make_plan(replace(allowed(host=room), update="step"), "zero-infinity")
    with pytest.raises(DoesNotFit, match="host memory"):
        make_plan(allowed(host=room - 1), "zero-infinity")


def test_more_slots_where_a_step_gains_by_them() -> None:
    """Where blocks differ, backward waits for a slot while a large one is updated. None that cost more than they gain,
    and none that there is no room for."""

    def on(machine: Machine, host: int = ENOUGH) -> Problem:
        return replace(asked(lopsided(), machine, device=1_000_000, host=host), update="backward")

    few, many = make_plan(on(QUICK), "stream"), make_plan(on(EVEN), "stream")
    assert len(few.streaming.gradient_slots) == FEWEST < len(many.streaming.gradient_slots)
    bench = Bench(on(EVEN))
    least = replace(Draft.of(many), streaming=replace(many.streaming, gradient_slots=few.streaming.gradient_slots))
    assert bench.seconds(Draft.of(many)) < 0.99 * bench.seconds(least)
    host = many.host - min(many.streaming.gradient_slots)
    tight = make_plan(on(EVEN, host), "stream")
    assert tight.host <= host
    assert FEWEST <= len(tight.streaming.gradient_slots) < len(many.streaming.gradient_slots)
    assert tight.step_seconds is not None and many.step_seconds is not None
    assert tight.step_seconds > many.step_seconds


def test_what_binds_is_said_of_the_step_with_its_own_slots() -> None:
    """A search goes through drafts with more slots than the plan has in the end, whose step is longer."""
    problem = replace(asked(TRACE, EVEN, device=800_000, host=ENOUGH), update="backward")
    plan = make_plan(problem, "auto")
    assert len(plan.streaming.gradient_slots) < searched(problem) and plan.step_seconds is not None
    (said,) = [reason for reason in plan.reasons if " binds: busy " in reason]
    assert f"of a step of {format_seconds(plan.step_seconds)}" in said


def test_a_step_of_it_has_one_backward() -> None:
    plan = make_plan(allowed(), "stream")
    told = with_figures(TRACE, QUICK, plan)
    assert told.step_seconds == plan.step_seconds and told.micro_batch_seconds is None
    assert told.seconds_of_step(2) is None


def test_the_slots_of_blocks_that_differ() -> None:
    """One for the largest, the others of the size that most have."""
    head = block("head", ((64, 128), "float32", True))
    layers = [block(f"b{i}", ((64, 64), "float32", True), ((64,), "float32", False)) for i in range(4)]
    assert slots_of([head, *layers]) == (64 * 128 * 4, 64 * 64 * 4, 64 * 64 * 4)
    assert slots_of(layers[:2]) == (64 * 64 * 4,) * 2
    assert slots_of([head, *layers], 9) == (64 * 128 * 4, *(64 * 64 * 4,) * 4)
    assert slots_of([]) == ()


def test_what_stays_lets_its_gradients_go() -> None:
    """Of the device less by the gradients of all blocks but one, and where activations are most those of none are there
    yet; nothing of the host."""
    problem = replace(allowed(), budget=replace(allowed().budget, device=ENOUGH))
    plan, other = (make_plan(replace(problem, update=update), "resident") for update in get_args(UpdateTime)[::-1])
    assert plan.updated(Update.BACKWARD) == tuple(p.block for p in plan.placements)
    assert not plan.streaming.gradient_slots and plan.host == other.host == 0
    assert (N - 1) * GRADIENTS <= other.device - plan.device <= N * GRADIENTS
    assert plan.step_seconds == pytest.approx(other.step_seconds)
    words = f"{N} of {N} blocks stay on the device and are updated there in backward: of their gradients 32.0 KiB at"
    assert any(words in reason for reason in plan.reasons)
    check(TRACE, QUICK, plan)


def test_blocks_stay_for_which_there_was_no_room() -> None:
    """What gradients leave is given to more blocks, and a step is no slower."""
    plan, other = make_plan(allowed(SLOW), "auto"), make_plan(replace(allowed(SLOW), update="step"), "auto")
    assert sum(p.resident for p in plan.placements) > sum(p.resident for p in other.placements)
    assert plan.device <= allowed().budget.device


def test_an_update_that_takes_much_waits_for_its_step() -> None:
    """Beside activations a workspace costs what it takes, and gradients that wait cost what they have."""
    blocks = [block(f"b{i}", ((size,), "float32", True)) for i, size in enumerate((100, 100, 400))]
    staying = all_resident(Model(tuple(blocks))).placements
    draft = Draft(staying, Streaming())
    able = Usable(there=frozenset({"b0", "b1", "b2"}))

    def early(*workspaces: int) -> tuple[str, ...]:
        taken = dict(zip(("b0", "b1", "b2"), workspaces, strict=True))
        return passed(Model(tuple(blocks)), draft, able, taken).updated(Update.BACKWARD)

    assert early(0, 0, 0) == ("b0", "b1", "b2")
    assert early(0, 0, 1600) == ("b0", "b1", "b2")  # the gradient of b2 has as many
    assert early(0, 0, 1601) == ("b0", "b1")
    assert early(300, 300, 5000) == ("b0", "b1")
    assert early(801, 801, 5000) == ()
    assert early(2401, 2401, 2401) == ()


@pytest.mark.parametrize("policy", INEXACT)
def test_updates_at_once_are_no_late_ones_and_none_elsewhere(policy: str) -> None:
    with pytest.raises(CannotServe, match=f"policy {policy} .*update='backward'.*What would fit: policy (zero|angel)-"):
        make_plan(allowed(), policy)
    assert policy in PLANNERS


WRONG: dict[str, tuple[Callable[[], Problem], str]] = {
    "no batch": (
        lambda: replace(problem([block("b", ((8,), "float32", True))], device=1 << 20), update="backward"),
        "needs to know when gradients are made .*; give a batch",
    ),
    "micro-batches": (lambda: replace(allowed(), micro_batches=4), "one backward a step, got 4 micro-batches"),
    "unknown": (lambda: replace(allowed(), update="later"), "update must be step or backward, got 'later'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how", WRONG)
def test_what_cannot_be_asked(how: str) -> None:
    make, words = WRONG[how]
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_host_that_is_too_small_is_told_of_it() -> None:
    """The bytes that are named are those of the plan."""
    needed = make_plan(allowed(), "zero-infinity").host
    with pytest.raises(DoesNotFit, match="update='backward', where nobody clips gradients or reads them") as refused:
        make_plan(replace(allowed(host=needed), update="step"), "zero-infinity")
    remedy = next(remedy for remedy in refused.value.nearest if remedy.what == "update")
    assert remedy.needed == needed
    assert make_plan(allowed(host=remedy.needed), "zero-infinity").host == needed
    for wanted in (replace(allowed(host=needed - 1), update="step"), allowed(host=needed - 1)):
        with pytest.raises(DoesNotFit) as refused:
            make_plan(wanted, "zero-infinity")
        assert all(remedy.what != "update" for remedy in refused.value.nearest)


def test_a_search_has_the_slots_that_there_is_room_for() -> None:
    """With three, a draft whose updates on the host take long looks slower than it is with as many as it needs: more
    host memory then gave a slower plan."""
    largest = max(map(gradient_nbytes, TRACE.model.blocks))
    for host, expected in ((1, FEWEST), (4 * largest * 5, 5), (ENOUGH, N)):
        assert searched(allowed(SLOW, host=host)) == expected
        early = Bench(allowed(SLOW, host=host)).known.early
        assert early is not None and early.count == expected
    assert Bench(replace(allowed(SLOW), update="step")).known.early is None
    seconds = []
    least = make_plan(allowed(SLOW), "zero-infinity").host // 2
    for host in (2 * least, 4 * least, ENOUGH):
        plan = make_plan(allowed(SLOW, host=host), "auto")
        assert plan.host <= host and plan.step_seconds is not None
        seconds.append(plan.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_where_many_slots_do_not_fit_few_may() -> None:
    """The least host that few slots ask for is enough, though a quarter of it has room for more."""
    room = make_plan(allowed(), "stream").host
    plan = make_plan(allowed(host=room), "stream")
    assert len(plan.streaming.gradient_slots) == FEWEST < searched(allowed(host=room))
    assert plan.host == room


@pytest.mark.parametrize("policy", ["recompute", "chen", "stream-recompute", "auto"])
def test_what_runs_again_behind_its_gradients_waits_for_the_step(policy: str) -> None:
    """A module called twice, first for what is frozen of it: its recomputation comes after its last gradient."""
    trace = run_late()
    plan = make_plan(replace(asked(trace, QUICK, device=ENOUGH, host=ENOUGH), update="backward"), policy)
    assert plan.updated(Update.BACKWARD) == ("b",)
    check(trace, QUICK, plan)
