"""The peaks that a plan predicts are the peaks that are measured: not over by a byte, not under without a reason."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas, home_nbytes
from forebay.budgets import Budget, DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.errors import DeviceOutOfMemory
from forebay.layout import align
from forebay.memory import Kind, Tier, TierUsage
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from tests.parity.compare import adamw
from tests.parity.models import CASES, Case, tokens
from tests.parity.offloading import trace_of
from tests.parity.replay import footprint_of

AMPLE = 64 * 2**20
STATES = ("exp_avg", "exp_avg_sq")

PAIRS = [(name, dtype) for name in ("llama", "llama-tied") for dtype in (torch.float32, torch.bfloat16)]
each_pair = pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=[f"{n}-{str(d)[6:]}" for n, d in PAIRS])


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """A device of the test's own: its peak can be read and reset."""
    made = CpuDevice(AMPLE)
    yield made
    made.close()


def prepared(case: Case, dtype: torch.dtype, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = case.model(dtype)
    how = {"device": "cpu", **how}
    return forebay.prepare(model, adamw(list(model.parameters())), case.inputs(0, dtype), **how)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, dtype: torch.dtype) -> None:
    """Two steps of two micro-batches. The model's output lives on while the next forward runs, as the plan assumes."""
    for step in range(2):
        for micro in range(2):
            output = model(**case.inputs(2 * step + micro, dtype))
            output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def usage(model: nn.Module) -> Mapping[Tier, TierUsage]:
    return {u.tier: u for u in forebay.report(model).timeline.tiers}


def assert_peaks(model: nn.Module) -> None:
    """The device's peak is the plan's, but for gradients and activations that might have been under way then.

    The plan adds up what can be there at once: slots, resident blocks with gradients and states, buffers, the
    activations and temporaries of the profile, a full gradient window, and of activations that move a full window in
    one direction. All but the windows is there at the peak to the byte: the activations are those of the profile, and
    what is resident has its gradients since the first micro-batch. In these models the peak comes before the backward's
    first gradient, so that window is empty but for what the micro-batch before may have left under way; and copies
    that are made between two ops are over when the next one begins.
    """
    plan, peaks = forebay.report(model).plan, usage(model)
    peak = peaks[Tier.DEVICE].peak
    how = plan.streaming
    windows = how.gradient_window + max(how.offload_window, how.reload_window)
    assert plan.device - windows <= peak <= plan.device <= plan.budget.device
    assert (peaks[Tier.HOST].peak, peaks[Tier.DISK].peak) == (plan.host, plan.disk)


# Training.


@pytest.mark.thinned(2)
@each_pair
def test_streamed(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    model, optimizer = prepared(case, dtype, policy="stream", device_memory=AMPLE)
    train(model, optimizer, case, dtype)
    assert_peaks(model)
    plan, shapes = forebay.report(model).plan, find_blocks(case.model(dtype)).model
    slots = 3 * max(block.nbytes for block in shapes.blocks)
    need = footprint_of(trace_of(case, dtype))
    assert plan.device == slots + need.peak + shapes.buffer_nbytes  # no gradient is under way at the peak
    at_peak = usage(model)[Tier.DEVICE].at_peak
    assert (at_peak[Kind.PARAMETER], at_peak[Kind.BUFFER]) == (slots, shapes.buffer_nbytes)
    assert at_peak[Kind.GRADIENT] == at_peak[Kind.STATE] == 0
    forebay.close(model)


# Each share with each model and with each dtype.
SHARES = [(*pair, share) for share in (1.0, 0.8, 0.6, 0.0) for pair in (PAIRS[::3] if share > 0.7 else PAIRS[1:3])]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("name", "dtype", "share"), SHARES, ids=[f"{n}-{str(d)[6:]}-{s}" for n, d, s in SHARES])
def test_auto_at_several_budgets(name: str, dtype: torch.dtype, share: float) -> None:
    """From everything resident (1) to the least that is accepted (0)."""
    case = CASES[name]
    most, least = plan_of(case, dtype, "auto", AMPLE).device, least_of(case, dtype)
    budget = least + int(share * (most - least))
    model, optimizer = prepared(case, dtype, device_memory=budget)
    train(model, optimizer, case, dtype)
    assert_peaks(model)
    resident = sum(p.resident for p in forebay.report(model).plan.placements)
    assert (resident == 0) is (share == 0.0)
    if share == 0.0:
        plan = forebay.report(model).plan
        assert len(plan.streaming.slots) == 1 and plan.device == budget
    forebay.close(model)


@cache
def plan_of(case: Case, dtype: torch.dtype, policy: str, device_memory: int) -> Plan:
    model, _ = prepared(case, dtype, policy=policy, device_memory=device_memory)
    plan = forebay.report(model).plan
    forebay.close(model)
    return plan


def least_of(case: Case, dtype: torch.dtype) -> int:
    """Bytes of one slot for the largest block and of what the step needs beside parameters."""
    shapes = find_blocks(case.model(dtype)).model
    need = footprint_of(trace_of(case, dtype))
    return max(block.nbytes for block in shapes.blocks) + shapes.buffer_nbytes + need.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES["llama"]
    model, optimizer = prepared(case, dtype, **on_disk(case, dtype, tmp_path))
    train(model, optimizer, case, dtype)
    assert_peaks(model)
    forebay.close(model)


def on_disk(case: Case, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """Everything on disk, in budgets that are the plan's own figures."""
    shapes, made = find_blocks(case.model(dtype)).model, plan_of(case, dtype, "stream", AMPLE)
    placements = tuple(replace(p, parameters=Tier.DISK, states=Tier.DISK) for p in made.placements)
    streaming = replace(made.streaming, host_slots=(max(map(home_nbytes, shapes.blocks)),), update_chunk=2048)
    sizes = arenas(shapes, placements, streaming, STATES)
    # A block of the disk is in whole pages; its states are two or three streams of fp32 in chunks of whole pages.
    assert sizes.disk_parameters == sum(align(block.nbytes, 4096) for block in shapes.blocks)
    disk = DiskBudget(str(folder), sizes.disk)
    plan = replace(
        made,
        budget=Budget(made.device, sizes.host, disk=disk),
        placements=placements,
        streaming=streaming,
        host=sizes.host,
        disk=sizes.disk,
    )
    return {
        "plan": plan,
        "device_memory": plan.device,
        "host_memory": plan.host,
        "disk": f"{folder}:{plan.disk}B",
    }


# Beside training.


@each_pair
def test_evaluation_takes_less_than_training(name: str, dtype: torch.dtype, device: CpuDevice) -> None:
    """Without backward nothing is saved: beside slots and buffers there are only the temporaries of one op at a time
    and the model's output."""
    case = CASES[name]
    model, optimizer = prepared(case, dtype, policy="stream", device_memory=AMPLE, device=device)
    train(model, optimizer, case, dtype)
    trained, plan = device.usage().peak, forebay.report(model).plan
    host = usage(model)[Tier.HOST].peak
    device.reset_peak()
    model.eval()
    with torch.no_grad():
        output = model(**case.inputs(9, dtype))
    evaluated = device.usage()
    always = sum(plan.streaming.slots) + find_blocks(case.model(dtype)).model.buffer_nbytes
    assert always + output["logits"].nbytes < evaluated.peak < trained
    assert evaluated.at_peak[Kind.ACTIVATION] == evaluated.at_peak[Kind.GRADIENT] == 0
    assert usage(model)[Tier.HOST].peak == host
    del output
    assert device.usage().live == always
    forebay.close(model)


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_state_dict_adds_nothing_to_the_tiers(where: str, tmp_path: Path, device: CpuDevice) -> None:
    """The model's is a view of the bytes at home, or, from disk, a copy that is the caller's. The optimizer's is a
    copy in any case, of 8 bytes an element (12 with a master), as a plain optimizer's would be before a save."""
    case, dtype = CASES["llama"], torch.bfloat16
    how = on_disk(case, dtype, tmp_path) if where == "disk" else {"policy": "stream", "device_memory": AMPLE}
    model, optimizer = prepared(case, dtype, **{**how, "device": device})
    train(model, optimizer, case, dtype)
    forebay.synchronize(model)
    before = {tier: (u.live, u.peak) for tier, u in usage(model).items()}
    first, second = model.state_dict(), model.state_dict()
    states = optimizer.state_dict()["state"]
    assert {tier: (u.live, u.peak) for tier, u in usage(model).items()} == before
    for name, tensor in first.items():
        assert (tensor.data_ptr() == second[name].data_ptr()) is (where == "host"), name
    elements = sum(parameter.numel() for parameter in model.parameters())
    copied = sum(t.nbytes for state in states.values() for name, t in state.items() if name != "step")
    assert copied == 12 * elements
    forebay.close(model)


@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_a_forward_without_backward_leaves_nothing(policy: str, device: CpuDevice) -> None:
    """Its graph goes with its loss, at once: nothing in it holds itself, so that no garbage collection is needed."""
    case, dtype = CASES["llama"], torch.float32
    model, optimizer = prepared(case, dtype, policy=policy, device_memory=AMPLE, device=device)
    # One step and no more: from the third on the ledger would rest.
    model(**tokens(1)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    forebay.synchronize(model)
    before = device.usage().live
    gc.disable()
    try:
        loss = model(**tokens(0)).loss
        assert device.usage().live > before
        del loss
        assert device.usage().live == before
    finally:
        gc.enable()
    forebay.close(model)


# Too large a batch.


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    ids = tokens(0)["input_ids"]
    ids = ids.repeat(-(-rows // len(ids)), 1)[:rows]
    return {"input_ids": ids, "labels": ids}


def assert_same_step(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module, step: int) -> None:
    values = forebay.parameters(model)
    reference.zero_grad()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])
    loss = model(**tokens(step)).loss
    loss.backward()
    expected = reference(**tokens(step)).loss
    expected.backward()
    assert torch.equal(loss, expected)
    gradients = forebay.gradients(model)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad), name
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("policy", ["stream", "auto"])
def test_a_batch_larger_than_planned_is_refused_by_name_and_the_next_one_trains(policy: str) -> None:
    case, dtype = CASES["llama"], torch.float32
    budget = plan_of(case, dtype, policy, AMPLE).device
    model, optimizer = prepared(case, dtype, policy=policy, device_memory=budget)
    reference = case.model(dtype)
    assert_same_step(model, optimizer, reference, 0)
    with pytest.raises(DeviceOutOfMemory) as caught:
        model(**batch_of(64))
    # Which op in which block, what is held, and what to change.
    caught.match(
        r"device memory: block model\.\S+ in forward: the result \(\d+, .*\) of aten\.\S+ needs .* activation .*; "
        r"this forward has input_ids \(64, 16\), .* made for input_ids \(2, 16\), .*: give prepare\(\) the batch that "
        r"takes the most; or use a smaller batch or a shorter sequence, or raise device_memory"
    )
    assert caught.value.needed > caught.value.allowed == budget
    torch.empty(2 * budget)  # what happens between a failure and the next forward is not charged
    del caught
    optimizer.zero_grad()
    for step in range(1, 3):
        assert_same_step(model, optimizer, reference, step)
    assert usage(model)[Tier.DEVICE].peak <= budget
    forebay.close(model)


def test_a_batch_that_only_backward_has_no_room_for(device: CpuDevice) -> None:
    """The budget lies between the peaks of its forward and of its backward, measured on a device with room."""
    case, dtype, rows = CASES["llama"], torch.float32, 16
    plan = plan_of(case, dtype, "stream", AMPLE)
    model, _ = prepared(case, dtype, plan=plan, device_memory=AMPLE, device=device)
    loss = model(**batch_of(rows)).loss
    forward = device.usage().peak
    loss.backward()
    backward = device.usage().peak
    forebay.close(model)
    assert plan.device < forward < backward

    budget = (forward + backward) // 2
    model, optimizer = prepared(case, dtype, plan=plan, device_memory=budget)
    reference = case.model(dtype)
    loss = model(**batch_of(rows)).loss
    with pytest.raises(DeviceOutOfMemory, match=r"the result \(.*\) of aten\.") as caught:
        loss.backward()
    del caught, loss
    optimizer.zero_grad()
    for step in range(2):
        assert_same_step(model, optimizer, reference, step)
    assert usage(model)[Tier.DEVICE].peak <= budget
    forebay.close(model)
