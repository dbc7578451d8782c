"""What crosses the link in ``forebay.accumulate``: parameters and gradients once for all micro-batches, as foretold."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import forebay
from forebay.runtime.blocks import find_blocks
from forebay.simulation import Costs, together
from forebay.states import Masters
from forebay.timeline import Lane
from tests.null.planning import machine
from tests.parity.accumulating import loss_of, moved, opened
from tests.parity.models import CASES, Case
from tests.parity.offloading import trace_of
from tests.parity.recomputing import AMPLE, plan_for

MANY = 8


def crossed(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, count: int) -> dict[str, Counter[str]]:
    """Bytes that one step of ``count`` micro-batches moves, block by block and gradient by gradient."""
    kinds = {"fetch": Lane.H2D, "gradient": Lane.D2H, "park gradient": Lane.D2H, "unpark gradient": Lane.H2D}
    forebay.synchronize(model)
    before = {verb: moved(model, lane, verb) for verb, lane in kinds.items()}
    forebay.accumulate(model, [case.inputs(micro, torch.float32) for micro in range(count)], loss_of)
    optimizer.step()
    optimizer.zero_grad()
    forebay.synchronize(model)
    after = {verb: moved(model, lane, verb) for verb, lane in kinds.items()}
    return {verb: after[verb] - before[verb] for verb in kinds}


def test_parameters_and_gradients_cross_once_a_step() -> None:
    """One slot: in forward every block is fetched. In backward the last one is still there, and that of an embedding
    reads no parameters: the others are fetched once more. Each gradient leaves once."""
    case = CASES["llama"]
    plan = plan_for(case, torch.float32, (), resident=False, slots=1)
    blocks = find_blocks(case.model(torch.float32)).model.blocks
    with opened(case, torch.float32, plan=plan, device_memory=AMPLE) as (model, optimizer):
        for _ in range(2):
            found = crossed(model, optimizer, case, MANY)
            inner = {b.name: 2 * b.nbytes for b in blocks[1:-1]}
            assert found["fetch"] == {**inner, **{b.name: b.nbytes for b in (blocks[0], blocks[-1])}}
            assert found["gradient"] == {p.name: p.nbytes for b in blocks for p in b.parameters}
            assert not found["park gradient"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "vit"])
def test_many_micro_batches_move_what_one_moves(name: str) -> None:
    """With two slots and prefetching; tied parameters apart, whose gradients wait on the host."""
    case = CASES[name]
    plan = plan_for(case, torch.float32, (), resident=False, slots=2)
    tied = {p.name for b in find_blocks(case.model(torch.float32)).model.blocks for p in b.parameters if p.aliases}
    with opened(case, torch.float32, plan=plan, device_memory=AMPLE) as (model, optimizer):
        _, _, again, _, many = (crossed(model, optimizer, case, count) for count in (1, 1, 1, MANY, MANY))
        assert many["fetch"] == again["fetch"]
        # Of a mixture of experts each micro-batch uses some.
        assert {n: many["gradient"][n] for n in again["gradient"]} == again["gradient"] or name == "mixtral"
        assert set(many["park gradient"]) <= tied
        assert many["park gradient"] == many["unpark gradient"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_as_many_bytes_cross_as_foretold(name: str) -> None:
    """Each way, those of tied parameters among them; by the third step the record of the order is complete."""
    case = CASES[name]
    plan = plan_for(case, torch.float32, (), resident=False, slots=2)
    trace = trace_of(case, torch.float32)
    foretold = together(plan, Costs(trace, machine(kind="cpu"), Masters.WHOLE), MANY).moved
    with opened(case, torch.float32, plan=plan, device_memory=AMPLE) as (model, optimizer):
        for _ in range(3):
            found = crossed(model, optimizer, case, MANY)
    assert found["fetch"].total() + found["unpark gradient"].total() == foretold[Lane.H2D]
    assert found["gradient"].total() + found["park gradient"].total() == foretold[Lane.D2H]
