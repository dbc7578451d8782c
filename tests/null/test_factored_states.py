"""States of whole parameters, a number for each row and each column: how they lie, what they take, what they cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.arenas import Sizer
from forebay.checking import check
from forebay.errors import ForebayError
from forebay.layout import MASTER, align, chunk_elements, has_stream, state_layout, states_nbytes
from forebay.model import Block, Model, Parameter
from forebay.planners import make_plan
from forebay.simulation.costs import Costs
from forebay.simulation.update_rates import FACTORED
from forebay.states import MUON, Masters, Reach, Shape, element_nbytes, form_of, is_fp32, is_wide, masters_for, reach_of
from forebay.workspaces import PART, workspace_nbytes
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.simulating import MACHINE, seconds_trace

OWN = ("row_var:rows", "col_var:columns", "variance:vector")
TORCH = ("row_var:rows-torch", "col_var:columns-torch", "variance:vector-torch")
TRANSFORMERS = ("exp_avg", "exp_avg_sq_row:rows-flat", "exp_avg_sq_col:columns-flat", "exp_avg_sq:vector-torch")


def parameter(name: str, shape: tuple[int, ...], dtype: str = "float32", offset: int = 0) -> Parameter:
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return Parameter(name, shape, stride, dtype, prod(shape) * (4 if dtype == "float32" else 2), offset, True)


def block(*shapes: tuple[int, ...], dtype: str = "float32") -> Block:
    made, end = list[Parameter](), 0
    for number, shape in enumerate(shapes):
        made.append(parameter(f"p{number}", shape, dtype, end))
        end += align(made[-1].nbytes)
    return Block("b", tuple(made), ("b",), end)


@pytest.mark.parametrize(
    ("shape", "torchs", "flat"),
    [
        ((3, 5), ((3, 1), (1, 5), None), ((3,), (5,), None)),
        ((2, 3, 5, 7), ((2, 3, 5, 1), (2, 3, 1, 7), None), ((2, 3, 5), (2, 3, 7), None)),
        ((5,), (None, None, (5,)), (None, None, (5,))),
        ((), (None, None, ()), (None, None, ())),
    ],
)
def test_shapes(shape: tuple[int, ...], torchs: object, flat: object) -> None:
    for states in (OWN, TORCH):
        assert tuple(form_of(state).shape_for(Shape(shape)) for state in states) == torchs
    assert tuple(form_of(state).shape_for(Shape(shape)) for state in TRANSFORMERS[1:]) == flat
    own = parameter("p", shape)
    for states, shapes in ((TORCH, torchs), (TRANSFORMERS[1:], flat)):
        assert isinstance(shapes, tuple)
        assert states_nbytes(states, own) == 4 * sum(prod(one) for one in shapes if one is not None)
        assert [has_stream(state, own) for state in states] == [one is not None for one in shapes]


def test_what_they_are() -> None:
    assert reach_of(OWN) is Reach.PARTS
    assert reach_of(TORCH) is Reach.WHOLES and reach_of(TRANSFORMERS) is Reach.WHOLES
    assert is_fp32(TRANSFORMERS) and not is_wide(TRANSFORMERS) and not is_fp32(("exp_avg:8bit", "exp_avg_scale:scale"))
    assert element_nbytes(TORCH) == 0 and element_nbytes(TRANSFORMERS) == 4
    # A state with that name and another form says nothing about the halves of a master.
    assert masters_for(TRANSFORMERS, ["bfloat16"]) is Masters.WHOLE
    with pytest.raises(ForebayError, match="values of whole parameters"):
        form_of("row_var:rows").count(10)


SHAPES = st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple), min_size=1, max_size=6)


@given(SHAPES, st.sampled_from([OWN, TORCH, TRANSFORMERS, MUON]), st.sampled_from(["float32", "bfloat16"]))
def test_chunks_have_whole_parameters(shapes: list[tuple[int, ...]], states: tuple[str, ...], dtype: str) -> None:
    """As many as fit, in their order; no two streams of any two share a byte."""
    made = block(*shapes, dtype=dtype)
    made = replace(made, parameters=tuple(replace(p, orthogonal=len(p.shape) == 2) for p in made.parameters))
    layout = state_layout(made, states, 1024, Masters.WHOLE)
    pieces = [piece for chunk in layout.chunks for piece in chunk.pieces]
    assert [piece.parameter for piece in pieces] == list(made.parameters)
    assert all((piece.start, piece.stop) == (0, piece.parameter.numel) for piece in pieces)
    for chunk in layout.chunks:
        assert chunk.elements <= chunk_elements(1024, states, Masters.WHOLE) or len(chunk.pieces) == 1
        taken: list[tuple[int, int]] = []
        for stream, (start, nbytes) in layout.spans(chunk).items():
            form = form_of(stream)
            for piece in chunk.pieces:
                if has_stream(stream, piece.parameter):
                    begin = start + chunk.before(form, piece) * form.itemsize
                    first, count = piece.values(form)
                    assert first == 0 and count == form.count_for(piece.parameter)
                    assert start <= begin <= begin + count * form.itemsize <= start + nbytes
                    taken.append((begin, begin + count * form.itemsize))
        taken.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
        assert taken[-1][1] <= chunk.nbytes
        streams = (MASTER, *states) if dtype == "bfloat16" else states
        own = sum(states_nbytes(streams, p.parameter) for p in chunk.pieces)
        assert own <= sum(nbytes for _, nbytes in layout.spans(chunk).values())


@pytest.mark.parametrize("states", [OWN, TORCH])
@pytest.mark.parametrize(("dtype", "copies"), [("float32", 1), ("bfloat16", 2)])
def test_an_update_has_room_for_its_largest_parameter(dtype: str, copies: int, states: tuple[str, ...]) -> None:
    """Its update (and its gradient in fp32), a sum for each row and column, and 64 bytes for norms. In parts: gradient,
    parameter and update of one."""
    made = block((64, 96), (300,), (96, 64), dtype=dtype)
    sums = 4 * (64 + 96)
    expected = align((3 if states is OWN else copies) * 4 * 64 * 96 + sums) + 64
    assert workspace_nbytes(states, 0, 0, made.parameters) == expected
    (large,) = block((PART // 64, 128), dtype=dtype).parameters
    at_once = align(copies * 8 * PART + 4 * (PART // 64 + 128)) + 64
    in_parts = align(12 * PART + 4 * (PART // 64 + 128)) + 64
    assert workspace_nbytes(states, 0, 0, [large]) == (in_parts if states is OWN else at_once)
    sizes = Sizer(Model((made,)), states, 1024, Masters.WHOLE)
    cell = sizes.update_window(["b"], 1) - sizes.update_window(["b"], 0)
    assert sizes.update_window(["b"], 0) == expected
    masters = 4 * 64 * 96 if dtype == "bfloat16" else 0
    assert cell == align(masters + sums, 4096) + 2 * 64 * 96 * (4 // copies)


def test_a_plan_counts_their_bytes() -> None:
    """Of states there is next to nothing beside two moments; chunks and the workspace are those of whole parameters."""
    wide = chain(4)
    narrow = replace(wide, state_names=TORCH)
    asks = [asked(trace, machine(), device=ENOUGH, states=trace.state_names) for trace in (wide, narrow)]
    plans = [make_plan(ask, "stream") for ask in asks]
    check(narrow, machine(), plans[1])
    assert plans[1].host < plans[0].host and plans[1].changes_numbers == ()
    assert plans[0].fingerprint != plans[1].fingerprint


@pytest.mark.parametrize("optimizer", FACTORED)
def test_an_element_takes_as_long_as_was_measured(optimizer: str) -> None:
    """On the host as a multiple of one of AdamW; on the device by what torch's ops move, where AdamW's is fused."""
    model = Model((block((64, 96)),))
    adamw, adafactor = (
        Costs(replace(seconds_trace([], state_names=states), model=model, optimizer=optimizer), MACHINE, Masters.WHOLE)
        for states in (("exp_avg", "exp_avg_sq"), TORCH)
    )
    seconds = [costs.touched(model.blocks[0]) / costs.update_rate for costs in (adamw, adafactor)]
    assert seconds[1] == pytest.approx(FACTORED[optimizer] * seconds[0])
    assert adamw.device_update_rate == pytest.approx(MACHINE.device_bandwidth)
    per_element = adafactor.touched(model.blocks[0]) / model.blocks[0].trainable_numel
    assert adafactor.device_update_rate == pytest.approx(MACHINE.device_bandwidth * per_element / 68)
    cpu = Costs(adafactor.trace, replace(MACHINE, device_kind="cpu"), Masters.WHOLE)
    assert cpu.device_update_rate / MACHINE.device_bandwidth == pytest.approx(cpu.update_rate / MACHINE.update_rate)
