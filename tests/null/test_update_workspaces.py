"""What an update takes on the device beside what it updates: as the planner counts it, and as the checker does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.planners import make_plan
from forebay.plans import UpdateTime
from forebay.states import OF_FOREBAY
from tests.null.planning import ENOUGH, asked, machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "drawn"])
@pytest.mark.parametrize("states", [*OF_FOREBAY.values(), ("momentum_buffer",)], ids=[*OF_FOREBAY, "momentum"])
def test_updates_on_the_device_have_the_room_that_they_are_proven_to_need(
    states: tuple[str, ...], masters: bool, update: UpdateTime
) -> None:
    """Parameters of a few elements, which leave gaps in a chunk, and of many."""
    shapes = ((3,), (33, 70), (5, 7), (300,), (90, 90))
    made = [block(f"b{i}", *[(shape, "bfloat16", True) for shape in shapes]) for i in range(3)]
    trace = chain_trace(made, [Layer(b.name, (2048,) * len(shapes), 0, 1024) for b in made], state_names=states)
    trace = trace if masters else replace(trace, model=trace.model.without_masters())
    on = machine()
    problem = replace(asked(trace, on, device=ENOUGH, states=states), update=update)
    for policy in ("resident", "recompute", "stream"):
        plan = make_plan(problem, policy)
        check(trace, on, plan)
        if policy != "stream":
            tight = replace(problem, budget=replace(problem.budget, device=plan.device))
            check(trace, on, make_plan(tight, policy))
