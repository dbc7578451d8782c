"""How much is done to plan a long model: counted, because seconds depend on the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from forebay.planners import Bench, Problem, make_plan
from forebay.planners.activations.chain import Programme
from forebay.planners.activations.choosing import drafted, leanest
from forebay.planners.bench import ACTIONS, SIMULATIONS_LEAST
from forebay.planning import predict
from forebay.plans import Plan
from tests.null.planning import ENOUGH, asked, chain, machine

BLOCKS = 80
PROGRAMMES = 40
"""Linear programmes that a plan may take: some tries for each of a few ways to round."""

COUNTED = ("sketch", "lower", "play", "pace", "check")


def long_problem(blocks: int = BLOCKS) -> Problem:
    """A chain in which activations move, because nothing else fits: with room for a third of what it keeps."""
    trace = chain(blocks, activation=1 << 16)
    bench = Bench(asked(trace, machine(), device=ENOUGH))
    assert bench.liveness is not None
    return asked(trace, machine(), device=bench.liveness.profile().peak // 3)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function was called."""
    found: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            found[name] += 1
            return function(*args, **more)

        return called

    import forebay.planners.bench as workbench
    import forebay.planners.device_updates as device_updates

    for name in COUNTED:
        monkeypatch.setattr(workbench, name, counting(name, getattr(workbench, name)))
    monkeypatch.setattr(device_updates, "pace", counting("pace", device_updates.pace))
    monkeypatch.setattr(Programme, "solution", counting("solution", Programme.solution))
    return found


def planned(problem: Problem) -> tuple[Bench, Plan]:
    bench = Bench(problem)
    return bench, make_plan(problem, "auto", bench)


def test_a_long_model_is_simulated_a_few_times_and_proven_once(counts: Counter[str]) -> None:
    bench, plan = planned(long_problem())
    assert bench.is_long and plan.activations
    # Each draft that is compared is sketched and paced; the one that is taken is lowered, played and proven as it runs.
    # What would change about a draft is asked of the program that it has: three such questions.
    assert counts["sketch"] == bench.simulated <= counts["pace"] <= bench.simulated + 3
    assert (counts["lower"], counts["play"], counts["check"]) == (1, 1, 1)
    assert counts["solution"] <= PROGRAMMES
    each = bench.actions / bench.simulated
    assert SIMULATIONS_LEAST <= bench.simulated <= max(SIMULATIONS_LEAST, ACTIONS / each) + 4
    # What has been proven and played is not done again for the report.
    before = Counter(counts)
    assert bench.problem.trace is not None and bench.problem.machine is not None
    timeline, forecast = predict(bench.problem.trace, bench.problem.machine, plan, bench)
    assert counts == before
    assert forecast.step_seconds == plan.step_seconds == timeline.step_seconds[-1]


def test_actions_grow_with_the_blocks_and_no_faster() -> None:
    """A program of twice the blocks has twice the actions: nothing that is written down depends on all the others."""
    per_block = []
    for blocks in (40, 80):
        bench = Bench(long_problem(blocks))
        bench.seconds(next(draft for draft in drafted(bench, leanest(bench)) if draft.activations))
        per_block.append(bench.actions / blocks)
    assert per_block[1] == pytest.approx(per_block[0], rel=0.1)
