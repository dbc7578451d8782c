"""Blocks that stay in their slots from forward to backward, and experts apart from what is dense: the same numbers as
plain PyTorch, and as many fetches as foretold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forebay
from forebay.budgets import Budget
from forebay.lowering import lower
from forebay.memory import Tier
from forebay.timeline import Lane
from forebay.units import MiB
from tests.null.planning import machine
from tests.parity.compare import assert_same_training
from tests.parity.models import CASES
from tests.parity.observed import by_lane, lowered, observed
from tests.parity.offloading import trace_of
from tests.parity.recomputing import AMPLE
from tests.parity.test_random_plans import WIDE

DEVICE = 2 * MiB
"""Of ``WIDE``, 12 layers of 257 KiB and a small head, half of the layers fit beside all that is no parameter."""

BLOCKS = 13
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(2)]


@pytest.mark.parametrize("policy", ["patrickstar", "angel-ptm"])
def test_blocks_that_stay_give_the_same_numbers(policy: str) -> None:
    model = assert_same_training(
        WIDE, torch.float32, steps=2, policy=policy, device_memory=DEVICE, host_memory=AMPLE, device="cpu"
    )
    report = forebay.report(model)
    peaks = report.timeline.peaks
    assert 3 < len(report.plan.streaming.slots) < BLOCKS - 1
    assert peaks[Tier.DEVICE] <= report.plan.device <= DEVICE and peaks[Tier.HOST] == report.plan.host
    forebay.close(model)


@pytest.mark.parametrize("policy", ["patrickstar", "angel-ptm"])
def test_what_stays_is_not_fetched_again(policy: str) -> None:
    """Forward fetches all blocks. Of n slots one has the head at its end and n - 1 the last layers, which backward
    finds there; the first layer is not asked for again, since nobody wants the gradient of its input."""
    plan = forebay.plan(trace_of(WIDE, torch.float32), machine(kind="cpu"), Budget(DEVICE, AMPLE), policy)
    slots, events = len(plan.streaming.slots), by_lane(observed(WIDE, plan).last)
    assert len(events[Lane.H2D]) == BLOCKS + (BLOCKS - 1) - slots
    assert events == lowered(lower(trace_of(WIDE, torch.float32), plan))


def test_angel_trains_from_disk(tmp_path: Path) -> None:
    """The host has room for the gradients and half of the parameters: all states are on disk, and the other half."""
    model = assert_same_training(
        WIDE,
        torch.float32,
        steps=1,
        policy="angel-ptm",
        device_memory=DEVICE,
        host_memory=11 * MiB,
        disk=f"{tmp_path}:32MiB",
        device="cpu",
    )
    plan = forebay.report(model).plan
    assert {p.states for p in plan.placements} == {Tier.DISK}
    assert any(p.parameters is Tier.DISK for p in plan.placements) and len(plan.streaming.slots) > 3
    forebay.close(model)


def test_experts_apart_from_their_layers_stream_and_the_rest_stays() -> None:
    """``blocks`` makes them blocks of their own."""
    model = assert_same_training(
        CASES["mixtral"],
        torch.float32,
        steps=2,
        policy="moesys",
        blocks=EXPERTS,
        device_memory=AMPLE,
        host_memory=AMPLE,
        device="cpu",
    )
    placements = forebay.report(model).plan.placements
    assert {p.block for p in placements if not p.resident} == set(EXPERTS) and len(placements) > len(EXPERTS)
    forebay.close(model)


def test_experts_that_are_blocks_are_fetched_as_routed() -> None:
    """Two micro-batches, each of which goes to one of four experts: the others never cross the link."""
    case = CASES["experts"]
    model = assert_same_training(
        case, torch.float32, steps=1, policy="moesys", device_memory=AMPLE, host_memory=AMPLE, device="cpu"
    )
    report = forebay.report(model)
    pictures = [case.inputs(micro, torch.float32)["pixel_values"] for micro in range(2)]
    routed = {f"fetch body.experts.{int(one.sum().abs().item() * 10) % 4}" for one in pictures}
    assert {event.what for event in report.timeline.events if event.lane is Lane.H2D} == routed
    assert {p.block for p in report.plan.placements if not p.resident} == {f"body.experts.{i}" for i in range(4)}
    forebay.close(model)
