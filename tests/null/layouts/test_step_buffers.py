"""The lives of a step one by one are those that the profile adds up, and lie as low as they can."""

from __future__ import annotations

import pytest

from forebay.buffers import BufferSet
from forebay.checking.addresses import check_addresses
from forebay.lowering import Liveness, step_buffers, step_lives
from forebay.memory import Kind
from forebay.planners.layout import lay_out
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

BLOCKS = [block(f"layers.{i}", ((16, 16), "float32", True)) for i in range(6)]
TRACE = chain_trace(BLOCKS, [Layer(b.name, saved=(1000, 3000), temporary=700, out=300) for b in BLOCKS])


@pytest.mark.parametrize("recompute", [(), ("layers.1", "layers.4"), tuple(b.name for b in BLOCKS)])
def test_the_bytes_live_at_each_position_are_those_of_the_profile(recompute: tuple[str, ...]) -> None:
    profile = Liveness(TRACE).profile(recompute)
    buffers = step_buffers(TRACE, recompute)
    live = [sum(b.size for b in buffers if b.lower <= at < b.upper) for at in range(len(profile.during))]
    assert live == list(profile.during)
    found = lay_out(BufferSet(buffers))
    check_addresses(found)
    assert found.height == found.lower_bound == max(profile.during)


def test_gradients_that_stay_are_there_to_the_end() -> None:
    """From when each is complete: the last one behind all but the last ops, all of them when the step ends."""
    staying = [b.name for b in BLOCKS[:2]]
    alone, more = (
        list(zip(lives.kinds, lives.starts.tolist(), lives.ends.tolist(), lives.nbytes.tolist(), strict=True))
        for lives in (step_lives(TRACE), step_lives(TRACE, staying=staying))
    )
    assert more[: len(alone)] == alone
    added = more[len(alone) :]
    assert [(kind, nbytes) for kind, _, _, nbytes in added] == [(Kind.GRADIENT, 16 * 16 * 4)] * 2
    end = len(Liveness(TRACE).profile().during)
    assert all(0 < first < last + 1 == end + 1 for _, first, last, _ in added)
    # Where the pass lets go of it.
    assert {first for _, first, _, _ in added} <= {1 + last for kind, _, last, _ in alone if kind is Kind.GRADIENT}
