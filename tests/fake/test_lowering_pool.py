"""The slot pool over a scripted clock fetches what the program says, in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.lowering import lower
from forebay.program import Verb
from tests.fake.slot_rig import NBYTES, Rig, names
from tests.null.strategies import roomy
from tests.null.synthetic import block
from tests.null.tracing import chain_trace


@pytest.mark.parametrize("compute", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("distance", [0, 1, 2, 5])
@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_same_fetches(slots: int, distance: int, compute: float) -> None:
    n = 5
    # The first layer of a chain makes no gradient of its input: its backward reads no parameter.
    uses = [*names(n), *reversed(names(n)[1:])]
    rig = Rig(dict.fromkeys(names(n), NBYTES), [NBYTES] * slots, distance=distance, compute=compute)
    for _ in range(3):
        rig.step(uses)
    trace = chain_trace([block(name, ((16,), "float32", True)) for name in names(n)])
    plan = roomy(trace, slots=slots)
    plan = replace(plan, streaming=replace(plan.streaming, prefetch_distance=distance))
    fetched = [a.block for a in lower(trace, plan, steps=3).actions if a.verb is Verb.FETCH]
    # The rig's steps begin with the update and what is fetched ahead after it; those of a program end with that.
    ahead = min(distance, slots, n)
    assert fetched == rig.source.fetched + names(n)[:ahead]
