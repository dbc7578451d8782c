"""Who gets the room on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.planners import Bench
from forebay.planners.parts import HOSTED, RESIDENT, Draft, fewer_slots, keep_order
from forebay.planners.shapes import SHARED, filled, options, streamed_through
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

WIDTHS = (144, *[64] * 6, 52)
"""An embedding, layers, and a head that is smaller than they are."""

WITH_IT, WITHOUT_IT = 100_000, 400_000
"""Bytes beside the arenas where the first block stays, and where it passes with its gradient."""


def trace() -> Trace:
    blocks = [block(f"layers.{i}", *[((width, width), "float32", True)] * 2) for i, width in enumerate(WIDTHS)]
    return chain_trace(blocks, [Layer(b.name, saved=(8192, 8192), out=8192) for b in blocks], input_nbytes=8192)


@pytest.mark.parametrize("limit", range(1_200_000, 1_660_000, 10_000))
def test_room_goes_to_who_is_first_in_order(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there was room for beside the gradient of the first block, which stays."""

    def beside(bench: Bench, draft: Draft) -> int:
        return WITH_IT if "layers.0" in draft.resident else WITHOUT_IT

    monkeypatch.setattr(Bench, "beside", beside)
    bench = Bench(asked(trace(), machine(), device=limit, host=ENOUGH))
    found = filled(bench, streamed_through(bench, options(bench)[0], 0), SHARED)
    assert bench.fits_device(found)
    order = [b.name for b in keep_order(bench.model, found.streaming.slots or (1,), last_first=False)]
    left = [name for name in order if name not in found.resident]
    if not left:
        return
    instead = found.placed(left[0], RESIDENT)
    for later in order[order.index(left[0]) + 1 :]:
        instead = instead.placed(later, HOSTED)
    streaming = streamed_through(bench, options(bench)[0], 0).streaming
    assert not bench.fits_device(replace(instead, streaming=fewer_slots(streaming, bench.streamed(instead))))
