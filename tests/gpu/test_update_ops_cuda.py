"""What torch's ops take for an update on a card: no more of its memory than plans have room for, the numbers of the
same ops on the host, and the time, which is kept with the test's record beside what is foretold and asserted by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import pytest
import torch

from forebay.layout import with_masters
from forebay.optim.choosing import torch_arithmetic
from forebay.optim.parts import Part
from forebay.optim.reading import read_optimizer
from forebay.simulation.device_updates import CALL, ops_of
from forebay.states import Masters
from forebay.workspaces import widened_copies, workspace_nbytes
from tests.parity.test_device_update_ops import CASES, IDS, MAKERS, parameter_of, part_of

pytestmark = pytest.mark.gpu

CARD = "cuda"
SHAPE = (2 * CALL // 4096, 4096)
REPEATS = 5

Record = Callable[[str, object], None]


def moved(part: Part, device: str) -> Part:
    master = None if part.master is None else part.master.to(device)
    states = tuple(state.to(device) for state in part.states)
    return replace(
        part, parameter=part.parameter.to(device), gradient=part.gradient.to(device), master=master, states=states
    )


@pytest.mark.parametrize(("name", "dtype", "masters"), CASES, ids=IDS)
def test_on_a_card(name: str, dtype: torch.dtype, masters: Masters, record_property: Record) -> None:
    if name == "came":
        pytest.importorskip("came_pytorch")
    optimizer = MAKERS[name]([torch.nn.Parameter(torch.zeros(4, 4))])
    rule, group = read_optimizer(optimizer), optimizer.param_groups[0]
    parameter, arithmetic = parameter_of(rule, dtype, SHAPE), torch_arithmetic(rule)
    here = part_of(rule, dtype, masters, SHAPE)
    there, count = moved(here, CARD), SHAPE[0] * SHAPE[1]
    arithmetic.update([here], 1, group)
    arithmetic.update([there], 1, group)
    # What is rounded by chance is the same up to the roundings before it; products in bf16 are summed in another order.
    near = 1e-6 if rule.keeping.orthogonal else 0.0
    same = ((here.parameter.float() - there.parameter.cpu().float()).abs() <= near).float().mean()
    assert same > 0.98, float(same)
    nbytes = workspace_nbytes(
        with_masters(rule.state_names, masters), count, count * widened_copies(parameter, masters), [parameter]
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(2, 2 + REPEATS):
        torch.cuda.synchronize()
        since = perf_counter()
        arithmetic.update([there], step, group)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - since)
    assert torch.cuda.max_memory_allocated() - before <= nbytes + count // 256 * 64 + (1 << 20)
    ops = ops_of(parameter, rule.state_names, masters)
    record_property("nanoseconds an element", sorted(seconds)[REPEATS // 2] / count * 1e9)
    record_property("bytes an element, as foretold", ops.nbytes)
    record_property("launches, as foretold", ops.launches(count))
