"""What is treated and nobody asks for again, on paper: it goes with forward, whatever stands for it, and never comes
back."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from forebay.checking import check
from forebay.lowering import lower
from forebay.memory import Kind
from forebay.model import Model
from forebay.plans import Plan
from forebay.program import Program, Verb
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Split, Treatment
from tests.null.synthetic import block
from tests.null.test_codes_and_disk import MACHINE, planned
from tests.null.tracing import Layer, TraceBuilder, chain_trace, validate

SAVED, MIXED, OUT = 8192, 16384, 4096
AMPLE = 1 << 20
BACK = {Verb.READ, Verb.RELOAD, Verb.DECODE}
BLOCKS = [block(name, ((4,), "float32", True)) for name in ("first", "second")]

WAYS = [
    pytest.param(Treatment("mix", 0, Fate.KEEP, 4), id="codes"),
    pytest.param(Treatment("mix", 0, Fate.OFFLOAD, 4), id="codes on the host"),
    pytest.param(Treatment("mix", 0, Fate.OFFLOAD), id="on the host"),
    pytest.param(Treatment("mix", 0, Fate.OFFLOAD, split=Split(1, 2)), id="a part on the host"),
    pytest.param(Treatment("mix", 0, Fate.DISK), id="on disk"),
]
"""Of an op behind the last that a recomputation runs."""


def with_loss() -> Trace:
    """Each block saves what its first op makes; forward ends with a loss."""
    return chain_trace(BLOCKS, [Layer(b.name, (SAVED,), MIXED, OUT) for b in BLOCKS])


def without_loss() -> Trace:
    """One block, whose last op is the last of forward, and whose result is handed to nobody."""
    b = TraceBuilder(Model((BLOCKS[0],), 0), {"input_ids": 256})
    x, parameter = b.ids["input_ids"], b.ids["first.0"]
    v = b.begin("first", Phase.FORWARD)
    v.given = (x,)
    saved = v.make("linear", [x, parameter], SAVED, saved=True)
    v.save()
    v.pack(saved)
    out = v.make("mix", [saved], MIXED)
    v.drop(saved)
    place = b.end(v)
    v = b.begin("first", Phase.BACKWARD)
    ones = v.make("ones", [x], 4, Kind.TEMPORARY)
    v.drop(out)
    v.complete(parameter, v.make("wgrad", [ones, saved], 16, Kind.GRADIENT))
    v.drop(ones)
    v.unsave(saved, own=True)
    b.end(v)
    b.let_go(place)
    return b.trace()


def levels(program: Program) -> list[int]:
    """Bytes on the device behind each action, beside what stands there."""
    return list(accumulate(sum(change.nbytes for change in action.changes) for action in program.actions))


def treated(trace: Trace, way: Treatment) -> Plan:
    recompute = tuple(b.name for b in trace.model.blocks)
    return planned(trace, way, ring=AMPLE, recompute=recompute, offload_window=AMPLE, reload_window=AMPLE)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_it_goes_with_forward(way: Treatment, micro_batches: int) -> None:
    """Behind the last op of it, and behind the last of all, as much is there as without any treatment."""
    trace = with_loss()
    plan = treated(trace, way)
    check(trace, MACHINE, plan, lower(trace, plan, micro_batches=micro_batches))
    forward = sum(len(trace.segments[v.segment].ops) for v in trace.visits if v.phase is Phase.FORWARD)
    found = []
    for one in (replace(plan, activations=()), plan):
        program = lower(trace, one, micro_batches=micro_batches)
        assert not {a.verb for a in program.actions} & BACK
        there = levels(program)
        ends = [n for n, a in enumerate(program.actions) if a.verb is Verb.COMPUTE and a.ops[1] == forward]
        assert len(ends) == program.steps * micro_batches
        found.append([*(there[n] for n in ends), there[-1]])
    assert found[0] == found[1]


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_where_the_last_op_of_forward_makes_it(way: Treatment) -> None:
    trace = without_loss()
    validate(trace)
    program = lower(trace, treated(trace, way), steps=3)
    assert not {a.verb for a in program.actions} & BACK
    there = dict(zip((a.step for a in program.actions), levels(program), strict=True))  # at the end of each
    assert there == dict.fromkeys(range(3), 0)
