"""Parts of tensors that leave, or become codes: the bytes of every tier are those of the formula, the numbers those of
plain PyTorch, and nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forebay
from forebay.compression import encoded_nbytes
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import SessionClosed
from forebay.layout import PAGE, align
from forebay.memory import ALIGNMENT, Kind, Tier
from forebay.plans import Plan
from forebay.runtime.hooks import session_of
from forebay.treatments import Fate, Split, Treatment
from tests.parity.bits import bits_plan, opened
from tests.parity.compare import assert_same_training
from tests.parity.recomputing import AMPLE
from tests.parity.test_bits import live_and_peak
from tests.parity.test_offload import counters
from tests.parity.test_offload_memory import DEPTH, INPUT, TOWER

SIZES = (4 * INPUT, 4 * INPUT, INPUT)
"""What a layer saves: two tensors of four inputs, and its result."""

OPS = (("aten.addmm.default", 0), ("aten.gelu.default", 0), ("aten.addmm.default", 1))
SPLIT = pytest.mark.parametrize("split", [Split(1, 2), Split(3, 4), Split(2, 7)], ids=str)
COUNT = DEPTH - 1


def parted(split: Split | None, fate: Fate = Fate.OFFLOAD, bits: int = 0, count: int = COUNT) -> Plan:
    """All that the first ``count`` layers save is treated, of each the parts ``split``; one after the other moves. The
    host has room for just that."""
    treatments: dict[str, Sequence[Treatment]] = {
        f"layers.{i}": [Treatment(op, number, fate, bits, split) for op, number in OPS] for i in range(count)
    }
    plan = bits_plan(TOWER, treatments, elements=INPUT, windows=0)
    arena = count * sum(n if split is None else part(n, split) for n in SIZES) if fate is Fate.OFFLOAD else 0
    return replace(plan, streaming=replace(plan.streaming, host_activations=arena))


def part(nbytes: int, split: Split) -> int:
    return align(-(-nbytes * split.treated // split.parts), ALIGNMENT)


@SPLIT
def test_what_is_not_moved_stays_and_the_host_has_the_rest(split: Split) -> None:
    """Between forward and backward a layer leaves what of its tensors stays. When backward begins, nothing of the
    first layers is back: the peak falls by as much."""
    plain_live, plain_peak, _ = live_and_peak(bits_plan(TOWER, {}))
    live, peak, host = live_and_peak(parted(split))
    gone = COUNT * sum(part(n, split) for n in SIZES)
    assert plain_live - live == plain_peak - peak == host == gone


@SPLIT
def test_codes_of_a_part_stay_beside_the_rest(split: Split) -> None:
    plain_live, _, _ = live_and_peak(bits_plan(TOWER, {}))
    live, _, host = live_and_peak(parted(split, Fate.KEEP, 8))
    coded = [part(n, split) for n in SIZES]
    assert plain_live - live == COUNT * sum(n - encoded_nbytes(n // 4, 4, 8) for n in coded)
    assert host == 0


def test_the_disk_has_whole_pages_of_parts(tmp_path: Path) -> None:
    split = Split(3, 4)
    treatments = {"layers.0": [Treatment(op, number, Fate.DISK, 0, split) for op, number in OPS]}
    plan = bits_plan(TOWER, treatments, elements=INPUT, folder=tmp_path)
    model, _, _ = opened(TOWER, plan)
    loss = model(**TOWER.inputs(0, torch.float32))["loss"]
    attachment = session_of(model)
    assert attachment is not None
    assert attachment.session.stash.taken == sum(align(part(n, split), PAGE) for n in SIZES)
    loss.backward()
    disk = forebay.report(model).timeline.usage(Tier.DISK)
    assert disk.at_peak[Kind.ACTIVATION] == plan.streaming.disk_activations
    assert counters(model) == 0
    forebay.close(model)


def test_what_has_no_room_stays_whole() -> None:
    plan = parted(Split(1, 2))
    plan = replace(plan, streaming=replace(plan.streaming, host_activations=0))
    model, _, device = opened(TOWER, plan)
    for step in range(2):
        loss = model(**TOWER.inputs(step, torch.float32))["loss"]
        loss.backward()
    assert counters(model) == 2 * 3 * COUNT
    forebay.close(model)
    del loss
    assert device.ledger.live == 0


@pytest.mark.parametrize("split", [Split(1, 2), Split(5, 6)], ids=str)
def test_late_transfers_change_nothing(split: Split) -> None:
    """Windows that hold several, so that parts come back ahead of time into storages that are not whole yet."""
    plan = parted(split, count=DEPTH)
    plan = replace(plan, streaming=replace(plan.streaming, offload_window=9 * INPUT, reload_window=14 * INPUT))
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=4, max_seconds=0.002))
    try:
        model = assert_same_training(TOWER, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device=device)
        forebay.close(model)
    finally:
        device.close()


def test_a_second_backward_over_the_same_graph() -> None:
    model, _, _ = opened(TOWER, parted(Split(1, 3)))
    loss = model(**TOWER.inputs(0, torch.float32))["loss"]
    loss.backward(retain_graph=True)
    once = {name: gradient.clone() for name, gradient in forebay.gradients(model).items()}
    loss.backward()
    twice = forebay.gradients(model)
    assert all(torch.equal(twice[name], once[name] + once[name]) for name in once)
    del loss
    forebay.close(model)


@pytest.mark.parametrize("fate", [Fate.OFFLOAD, Fate.DISK])
def test_nothing_is_left_of_a_graph_that_goes(fate: Fate, tmp_path: Path) -> None:
    """Whether its backward ran or not, or failed half way."""
    leaf = torch.ones((), requires_grad=True)
    oldest = 1.0 * leaf
    treatments = {f"layers.{i}": [Treatment(*op, fate, 0, Split(1, 2)) for op in OPS] for i in range(DEPTH)}
    plan = bits_plan(TOWER, treatments, elements=INPUT, folder=tmp_path)
    model, optimizer, device = opened(TOWER, plan)
    attachment = session_of(model)
    assert attachment is not None
    standing = device.ledger.live
    for step in range(4):
        handle = model.layers[1].register_full_backward_pre_hook(refuse) if step == 2 else None
        loss = model(**TOWER.inputs(step, torch.float32))["loss"]
        if step == 1:
            loss.backward()
        elif handle is not None:
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
        del loss
        optimizer.zero_grad()
        forebay.synchronize(model)
        # The engine keeps what a backward that failed has left until a later one comes to an older node.
        torch.autograd.grad(oldest, leaf, retain_graph=True)
        gc.collect()
        assert attachment.session.stash.taken == 0
        assert device.ledger.live == standing
    forebay.close(model)
    assert device.ledger.live == 0


def refuse(module: object, gradient: object) -> None:
    raise ArithmeticError("no gradient for this one")


def test_backward_after_close_says_so() -> None:
    model, _, device = opened(TOWER, parted(Split(1, 2)))
    loss = model(**TOWER.inputs(0, torch.float32))["loss"]
    forebay.close(model)
    with pytest.raises(SessionClosed, match="went when the model was closed"):
        loss.backward()
    del loss
    assert device.ledger.live == 0
