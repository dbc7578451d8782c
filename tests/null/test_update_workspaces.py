"""What an update takes on the device beside what it updates: as the planner counts it, and as the checker does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.checking.cells import widened
from forebay.layout import align, state_layout
from forebay.memory import ALIGNMENT
from forebay.model import Parameter
from forebay.planners import make_plan
from forebay.plans import UpdateTime
from forebay.states import FACTORED, MUON, OF_FOREBAY, Masters
from forebay.workspaces import PART, workspace_nbytes
from tests.null.planning import ENOUGH, asked, machine
from tests.null.synthetic import ADAM, block
from tests.null.tracing import Layer, chain_trace

OTHERS = {"momentum": ("momentum_buffer",), "rmsprop": ("square_avg",)}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "drawn"])
@pytest.mark.parametrize("states", [*OF_FOREBAY.values(), *OTHERS.values()], ids=[*OF_FOREBAY, *OTHERS])
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


LION = ("exp_avg",)
SUMS = 4 * (64 + 96)
"""Bytes of a number for each row and each column of a matrix of 64 rows and 96 columns, in fp32."""


@pytest.mark.parametrize(
    ("states", "keeping", "each", "beside"),
    [
        (ADAM, "whole", 4, 0),
        (ADAM, "lower", 4 + 4, 0),
        (ADAM, "drawn", 4 + 4 + 2 * 4, 0),
        (LION, "whole", 4 + 2 * 4, 0),
        (LION, "drawn", 4 + 4 + 2 * 4, 0),
        (OF_FOREBAY["adamw-8bit"], "whole", 4 * (2 + 2 + 2), 0),
        (OF_FOREBAY["adamw-8bit"], "drawn", 4 * (2 + 2 + 2 + 1), 0),
        (FACTORED, "whole", 3 * 4, SUMS + ALIGNMENT),
        (MUON, "whole", 4, 0),
        (MUON, "orthogonal", 4 + 6, 4 * 64 * 64 + 4 * ALIGNMENT),
    ],
)
def test_what_the_checker_has_an_update_widen(states: tuple[str, ...], keeping: str, each: int, beside: int) -> None:
    """A matrix in bf16, a chunk by itself: ``each`` bytes for every element and ``beside`` for all of it."""
    made = block("b", ((64, 96), "bfloat16", True))
    kept = {"drawn": {"master": False}, "orthogonal": {"orthogonal": True}}.get(keeping, {})
    own = replace(made, parameters=tuple(replace(p, **kept) for p in made.parameters))
    layout = state_layout(own, states, 64 * 96, Masters.LOWER if keeping == "lower" else Masters.WHOLE)
    (chunk,) = layout.chunks
    for exactly in (True, False):
        assert widened(chunk, layout, exactly=exactly) == each * 64 * 96 + beside


def test_what_the_checker_has_fp32_widen() -> None:
    """Nothing of what is updated as it is; whole updates of factored states in any case."""
    made = block("b", ((64, 96), "float32", True)).parameters[0]
    for states, nbytes in ((ADAM, 0), (MUON, 0), (FACTORED, 3 * 4 * 64 * 96 + SUMS + ALIGNMENT)):
        assert widen(states, made) == [nbytes]
    assert widen(ADAM, replace(made, master=False)) == [0]


def widen(states: tuple[str, ...], *parameters: Parameter, chunk: int = 1 << 30, exactly: bool = True) -> list[int]:
    """What each chunk of a block of ``parameters`` widens."""
    layout = state_layout(replace(block("b"), parameters=parameters), states, chunk, Masters.WHOLE)
    return [widened(own, layout, exactly=exactly) for own in layout.chunks]


def test_what_the_checker_has_a_chunk_of_several_widen() -> None:
    """Of the largest piece that is rounded by chance; by default as if all elements were widened."""
    first, second = block("b", ((64, 96), "bfloat16", True), ((300,), "float32", True)).parameters
    drawn = replace(first, master=False), second
    assert widen(ADAM, *drawn, chunk=4096) == [2 * 8 * 4096, 2 * 8 * 2048]
    layout = state_layout(replace(block("b"), parameters=drawn), ADAM, 4096, Masters.WHOLE)
    assert widen(ADAM, *drawn, chunk=4096, exactly=False)[1] == 8 * layout.chunks[1].elements + 8 * 2048
    assert layout.chunks[1].elements >= 2048 + 300
    # One parameter after the other.
    assert widen(MUON, replace(first, orthogonal=True), second) == [(4 + 6) * 64 * 96 + 4 * 64 * 64 + 4 * ALIGNMENT]


@pytest.mark.parametrize(
    ("shape", "elements", "sums"),
    [
        ((320,), 320, 0),
        ((2, 8, 16), 256, 2 * (8 + 16)),
        ((6 << 20, 2), PART, (6 << 20) + 2),
        ((2, PART + 64), PART + 64, 2 + PART + 64),
    ],
    ids=["vector", "matrices", "rows", "long rows"],
)
def test_factored_states_widen_a_part(shape: tuple[int, ...], elements: int, sums: int) -> None:
    """Of a part of whole rows gradient, parameter and update, beside sums of all rows and columns."""
    (own,) = block("b", (shape, "bfloat16", True)).parameters
    assert widen(FACTORED, own) == [align(4 * (3 * elements + sums)) + ALIGNMENT]


def test_factored_states_widen_all_that_is_not_in_order_or_made_at_once() -> None:
    rows = 6 << 20
    (own,) = block("b", ((rows, 2), "bfloat16", True)).parameters
    turned = replace(own, stride=(1, rows))
    assert widen(FACTORED, turned) == [align(4 * (3 * 2 * rows + rows + 2)) + ALIGNMENT]
    of_torch = tuple(f"{state}-torch" for state in FACTORED)
    (wide,) = block("b", ((64, 96), "float32", True)).parameters
    (narrow,) = block("b", ((64, 96), "bfloat16", True)).parameters
    assert widen(of_torch, wide) == [4 * 64 * 96 + SUMS + ALIGNMENT]
    assert widen(of_torch, narrow) == [2 * 4 * 64 * 96 + SUMS + ALIGNMENT]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("states", "between"),
    [((), 0), (("exp_avg", "exp_avg_sq"), 0), (("exp_avg",), 2), (("square_avg",), 3), (("exp_avg", "exp_inf"), 3)],
    ids=["sgd", "adamw", "lion", "rmsprop", "adamax"],
)
def test_what_ops_make_in_between(states: tuple[str, ...], between: int, dtype: str) -> None:
    """Numbers for each element of a piece, where no op of torch does all of an update: for the planner and the
    checker."""
    count = 90 * 90
    parts = block("b", ((90, 90), dtype, True))
    layout = state_layout(parts, states, 1 << 22, Masters.WHOLE)
    (chunk,) = layout.chunks
    wide = chunk.elements if dtype == "bfloat16" else 0
    assert workspace_nbytes(layout.streams, count, wide, parts.parameters) == 4 * (wide + between * count)
    assert widened(chunk, layout) == 4 * (wide + between * count)
