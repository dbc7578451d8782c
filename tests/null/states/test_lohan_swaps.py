"""LoHan: the amount of activations that is swapped is the fastest of its steps, and follows what a byte costs."""

from __future__ import annotations

import pytest

from forebay.checking import check
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planners.activations.swapping import swaps
from forebay.planners.homes import at_home
from forebay.planners.shapes import streamed_through, usual_window
from forebay.plans import Plan, Update
from forebay.simulation import simulate
from forebay.treatments import Fate
from tests.null.planning import ENOUGH, asked, chain, machine

LAYERS = 6
TRACE = chain(LAYERS, saved=4, activation=1 << 20)


def made(on: Machine, device: int = ENOUGH, host: int = ENOUGH, disk: int = 0) -> Plan:
    return make_plan(asked(TRACE, on, device=device, host=host, disk=disk), "lohan")


def moved(plan: Plan) -> int:
    return plan.streaming.host_activations + plan.streaming.disk_activations


def test_the_steps_go_from_nothing_to_everything() -> None:
    bench = Bench(asked(TRACE, machine(), device=ENOUGH))
    levels = swaps(bench)
    assert levels[0].recompute == tuple(b.name for b in TRACE.model.blocks) and levels[0].moved == 0
    assert [level.moved for level in levels] == sorted(level.moved for level in levels)
    assert levels[-1].moved >= make_plan(bench.problem, "offload-all").streaming.host_activations > 0


@pytest.mark.parametrize("compute", [1e7, 1e8, 1e9])
def test_it_is_the_fastest_of_its_steps(compute: float) -> None:
    on = machine(compute=compute, h2d=1e9, d2h=1e9)
    wanted = asked(TRACE, on, device=ENOUGH)
    bench, plan = Bench(wanted), made(on)
    check(TRACE, on, plan)
    for level in swaps(bench):
        slots = bench.slot_options(3)[0]
        draft = at_home(bench, streamed_through(bench, slots, usual_window(bench), level))
        assert plan.step_seconds is not None
        assert plan.step_seconds <= bench.exact(draft).step_seconds * (1 + 1e-9)
    assert not any(p.resident for p in plan.placements)


def test_the_slower_the_link_the_less_is_swapped() -> None:
    amounts = [moved(made(machine(compute=1e8, h2d=rate, d2h=rate))) for rate in (1e11, 1e9, 1e7)]
    assert amounts == sorted(amounts, reverse=True) and amounts[0] > amounts[-1]
    assert made(machine(compute=1e8, h2d=1e7, d2h=1e7)).recompute


def test_updates_run_under_backward_where_that_gains() -> None:
    """The update takes about as long as the rest, so that it would hold up the next forward."""
    on = machine(compute=1e8, h2d=1e9, d2h=1e9, update=1e8)
    assert make_plan(asked(chain(8), on, device=ENOUGH), "lohan").updated(Update.AHEAD)


def test_what_the_host_has_no_room_for_goes_to_disk() -> None:
    on = machine(compute=2e7, h2d=1e10, d2h=1e10, disk=1e9)
    host = 20 << 20
    assert made(on).host > host
    plan = made(on, host=host, disk=ENOUGH)
    check(TRACE, on, plan)
    peaks = simulate(TRACE, on, plan).peaks
    assert plan.disk > 0 and peaks[Tier.HOST] <= plan.host <= host


def test_a_refusal_says_what_the_least_is() -> None:
    with pytest.raises(DoesNotFit) as refused:
        made(machine(), 1)
    plan = made(machine(), refused.value.needed)
    assert plan.device <= refused.value.needed


def test_it_has_swapped_what_it_says() -> None:
    plan = made(machine(compute=1e6, h2d=1e11, d2h=1e11))
    fates = {t.fate for s in plan.activations for t in s.treatments}
    assert Fate.OFFLOAD in fates and any("of activations is the fastest of" in reason for reason in plan.reasons)
