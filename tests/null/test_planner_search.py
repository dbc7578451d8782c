"""The search of ``auto`` beside all plans there are, on chains that are small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain as joined
from itertools import combinations, pairwise, product

import pytest

from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import bench as workbench
from forebay.planners import make_plan
from forebay.planners.bench import Bench
from forebay.planners.parts import DEDICATED, HOSTED, KEPT, RESIDENT, Draft, all_resident
from forebay.planners.search import Search
from forebay.planners.shapes import Filling, filled, options, streamed_through, usual_window
from forebay.plans import Placement, Streaming
from tests.null.planning import ENOUGH, asked, chain, machine

TRACE = chain()
MACHINES = {
    "link-bound": machine(compute=1e11),
    "compute-bound": machine(compute=2e7),
    "balanced": machine(compute=4e8),
    "slow updates": machine(compute=1e11, update=5e7),
}

BLOCK = TRACE.model.blocks[0]
STREAMED = BLOCK.nbytes
"""Bytes of one slot."""

WITHIN = 1.05
"""``auto`` takes at most 5 % longer than the best of all plans."""


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return joined.from_iterable(combinations(names, n) for n in range(len(names) + 1))


@cache
def everything(on: str) -> tuple[tuple[int, float], ...]:
    """(device bytes, seconds of a step) of every placement, recomputation and number of slots."""
    bench = Bench(asked(TRACE, MACHINES[on], device=ENOUGH))
    names = [b.name for b in TRACE.model.blocks]
    found = []
    for homes in product((RESIDENT, DEDICATED, HOSTED), repeat=len(names)):
        placements = tuple(Placement(n, *home) for n, home in zip(names, homes, strict=True))
        streamed = sum(p.parameters is Tier.HOST for p in placements)
        for slots in range(1, streamed + 1) if streamed else (0,):
            for window in (0, BLOCK.gradient_nbytes):
                how = Streaming((STREAMED,) * slots, prefetch_distance=2, gradient_window=window)
                for recompute in subsets(tuple(names)):
                    draft = Draft(placements, how, recompute)
                    found.append((bench.device(draft), bench.seconds(draft)))
    return tuple(found)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("on", MACHINES)
def test_auto_is_close_to_the_best_of_all_plans(on: str) -> None:
    """At twelve budgets from the least that fits to room for everything."""
    all_plans = everything(on)
    least, most = min(n for n, _ in all_plans), max(n for n, _ in all_plans)
    worst = 1.0
    for part in range(13):
        budget = least + (most - least) * part // 12
        best = min(seconds for nbytes, seconds in all_plans if nbytes <= budget)
        plan = make_plan(asked(TRACE, MACHINES[on], device=budget), "auto")
        assert plan.device <= budget and plan.step_seconds is not None
        worst = max(worst, plan.step_seconds / best)
    assert worst <= WITHIN


def test_more_room_is_never_slower_by_much() -> None:
    """Adversarial for a search that goes by rules: every budget is another knapsack."""
    on: Machine = MACHINES["balanced"]
    all_plans = everything("balanced")
    least, most = min(n for n, _ in all_plans), max(n for n, _ in all_plans)
    steps = [
        make_plan(asked(TRACE, on, device=budget), "auto").step_seconds or 0.0
        for budget in range(least, most, (most - least) // 10)
    ]
    assert all(later <= WITHIN * earlier for earlier, later in pairwise(steps))


def test_where_nothing_is_waited_for_fewer_blocks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's memory is so slow that updates there take most of a step, and all that is left of the device has
    gone to blocks that stay: it takes no more than a few simulations to see that they had better not."""
    monkeypatch.setattr(workbench, "SIMULATIONS", 5)
    on = replace(machine(compute=3e9, h2d=3e9, d2h=3e9, update=2e9), device_bandwidth=3e8)
    trace = chain(12, saved=3, activation=1 << 15)
    whole = Bench(asked(trace, on, device=ENOUGH))
    bench = Bench(asked(trace, on, device=int(0.9 * whole.device(all_resident(whole.model)))))
    full = filled(bench, streamed_through(bench, options(bench)[0], usual_window(bench)), Filling())
    assert len(full.resident) == 9 and bench.seconds(full) == pytest.approx(bench.best_rates.step(full))
    best = Search(bench, [KEPT], [[full]]).run(single_blocks=False)
    assert best is not None and not best.resident
    assert bench.seconds(best) < 0.8 * bench.seconds(full)


def test_on_a_card_that_was_measured_a_small_gain_moves_nothing() -> None:
    """What a few percent are predicted to be won by is not worth hooks that no prediction counts. A machine of the
    catalogue is compared with what others plan for it."""
    trace, on = chain(4), replace(machine(), device_bandwidth=4e9)
    problems = {source: asked(trace, replace(on, source=source), device=ENOUGH) for source in ("catalogue", "measured")}
    plans = {source: make_plan(problem, "auto") for source, problem in problems.items()}
    resident = {source: sum(p.resident for p in plan.placements) for source, plan in plans.items()}
    assert resident["catalogue"] < len(trace.model.blocks) == resident["measured"]
    taken = {source: plan.step_seconds or 0.0 for source, plan in plans.items()}
    assert 1.01 * taken["catalogue"] < taken["measured"] <= 1.05 * taken["catalogue"]
