"""The record itself: references, JSON, versions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.errors import ConfigError
from forebay.memory import Kind
from forebay.model import Block, Model, Parameter
from forebay.profiler.segments import Calls, Recorded, cut
from forebay.trace import TRACE_SCHEMA, Gradient, Op, Phase, Tensor, Trace, Visit, Work

LAYERS = 3


def parameter(layer: int) -> Parameter:
    return Parameter(f"layers.{layer}.weight", (4, 4), (4, 1), "float32", 64, 0, True)


def make_trace() -> Trace:
    """Three equal layers, each an op forward (which saves its output) and one backward."""
    blocks = tuple(Block(f"layers.{i}", (parameter(i),), (f"layers.{i}",), 64) for i in range(LAYERS))
    sources = [Tensor(64, "float32", Kind.PARAMETER, i, name=f"layers.{i}.weight") for i in range(LAYERS)]
    sources.append(Tensor(16, "float32", Kind.INPUT, LAYERS, name="x"))
    made = len(sources)
    tensors = [*sources]
    ops = []
    for i in range(LAYERS):
        tensors.append(Tensor(16, "float32", Kind.ACTIVATION, made + i, saved=True))
        given = made + i - 1  # the input has the number before the first output
        ops.append(Recorded(0, f"layers.{i}", i, Phase.FORWARD, (given, i), (made + i,), made=(made + i,)))
    for place, i in enumerate(reversed(range(LAYERS))):
        number = made + LAYERS + place
        tensors.append(Tensor(64, "float32", Kind.GRADIENT, number))
        ops.append(
            Recorded(
                1,
                f"layers.{i}",
                i,
                Phase.BACKWARD,
                (made + i, i),
                (number,),
                made=(number,),
                dropped=(made + i,),
                unsaved=(made + i,),
                gradients=((i, number),),
            )
        )
    segments, visits = cut(ops, tensors, Calls())
    works = (Work("f", "f(x)", "float32", 128, 96), Work("g", "g(x)", "float32", 256, 144))
    return Trace(Model(blocks), "cpu", "sgd", (), 4, tuple(sources), works, segments, visits)


def test_visits_that_are_alike_share_a_segment() -> None:
    trace = make_trace()
    assert len(trace.segments) == 2
    assert [v.segment for v in trace.visits] == [0, 0, 0, 1, 1, 1]
    assert trace.flops == LAYERS * (128 + 256)


def test_references_resolve_to_the_ids_that_were_recorded() -> None:
    trace = make_trace()
    forward = [
        ([v.resolve(r) for r in op.inputs], [v.resolve(r) for r in op.outputs])
        for _, v, op in trace.ops()
        if v.phase is Phase.FORWARD
    ]
    assert forward == [([3, 0], [4]), ([4, 1], [5]), ([5, 2], [6])]
    backward = [
        (v.resolve(g.parameter), v.resolve(g.tensor), [v.resolve(r) for r in op.dropped])
        for _, v, op in trace.ops()
        for g in op.gradients
    ]
    assert backward == [(2, 7, [6]), (1, 8, [5]), (0, 9, [4])]
    assert [number for number, _, _ in trace.ops()] == list(range(2 * LAYERS))
    assert [(n, t.root) for n, t in trace.tensors()] == [(n, n) for n in range(10)]


def test_another_size_from_outside_is_another_segment() -> None:
    small, large = Tensor(16, "float32", Kind.INPUT, 0), Tensor(32, "float32", Kind.INPUT, 1)
    tensors = [small, large, Tensor(4, "float32", Kind.TEMPORARY, 2), Tensor(4, "float32", Kind.TEMPORARY, 3)]
    ops = [
        Recorded(0, "a", 1, Phase.FORWARD, (0,), (2,), made=(2,)),
        Recorded(0, "b", 2, Phase.FORWARD, (1,), (3,), made=(3,)),
    ]
    segments, visits = cut(ops, tensors, Calls())
    assert len(segments) == 2
    assert [v.ports for v in visits] == [(0,), (1,)]


def test_a_view_of_what_is_outside_has_its_root_there() -> None:
    tensors = [Tensor(16, "float32", Kind.INPUT, 0), Tensor(8, "float32", Kind.INPUT, 0)]
    segments, visits = cut([Recorded(0, "", 0, Phase.FORWARD, (0,), (1,), made=(1,))], tensors, Calls())
    assert segments[0].tensors[0].root == -1
    assert visits[0].resolve(-1) == 0
    assert segments[0].ops[0] == Op(0, (-1,), (0,))


def test_resolve() -> None:
    visit = Visit(0, "a", Phase.FORWARD, ports=(7, 3), first_op=5, first_tensor=20)
    assert [visit.resolve(r) for r in (0, 4, -1, -2)] == [20, 24, 7, 3]


def test_json_gives_the_same_trace_back() -> None:
    trace = make_trace()
    text = trace.to_json()
    assert Trace.from_json(text) == trace
    assert json.loads(text)["schema"] == TRACE_SCHEMA
    assert Trace.from_json(text.encode()).segments[1].ops[0].gradients == (Gradient(-2, 0),)


def test_a_newer_schema_is_refused() -> None:
    written = json.loads(make_trace().to_json())
    written["schema"] = TRACE_SCHEMA + 1
    with pytest.raises(ConfigError, match=f"schema {TRACE_SCHEMA + 1}.*reads schema {TRACE_SCHEMA};"):
        Trace.from_json(json.dumps(written))


@pytest.mark.parametrize("cut_at", [0, 1, 100, 1000])
def test_a_truncated_trace_is_refused(cut_at: int) -> None:
    with pytest.raises(ConfigError, match="cannot read a Trace"):
        Trace.from_json(make_trace().to_json()[:cut_at])


def test_a_field_that_is_wrong_is_named() -> None:
    written = json.loads(make_trace().to_json())
    written["works"][1]["flops"] = "many"
    with pytest.raises(ConfigError, match=r"works\.1\.flops"):
        Trace.from_json(json.dumps(written))


def test_a_fingerprint_names_the_model_its_batch_and_its_optimizer() -> None:
    trace = make_trace()
    assert trace.fingerprint == make_trace().fingerprint
    longer = (*trace.sources[:-1], replace(trace.sources[-1], nbytes=32))
    others = [replace(trace, sources=longer), replace(trace, state_names=("momentum_buffer",))]
    assert len({trace.fingerprint, *(t.fingerprint for t in others)}) == 3


def test_a_block_is_found_by_its_name() -> None:
    model = make_trace().model
    assert model.block("layers.1") is model.blocks[1]
    with pytest.raises(KeyError):
        model.block("layers.9")
