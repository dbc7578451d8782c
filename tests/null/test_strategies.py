"""The strategies themselves: what they draw keeps the rules of the records."""

from __future__ import annotations

from hypothesis import given

from forebay.memory import Kind
from forebay.plans import Plan
from forebay.trace import Trace
from tests.null.strategies import Case, cases, traces
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace, made_bytes, peak_live, validate


@given(trace=traces())
def test_random_traces_keep_the_rules(trace: Trace) -> None:
    validate(trace)
    assert Trace.from_json(trace.to_json()) == trace


@given(case=cases())
def test_random_plans_are_records(case: Case) -> None:
    assert Plan.from_json(case.plan.to_json()) == case.plan
    assert [p.block for p in case.plan.placements] == [b.name for b in case.trace.model.blocks]
    assert case.plan.device <= case.plan.budget.device


def test_blocks_that_are_alike_share_their_segments() -> None:
    trace = chain_trace([block(f"layers.{i}", ((8, 8), "float32", True)) for i in range(5)])
    validate(trace)
    # The first layer reads the input, so its segments differ from those of the other four; the loss has two.
    assert (len(trace.visits), len(trace.segments)) == (12, 6)


def test_a_chain_has_the_bytes_of_its_formula() -> None:
    layer = Layer("a", saved=(1000, 2000), temporary=700, out=300)
    trace = chain_trace([block("a", ((8, 8), "float32", True), ((8,), "float32", False))], [layer])
    validate(trace)
    # softmax 300, loss 4; backward: ones 4, gradients of out 300, of both activations (the input has none), of W 256.
    assert sum(made_bytes(trace).values()) == (1000 + 2000 + 700 + 300) + (300 + 4) + (4 + 300 + 2000 + 1000 + 256)
    # The largest moment is dgrad: both activations, the gradients of both; out, softmax and loss are gone.
    assert peak_live(trace) == 2 * (1000 + 2000)
    assert [t.kind for t in trace.sources] == [Kind.PARAMETER, Kind.PARAMETER, Kind.INPUT]
