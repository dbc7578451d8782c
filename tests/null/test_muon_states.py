"""States of Muon: one of the matrices that it makes orthogonal, two of all else; what their updates take, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.layout import has_stream, state_layout, states_nbytes, touched_nbytes
from forebay.machine import Machine
from forebay.model import Block
from forebay.planners import make_plan
from forebay.plans import Update
from forebay.simulation.costs import Costs
from forebay.simulation.update_rates import HOST_FLOPS
from forebay.states import (
    MUON,
    Masters,
    Reach,
    Shape,
    element_nbytes,
    form_of,
    is_fp32,
    masters_for,
    reach_of,
)
from forebay.trace import Trace
from forebay.workspaces import workspace_nbytes
from tests.null.planning import asked, chain, machine
from tests.null.simulating import MACHINE
from tests.null.synthetic import ADAM, block


def orthogonal(made: Block) -> Block:
    return replace(made, parameters=tuple(replace(p, orthogonal=len(p.shape) == 2) for p in made.parameters))


def test_shapes() -> None:
    """A matrix has a state because Muon was given it, and not because it is one."""
    matrix, other, vector = Shape((3, 5), orthogonal=True), Shape((3, 5)), Shape((5,))
    assert [form_of(state).shape_for(matrix) for state in MUON] == [(3, 5), None, None]
    assert [form_of(state).shape_for(other) for state in MUON] == [None, (3, 5), (3, 5)]
    assert [form_of(state).shape_for(vector) for state in MUON] == [None, (5,), (5,)]
    first, second = orthogonal(block("b", ((3, 5), "float32", True), ((5,), "float32", True))).parameters
    assert [has_stream(state, first) for state in MUON] == [True, False, False]
    assert [states_nbytes(MUON, p) for p in (first, second)] == [4 * 15, 8 * 5]


def test_what_they_are() -> None:
    assert reach_of(MUON) is Reach.MATRICES and is_fp32(MUON)
    assert reach_of(("momentum_buffer",)) is Reach.ELEMENTS
    assert element_nbytes(MUON) == 8
    assert masters_for(MUON, ["bfloat16"]) is Masters.WHOLE


@pytest.mark.parametrize(("dtype", "wide"), [("float32", 0), ("bfloat16", 4)])
def test_an_update_has_room_for_its_largest_parameter(dtype: str, wide: int) -> None:
    """Of a matrix its gradient in fp32, one and a half of it in fp32, two squares in bf16, and 256 bytes; of all else
    a gradient in fp32."""
    made = orthogonal(block("b", ((64, 96), dtype, True), ((300,), dtype, True)))
    assert workspace_nbytes(MUON, 0, 0, made.parameters) == (wide + 6) * 64 * 96 + 4 * 64 * 64 + 256
    plain = block("b", ((64, 96), dtype, True), ((300,), dtype, True))
    assert workspace_nbytes(MUON, 0, 0, plain.parameters) == wide * 64 * 96


WIDTH = 256


def words_and_layers(count: int = 4) -> Trace:
    """Layers of matrices, behind an embedding that is AdamW's."""
    trace = chain(count + 1, width=WIDTH)
    first, *others = trace.model.blocks
    return replace(
        trace, model=replace(trace.model, blocks=(first, *map(orthogonal, others))), state_names=MUON, optimizer="muon"
    )


def of_elements(trace: Trace, on: Machine) -> tuple[list[float], list[float]]:
    """Seconds of an update of each block on the host, and on the device, for each of its elements."""
    costs = Costs(trace, on, Masters.WHOLE)
    host, device = [], []
    for one in trace.model.blocks:
        touched = sum(
            touched_nbytes(state_layout(one, MUON, 1 << 22, Masters.WHOLE).streams, p) for p in one.parameters
        )
        assert touched == costs.touched(one)
        host.append(costs.update_seconds(one.name, touched) / one.trainable_numel)
        device.append(costs.device_update_seconds(one.name, touched) / one.trainable_numel)
    return host, device


def test_every_block_takes_its_own_time() -> None:
    """On the host AdamW's of what AdamW updates; of a square matrix 114 bytes an element for what is read and written,
    and five iterations of six products: twice its width for each element. On a card the same, at its rates."""
    trace = words_and_layers()
    rates = {"update_rate": 1e10, "host_bandwidth": 2e10, "device_bandwidth": 1e12, "launch_seconds": 0.0}
    on = replace(MACHINE, **rates, compute={"float32": 1e12, "bfloat16": 1e14})
    host, device = of_elements(trace, on)
    moved, computed = 54 + 5 * 22, 5 * 6 * WIDTH
    assert host[0] == pytest.approx(28 / on.update_rate)
    assert host[1:] == [pytest.approx(moved / on.host_bandwidth + computed / HOST_FLOPS)] * 4
    assert device[0] == pytest.approx(28 / on.device_bandwidth)
    assert device[1:] == [pytest.approx(moved / on.device_bandwidth + computed / 1e14)] * 4
    costs = Costs(trace, on, Masters.WHOLE)
    assert costs.fastest_update_rate == pytest.approx(on.update_rate)
    assert costs.update_rate < costs.fastest_update_rate
    # Where there is no bf16 of its own, and where the device is the host.
    cpu = replace(on, device_kind="cpu", compute={"float32": 1e12})
    host, device = of_elements(trace, cpu)
    assert host[1] == pytest.approx(moved / cpu.host_bandwidth + computed / 1e12) and device[1:] == host[1:]


def test_updates_of_matrices_go_to_the_card_and_others_stay() -> None:
    """Where the host takes much longer for matrices than the card they are brought there, and what is AdamW's is not.
    States of matrices take half the bytes of AdamW's."""
    trace = words_and_layers(12)
    on = machine(compute=1e15, h2d=1e10, d2h=1e10, update=1e11)
    within = sum(b.nbytes for b in trace.model.blocks)
    plan = make_plan(asked(trace, on, device=within, states=MUON), "auto")
    check(trace, on, plan)
    there, hosted = plan.updated(Update.DEVICE), {p.block for p in plan.placements if not p.resident}
    assert "layers.0" in hosted and "layers.0" not in there and len(there) > 6
    adamw = make_plan(asked(replace(trace, state_names=ADAM), on, device=within), "stream")
    assert make_plan(asked(trace, on, device=within, states=MUON), "stream").host < adamw.host
