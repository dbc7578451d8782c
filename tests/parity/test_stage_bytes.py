"""What stages of real models hold: block by block what a pass leaves saved, and what its options say of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forebay.planners import Bench
from forebay.planners.activations.literature.layers import layers_of
from forebay.planners.parallel import ServerBench
from forebay.servers import Server
from tests.null.planning import ENOUGH, asked, machine
from tests.parity.models import CASES, Case
from tests.parity.offloading import trace_of


def with_dropout() -> nn.Module:
    """A GPT-2 whose masks are made in place: one tensor each, whoever writes to it."""
    model = CASES["gpt2"].make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


MODELS = {name: CASES[name] for name in ("gpt2", "llama", "t5")} | {"dropout": Case(with_dropout, CASES["gpt2"].batch)}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_block_saves_is_what_is_live_behind_its_forward(name: str) -> None:
    trace = trace_of(MODELS[name], torch.float32)
    bench = Bench(asked(trace, machine(), device=ENOUGH))
    server = ServerBench(bench, Server((0, 0), 1e9), 1)
    layers = {layer.name: layer for layer in layers_of(bench)}
    parts = [one for one in server.layers if one.blocks[0] in layers and one.backward > one.forward]
    repeated = [one for one in parts if layers[one.blocks[0]].may_rerun]
    assert len(repeated) > 1
    for one in repeated:
        kept = layers[one.blocks[0]].kept().held
        # Beside it, at the most: its input and its result, which the next one may hold.
        assert abs(server.saved(one, None) - kept) <= 2 * one.handed
    # Every op of the step belongs to one block at one of its places.
    spans = [span for one in server.layers for span in one.spans]
    assert sum(end - begin for begin, end in spans) == sum(
        len(trace.segments[visit.segment].ops) for visit in trace.visits
    )
    seconds = sum(one.backward for one in server.layers)
    assert seconds == pytest.approx(bench.costs.ops(0, max(end for _, end in spans)))
