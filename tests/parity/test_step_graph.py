"""The graph of a step forbids every order in which an op would read other bytes than it does in program order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from forebay.checking.orders import check_order
from forebay.lowering import step_graph
from forebay.memory import Kind
from forebay.planners.ordering import order_ops
from forebay.profiler.capture import capture
from forebay.trace import Op, Trace, Visit
from tests.parity.models import CASES, WithLoss, images


class InPlace(nn.Module):
    """Dropout, statistics of a batch, and ops in place on what others read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 4)
        self.norm = nn.BatchNorm1d(48)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.first(pixel_values[:, :, :4, :4].flatten(1))
        beside = nn.functional.dropout(x.detach() * 2, 0.5)
        y = nn.functional.dropout(self.norm(x) + self.norm(x * 2), 0.5)
        beside.mul_(y.detach())
        return self.second(y + beside)


def recorded(name: str) -> Trace:
    if name == "in-place":
        return capture(WithLoss(InPlace()), images(0)).trace
    case = CASES[name]
    return capture(case.model(torch.float32), case.inputs(0, torch.float32)).trace


def reads_of(trace: Trace, order: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
    """What each op that computes reads where they run in ``order``, and the updates behind them: (root, how often it
    has been written to). The stream of random numbers and what a norm counts are read and written too."""
    roots = {number: tensor.root for number, tensor in trace.tensors()}
    ops = [(visit, op) for _, visit, op in trace.ops() if trace.works[op.work].nbytes or _makes(visit, op, roots)]
    gradients = {
        visit.resolve(g.parameter): roots[visit.resolve(g.tensor)] for _, visit, op in trace.ops() for g in op.gradients
    }
    updates = sorted(gradients.items())
    written: dict[int, int] = {}
    found = {}
    for place in order:
        if place >= len(ops):
            parameter, gradient = updates[place - len(ops)]
            reads, writes = [gradient, parameter], [parameter]
        else:
            visit, op = ops[place]
            reads = [roots[visit.resolve(r)] for r in op.inputs]
            writes = [roots[visit.resolve(r)] for r in op.outputs]
            name = trace.works[op.work].op
            if "bernoulli" in name or name == "aten.native_dropout.default":
                reads, writes = [*reads, -1], [*writes, -1]
            if "batch_norm" in name and "backward" not in name:
                writes += [r for r in reads if r < len(trace.sources) and trace.sources[r].kind is Kind.BUFFER]
        found[place] = [(root, written.get(root, 0)) for root in reads]
        for root in writes:
            written[root] = written.get(root, 0) + 1
    return found


def _makes(visit: Visit, op: Op, roots: dict[int, int]) -> bool:
    return any(roots[visit.resolve(r)] == visit.resolve(r) for r in op.outputs)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5", "convnet", "used-twice", "checkpointed", "in-place"])
def test_in_any_order_that_is_found_ops_read_the_same(name: str) -> None:
    trace = recorded(name)
    graph = step_graph(trace)
    found = order_ops(graph)
    check_order(found)
    program = reads_of(trace, range(len(graph.ops)))
    assert reads_of(trace, found.order) == program
    assert len(program) == len(graph.ops)
    # As late as it may be, everything in the order of the last: another order that the graph allows.
    late, left = list[int](), set(range(len(graph.ops)))
    needed = [sum(op in needs for needs in graph.needs) for op in range(len(graph.ops))]
    while left:
        op = min(op for op in left if not needed[op])
        left.remove(op)
        late.append(op)
        for need in graph.needs[op]:
            needed[need] -= 1
    assert reads_of(trace, reversed(late)) == program
    assert sum(op.name.startswith("update ") for op in graph.ops) == sum(
        parameter.trainable for block in trace.model.blocks for parameter in block.parameters
    )


def test_in_program_order_no_more_is_live_than_the_roots_that_are_made() -> None:
    """What is made and what it takes are those of the trace; nothing lives longer than there, but for gradients, which
    wait for their updates."""
    trace = recorded("llama-tied")
    graph = step_graph(trace)
    made = sorted(t.nbytes for n, t in trace.tensors() if t.root == n and n >= len(trace.sources))
    assert sorted(tensor.nbytes for tensor in graph.tensors) == made
    gradients = sum(block.gradient_nbytes for block in trace.model.blocks)
    updates = [n for n, op in enumerate(graph.ops) if op.name.startswith("update ")]
    waiting = [tensor for tensor in graph.tensors if set(tensor.readers) & set(updates)]
    assert sum(tensor.nbytes for tensor in waiting) == gradients
