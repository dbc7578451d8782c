"""Every published policy for model states trains a Llama-shaped model with plain PyTorch's numbers, bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import forebay
from forebay.memory import Tier
from forebay.planners import STATES
from forebay.plans import Budget, Plan
from forebay.units import MiB
from tests.null.planning import machine
from tests.parity.compare import assert_same_training
from tests.parity.models import CASES
from tests.parity.offloading import trace_of
from tests.parity.recomputing import AMPLE
from tests.parity.test_random_plans import WIDE

CASE = CASES["llama"]


@cache
def planned(policy: str) -> Plan:
    return forebay.plan(trace_of(CASE, torch.float32), machine(kind="cpu"), Budget(AMPLE, AMPLE), policy)


@pytest.mark.parametrize("policy", STATES)
def test_it_trains_with_the_same_numbers(policy: str) -> None:
    """With the device that zero-offload asks for: too little for everything, enough for each of them."""
    device = planned("zero-offload").device
    assert device < planned("resident").device
    model = assert_same_training(
        CASE, torch.float32, steps=2, policy=policy, device_memory=device, host_memory=AMPLE, device="cpu"
    )
    report = forebay.report(model)
    peaks = {usage.tier: usage.peak for usage in report.timeline.tiers}
    assert report.plan.planner == policy and any(not p.resident for p in report.plan.placements)
    assert peaks[Tier.DEVICE] <= report.plan.device <= device and peaks[Tier.HOST] == report.plan.host
    forebay.close(model)


def test_zero_infinity_trains_from_disk(tmp_path: Path) -> None:
    """The host has room for the gradients and half of the parameters: all states are on disk, and the other half."""
    model = assert_same_training(
        WIDE,
        torch.float32,
        steps=2,
        policy="zero-infinity",
        device_memory=2 * MiB,
        host_memory=11 * MiB,
        disk=f"{tmp_path}:32MiB",
        device="cpu",
    )
    report = forebay.report(model)
    peaks = {usage.tier: usage.peak for usage in report.timeline.tiers}
    placements = report.plan.placements
    assert {p.states for p in placements} == {Tier.DISK} and any(p.parameters is Tier.DISK for p in placements)
    assert peaks[Tier.DISK] == report.plan.disk and peaks[Tier.HOST] == report.plan.host <= 11 * MiB
    assert not report.plan.speculate
    forebay.close(model)
