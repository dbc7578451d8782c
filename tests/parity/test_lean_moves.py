"""States of few bytes where updates run ahead of their step: the same bits as at home."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forebay
from forebay.optim import AdamW, Lion
from forebay.plans import Update
from forebay.states import Moments, moment_states
from tests.null.updating import at_home
from tests.parity.speculating import AMPLE, speculating
from tests.parity.test_delays import NARROW

KINDS: tuple[Moments | None, ...] = ("bfloat16", "8bit", "4bit", None)
"""Moments of AdamW; None: Lion."""


@pytest.mark.thinned(6)
@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_ahead_of_their_step(moments: Moments | None, dtype: torch.dtype, tmp_path: Path) -> None:
    states = ("exp_avg",) if moments is None else moment_states(("exp_avg", "exp_avg_sq"), moments)
    ahead = speculating(NARROW, dtype, disk=True, host_slots=2, states=states)
    assert ahead.updated(Update.AHEAD)
    left = []
    for plan in (at_home(ahead), ahead):
        model = NARROW.model(dtype)
        optimizer: torch.optim.Optimizer = (
            Lion(model.parameters()) if moments is None else AdamW(model.parameters(), moments=moments)
        )
        model, optimizer = forebay.prepare(
            model, optimizer, plan=plan, device_memory=AMPLE, disk=f"{tmp_path}:64MiB", device="cpu"
        )
        for step in range(3):
            model(**NARROW.inputs(step, dtype))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        left.append((dict(forebay.parameters(model)), optimizer.state_dict()["state"]))
        forebay.close(model)
    (first, first_states), (found, found_states) = left
    assert all(torch.equal(first[n], found[n]) for n in first)
    assert all(torch.equal(value, found_states[i][n]) for i, s in first_states.items() for n, value in s.items())
