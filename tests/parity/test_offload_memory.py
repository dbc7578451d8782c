"""What moving activations to the host leaves on the device: to the byte, in a model whose layers are alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import forebay
from forebay.errors import DeviceOutOfMemory
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from tests.parity.compare import adamw, assert_same_training
from tests.parity.offloading import Named, host_formula, movable, moving, trace_of
from tests.parity.recomputing import AMPLE, plan_of
from tests.parity.towers import tower

WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
FLOAT = 4
ROWS, WIDTH, DEPTH = 128, 8, 5
INPUT = ROWS * WIDTH * FLOAT
"""Bytes of a layer's input: more than its gradients, so that the peak stays where backward begins."""

TOWER = tower(ROWS, WIDTH, DEPTH)
LAYERS = [f"layers.{i}" for i in range(DEPTH)]


def of_layers(count: int, keep: Callable[[Named], bool] = lambda one: True) -> list[Named]:
    """What may be moved in the first ``count`` layers."""
    named = movable(trace_of(TOWER, torch.float32))
    assert [n for one in named for n in one.nbytes] == DEPTH * [4 * INPUT, 4 * INPUT, INPUT]
    return [one for one in named if one.block in LAYERS[:count] and keep(one)]


def plan_with(named: Sequence[Named], resident: bool, recompute: Sequence[str] = (), reload_window: int = 0) -> Plan:
    plan = plan_of(find_blocks(TOWER.model(torch.float32)).model, recompute, resident=resident)
    return moving(plan, named, reload_window=reload_window)


def peak(plan: Plan, budget: int = AMPLE) -> int:
    """Device bytes at the peak of the second step, which is like all that follow."""
    model = TOWER.model(torch.float32)
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), plan=plan, device_memory=budget, device="cpu"
    )
    for step in range(2):
        model(**TOWER.inputs(step, torch.float32))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    report = forebay.report(model).timeline
    assert report.counters["activations_kept"] == 0
    forebay.close(model)
    return report.peaks[Tier.DEVICE]


@WHERE
@pytest.mark.parametrize("count", range(DEPTH - 1))
def test_the_peak_falls_by_what_was_moved(count: int, resident: bool) -> None:
    """Kept, a layer leaves 9 inputs from forward to backward: two tensors of 4, and its result, which the next one
    saves. Moved, with nothing under way when backward begins, it leaves none."""
    fall = peak(plan_with([], resident)) - peak(plan_with(of_layers(count), resident))
    assert fall == count * 9 * INPUT


# In reverse order the layer before the last that is kept has saved 1, 4 and 4 inputs: (window, what of that fits).
@pytest.mark.parametrize(("window", "ahead"), [(1, 1), (4, 1), (5, 5), (8, 5), (9, 9), (10, 10), (13, 10), (14, 14)])
def test_what_is_brought_back_ahead_takes_the_window_and_no_more(window: int, ahead: int) -> None:
    named = of_layers(3)
    rise = peak(plan_with(named, True, reload_window=window * INPUT)) - peak(plan_with(named, True))
    assert rise == ahead * INPUT


@WHERE
def test_the_input_of_a_recomputed_block_is_moved(resident: bool) -> None:
    """Layer 1 runs again; what goes into it is made by layer 0 and saved by nobody else."""
    again = LAYERS[1:2]
    inputs = of_layers(1, lambda one: one.nbytes == (INPUT,))
    assert len(inputs) == 1
    fall = peak(plan_with([], resident, again)) - peak(plan_with(inputs, resident, again))
    assert fall == INPUT
    plan = plan_with(inputs, resident, again)
    forebay.close(assert_same_training(TOWER, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device="cpu"))


@WHERE
def test_a_budget_that_holds_the_plan_holds_the_step(resident: bool) -> None:
    """At the peak to the byte, and not with one byte less."""
    plan = plan_with(of_layers(3), resident, reload_window=5 * INPUT)
    most = peak(plan)
    assert peak(replace(plan, device=most), most) == most
    with pytest.raises(DeviceOutOfMemory):
        peak(replace(plan, device=most - 1), most - 1)
    gc.collect()  # the model of the step that had no room, and with it the mode that counts


@pytest.mark.parametrize("arena", [0, 4 * INPUT, 9 * INPUT - 64, 27 * INPUT - 64])
def test_what_has_no_room_on_the_host_stays_on_the_device(arena: int) -> None:
    """First come, first served: of 3 times 4, 4 and 1 inputs as many as fit are moved, and the rest are counted."""
    named = of_layers(3)
    assert host_formula(named) == 27 * INPUT
    model = TOWER.model(torch.float32)
    plan = moving(plan_of(find_blocks(model).model, (), resident=True), named, arena=arena)
    model = assert_same_training(TOWER, torch.float32, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    report = forebay.report(model).timeline
    free, kept = arena, 0
    for nbytes in (n for one in named for n in one.nbytes):
        if nbytes <= free:
            free -= nbytes
        else:
            kept += 1
    passes = 2
    assert report.counters["activations_kept"] == passes * kept
    assert sum(e.what.startswith("offload ") for e in report.events) == passes * (9 - kept)
    forebay.close(model)
