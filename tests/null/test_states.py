"""How optimizer states lie, and what a block's chunks take with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from forebay.checking import check
from forebay.errors import ConfigError
from forebay.layout import MASTER, PAGE, align, chunk_elements, state_layout, states_nbytes
from forebay.lowering import lower
from forebay.model import Block, Parameter
from forebay.planners import make_plan
from forebay.program import Verb
from forebay.states import (
    BLOCK,
    MOMENTS,
    Masters,
    Moments,
    Reach,
    form_of,
    is_wide,
    moment_states,
    plain_name,
    reach_of,
    state_changes,
)
from tests.null.planning import ENOUGH, asked, chain, machine

NAMES = ("exp_avg", "exp_avg_sq")


def block(*numels: int, dtype: str = "float32") -> Block:
    itemsize = 4 if dtype == "float32" else 2
    parameters, end = [], 0
    for number, numel in enumerate(numels):
        parameters.append(Parameter(f"p{number}", (numel,), (1,), dtype, numel * itemsize, end, True))
        end += align(numel * itemsize)
    return Block("b", tuple(parameters), ("b",), end)


def test_names_say_how_states_lie() -> None:
    assert moment_states(NAMES, "float32") == NAMES
    assert moment_states(NAMES, "bfloat16") == ("exp_avg:bfloat16", "exp_avg_sq:bfloat16")
    coded = moment_states(NAMES, "8bit")
    assert coded == ("exp_avg:8bit", "exp_avg_scale:scale", "exp_avg_sq:8bit", "exp_avg_sq_scale:scale")
    assert [plain_name(state) for state in coded] == ["exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"]
    assert is_wide(NAMES) and not is_wide(coded)
    assert reach_of(()) is Reach.ELEMENTS and reach_of(NAMES) is Reach.ELEMENTS
    assert reach_of(coded) is Reach.PIECES and reach_of(moment_states(NAMES, "bfloat16")) is Reach.PIECES
    assert [reach for reach in Reach if reach.takes_wholes] == [Reach.PARTS, Reach.WHOLES, Reach.MATRICES]
    assert form_of("exp_avg").is_elementwise and form_of("m:bfloat16").is_elementwise
    assert not any(form_of(state).is_elementwise for state in coded)
    with pytest.raises(ConfigError, match="there is no form '3bit'"):
        form_of("exp_avg:3bit")
    with pytest.raises(ConfigError, match="not '2bit'"):
        moment_states(NAMES, "2bit")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("moments", "elements", "nbytes"),
    [
        ("float32", 1000, 2 * 1000 * 4),
        ("bfloat16", 1000, 2 * 1000 * 2),
        ("8bit", 1000, 2 * (1000 + 4 * 4)),
        # 3 blocks of 128 bytes; of the last 232 elements those from the 128th on share the bytes of the first ones.
        ("4bit", 1000, 2 * (4 * 128 + 4 * 4)),
        ("4bit", 3 * 256 + 5, 2 * (3 * 128 + 5 + 4 * 4)),
        ("8bit", 0, 0),
    ],
)
def test_bytes(moments: Moments, elements: int, nbytes: int) -> None:
    (parameter,) = block(elements).parameters
    assert states_nbytes(moment_states(NAMES, moments), parameter) == nbytes


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("update_chunk", [1024, 1500, 1 << 22])
def test_chunks_cut_no_block_of_a_scale(moments: Moments, dtype: str, update_chunk: int) -> None:
    names = moment_states(NAMES, moments)
    made = block(3, 5000, 700, 1, dtype=dtype)
    layout = state_layout(made, names, update_chunk, Masters.WHOLE)
    master = (MASTER,) if dtype == "bfloat16" else ()
    assert layout.streams == master + names
    end = 0
    for chunk in layout.chunks:
        assert chunk.offset == end and chunk.elements <= chunk_elements(update_chunk, names, Masters.WHOLE)
        spans = list(layout.spans(chunk).values())
        assert spans[0][0] == 0 and all(a + n == b for (a, n), (b, _) in pairwise(spans))
        assert chunk.nbytes == align(sum(n for _, n in spans), PAGE)
        # States in and out, parameters too, gradients in.
        own = sum(p.stop - p.start for p in chunk.pieces) * (4 if dtype == "float32" else 2)
        assert layout.touched(chunk) == 2 * sum(n for _, n in spans) + 3 * own
        end += chunk.nbytes
        step = 16 if moments == "float32" else BLOCK
        assert chunk.elements % step == 0 and all(p.offset % step == 0 and p.start % step == 0 for p in chunk.pieces)
    assert layout.nbytes == end
    pieces = [piece for chunk in layout.chunks for piece in chunk.pieces]
    for parameter in made.parameters:
        spans = [(p.start, p.stop) for p in pieces if p.parameter is parameter]
        assert spans[0][0] == 0 and spans[-1][1] == parameter.numel
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_what_changes_the_numbers_is_said() -> None:
    assert state_changes(moment_states(NAMES, "float32")) == ()
    (said,) = state_changes(moment_states(NAMES, "8bit"))
    assert "8 bits" in said and "256" in said
    assert "by chance" in state_changes(moment_states(NAMES, "bfloat16"))[0]


@pytest.mark.parametrize("moments", ["8bit", "4bit", "bfloat16"])
def test_a_plan_counts_the_bytes_of_its_states(moments: Moments) -> None:
    wide = chain(4)
    narrow = replace(wide, state_names=moment_states(wide.state_names, moments))
    asks = [asked(trace, machine(), device=ENOUGH, states=trace.state_names) for trace in (wide, narrow)]
    plans = [make_plan(ask, "stream") for ask in asks]
    check(narrow, machine(), plans[1])
    states = [
        sum(
            state_layout(b, t.state_names, plans[1].streaming.update_chunk, plans[1].streaming.masters).nbytes
            for b in t.model.blocks
        )
        for t in (wide, narrow)
    ]
    # By torch's ops so many elements of a parameter are updated in two moments, a gradient and a parameter in fp32, and
    # two numbers to decode and encode in.
    layouts = [
        state_layout(b, narrow.state_names, plans[1].streaming.update_chunk, plans[1].streaming.masters)
        for b in narrow.model.blocks
    ]
    pieces = (piece for layout in layouts for chunk in layout.chunks for piece in chunk.pieces)
    workspace = 6 * 4 * max(piece.stop - piece.start for piece in pieces)
    assert plans[0].host - plans[1].host == states[0] - states[1] - workspace
    assert states[0] > states[1]
    assert plans[0].changes_numbers == () and plans[1].changes_numbers == state_changes(narrow.state_names)
    assert plans[0].fingerprint != plans[1].fingerprint
    program = lower(narrow, plans[1])
    # By chunk: a program has more than one step.
    touched = {(a.block, a.chunk): a.nbytes for a in program.actions if a.verb is Verb.UPDATE}
    assert sum(touched.values()) == sum(layout.touched(chunk) for layout in layouts for chunk in layout.chunks)
