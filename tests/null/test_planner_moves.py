"""What a draft moves and the host has no room for stays on the device, as far as that has room."""

from __future__ import annotations

from collections import Counter

import pytest

from forebay.errors import DoesNotFit
from forebay.lowering import Liveness, Profile
from forebay.lowering.lives import Layout
from forebay.memory import Tier
from forebay.planners import Bench, make_plan, search
from forebay.planners.activations.choosing import all_moved
from forebay.planners.moves import TRIES, fewer_moves, one_move_less
from forebay.planners.parts import Draft
from forebay.planners.shapes import options, streamed_through
from tests.null.planning import asked, chain, machine

SIZE = 65536
"""Bytes of each activation."""

BLOCKS, SAVED = 40, 5
"""All that may move is more than what is tried one by one."""


def moving(over: int = 0) -> tuple[Bench, Draft]:
    """Everything streams and everything that is saved moves. The device has ``over`` bytes more than that takes."""
    trace = chain(BLOCKS, saved=SAVED, activation=SIZE)
    ample = Bench(asked(trace, machine(), device=1 << 50))
    draft = streamed_through(ample, options(ample)[-1], 0, all_moved(ample))
    return ample.with_limits(asked(trace, machine(), device=ample.device(draft) + over)), draft


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often lives have been added up."""
    counts = Counter[str]()
    profile = Layout.profile

    def counted(layout: Layout) -> Profile:
        counts["made"] += 1
        return profile(layout)

    monkeypatch.setattr(Layout, "profile", counted)
    return counts


def test_one_move_less_for_each_move() -> None:
    bench, base = moving()
    drafts = list(one_move_less(bench, base))
    assert len(set(drafts)) == len(drafts) == base.streaming.host_activations // SIZE > TRIES
    assert {base.streaming.host_activations - d.streaming.host_activations for d in drafts} == {SIZE}


@pytest.mark.parametrize("stays", [1, 3, 20, 150])
def test_as_much_stays_as_must(stays: int) -> None:
    """The device has room for so many, and the host for all others."""
    bench, base = moving(over=stays * SIZE)
    most = base.streaming.host_activations - stays * SIZE
    first = next(fewer_moves(bench, base, most))
    assert first.streaming.host_activations <= most
    assert bench.fits_device(first)


def test_nothing_stays_where_there_is_no_room(profiles: Counter[str]) -> None:
    """Where nothing more fits, it is found out in so many tries."""
    bench, base = moving()
    before = profiles["made"]
    (least,) = fewer_moves(bench, base, 0)
    assert bench.fits_device(least) and base.streaming.host_activations - least.streaming.host_activations < 8 * SIZE
    assert profiles["made"] - before <= 2 * TRIES


def test_a_plan_keeps_on_the_device_what_the_host_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is drafted asks more of the host than there is, and without looking for moves nothing fits."""
    trace = chain(3, saved=2, activation=1 << 20)
    problem = asked(trace, machine(d2h=1e12), device=5884019, host=9272785)
    plan = make_plan(problem, "auto")
    assert plan.host <= 9272785 and plan.device <= 5884019 and plan.streaming.host_activations
    monkeypatch.setattr(search, "fewer_moves", lambda *_: ())
    with pytest.raises(DoesNotFit):
        make_plan(problem, "auto")


def test_a_host_without_room_for_states_is_refused_soon(profiles: Counter[str]) -> None:
    """What moves is not looked at one by one, again and again: that took minutes, and all memory, for an 8B model whose
    states are more than the host has."""
    trace = chain(BLOCKS, saved=SAVED, activation=SIZE)
    bench, draft = moving()
    states = bench.arenas(draft).host - draft.streaming.host_activations
    with pytest.raises(DoesNotFit) as refusal:
        make_plan(asked(trace, machine(), device=bench.device(draft) + 4 * SIZE, host=states - 1), "auto")
    assert refusal.value.tier == Tier.HOST.value
    assert profiles["made"] <= 2 * TRIES


def test_old_profiles_are_forgotten() -> None:
    """Each holds the bytes of every position: a search that asks for thousands would hold gigabytes."""
    liveness = Liveness(chain(80))
    names = [f"layers.{i}" for i in range(80)]
    first, last = liveness.profile(names[:1]), liveness.profile(names[:2])
    for count in range(3, 66):
        liveness.profile(names[:count])
        assert liveness.profile(names[:2]) is last  # whoever is asked for stays
    again = liveness.profile(names[:1])
    assert again is not first and again == first
