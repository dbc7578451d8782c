"""What updates on the device take there, and over the link, to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forebay
from forebay.arenas import DISK_BLOCK, UPDATE_RING, arenas_of
from forebay.memory import Kind, Tier, TierUsage
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane, Timeline
from tests.parity.square import AMPLE, BLOCKS, ELEMENTS, STATES, STEPS, WIDTH, WIDTHS, network, plan_for, train


def used(timeline: Timeline) -> dict[Tier, TierUsage]:
    return {usage.tier: usage for usage in timeline.tiers}


@pytest.mark.parametrize(("chunks", "cells"), [(1, 1), (1, 2), (4, 3)])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_on_the_device(dtype: torch.dtype, chunks: int, cells: int, tmp_path: Path) -> None:
    """A cell is a chunk of states, its parameters and its gradients; beside all cells, one chunk of gradients is
    widened to fp32. Beside the window there is what updates at home leave there: two slots, at most a gradient that
    is under way and one that is made, and a few activations of two rows."""
    width, states, widened = (n * ELEMENTS // chunks for n in WIDTHS[dtype])
    plan = plan_for(dtype, Tier.HOST, tmp_path, there=BLOCKS, chunks=chunks, cells=cells)
    window = cells * (states + 2 * width) + widened
    assert plan.streaming.update_window == window
    gradient, rows = ELEMENTS * WIDTHS[dtype][0], 2 * WIDTH * WIDTHS[dtype][0]
    for one, expected in ((plan, window), (plan_for(dtype, Tier.HOST, tmp_path, chunks=chunks), 0)):
        device = used(train(dtype, one))[Tier.DEVICE]
        assert device.at_peak[Kind.STAGING] == expected
        assert 2 * gradient <= device.peak - expected < 4 * gradient + 6 * rows


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_at_home(dtype: torch.dtype, home: Tier, tmp_path: Path) -> None:
    """What is at home is there once, as with updates there; only the workspace in which the host widens gradients is
    missing where it updates nothing."""
    width, states, workspace = (n * ELEMENTS for n in WIDTHS[dtype])
    for there in (0, 1, BLOCKS):
        plan = plan_for(dtype, home, tmp_path, there=there)
        host = used(train(dtype, plan))[Tier.HOST]
        # One gradient waits to be added to what has landed before.
        staging = width + (workspace if there < BLOCKS else 0)
        homes = BLOCKS * (width + states)
        if home is Tier.DISK:
            staging += 2 * width + UPDATE_RING * states + DISK_BLOCK
            homes = 0
        assert host.peak == plan.host == homes + BLOCKS * width + staging


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_over_the_link(dtype: torch.dtype, chunks: int, tmp_path: Path) -> None:
    """More than with updates at home, for each element of a block: to the device all states, the gradient, and the
    parameter if it has no master; back all states and the parameter. That is 16 and 12 bytes in fp32, 14 and 14 in
    16 bits with a master."""
    width, states, _ = WIDTHS[dtype]
    up, down = states + width + (width if dtype is torch.float32 else 0), states + width
    assert (up, down) == ((16, 12) if dtype is torch.float32 else (14, 14))
    home = train(dtype, plan_for(dtype, Tier.HOST, tmp_path, chunks=chunks)).moved()
    for there in (1, BLOCKS):
        moved = train(dtype, plan_for(dtype, Tier.HOST, tmp_path, there=there, chunks=chunks)).moved()
        elements = STEPS * there * ELEMENTS
        assert moved[Lane.H2D] - home[Lane.H2D] == up * elements
        assert moved[Lane.D2H] - home[Lane.D2H] == down * elements
        # What an update touches is the same wherever it runs: states and parameters in and out, gradients in.
        assert moved[Lane.DEVICE_UPDATE] == (2 * states + 3 * width) * elements
        assert moved[Lane.DEVICE_UPDATE] + moved[Lane.UPDATE] == home[Lane.UPDATE]


def test_disk_bytes_are_those_of_an_update_at_home(tmp_path: Path) -> None:
    home = train(torch.bfloat16, plan_for(torch.bfloat16, Tier.DISK, tmp_path)).moved()
    there = train(torch.bfloat16, plan_for(torch.bfloat16, Tier.DISK, tmp_path, there=BLOCKS)).moved()
    for lane in (Lane.DISK_READ, Lane.DISK_WRITE):
        assert there[lane] == home[lane] > 0


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
def test_what_the_device_copies_from_would_like_to_be_page_locked(home: Tier, tmp_path: Path) -> None:
    """States at home on the host of blocks that are updated on the device, or the ring through which those on disk
    pass; not the states of blocks that are updated at home."""
    states = 8 * ELEMENTS
    pinnable = []
    for there in (0, 1):
        plan = plan_for(torch.float32, home, tmp_path, there=there)
        model = find_blocks(network(torch.float32)).model
        sizes = arenas_of(model, plan, STATES)
        pinnable.append(sum(nbytes for _, nbytes in sizes.pinnable))
    assert pinnable[1] - pinnable[0] == (states if home is Tier.HOST else UPDATE_RING * states)


def test_the_window_is_in_the_plan(tmp_path: Path) -> None:
    """A plan that promises less device memory than slots and window take is refused before anything is opened."""
    plan = plan_for(torch.float32, Tier.HOST, tmp_path, there=BLOCKS)
    sizes = arenas_of(find_blocks(network(torch.float32)).model, plan, STATES)
    assert sizes.device == sum(plan.streaming.slots) + plan.streaming.update_window
    model = network(torch.float32)
    short = replace(plan, device=sizes.device - 1)
    with pytest.raises(forebay.errors.ConfigError, match="made for another model or optimizer"):
        forebay.prepare(model, torch.optim.AdamW(model.parameters()), plan=short, device_memory=AMPLE, device="cpu")
