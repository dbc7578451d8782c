"""Updates in backward with a card: gradients wait on the way to the host for updates there, and no number changes."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

import forebay
from forebay.device.base import Delays
from forebay.device.cuda import CudaDevice
from forebay.device.delays import RandomDelays
from forebay.plans import Plan
from tests.null.updating import at_home
from tests.parity.content import states_of
from tests.parity.in_backward import Stays, in_backward
from tests.parity.models import CASES, Case
from tests.parity.test_delays import NARROW

pytestmark = pytest.mark.gpu

BUDGET = 2 * 2**30


def left(case: Case, plan: Plan, folder: str | None, delays: Delays | None) -> dict[str, torch.Tensor]:
    """All that three steps leave, with nothing read in between."""
    device = CudaDevice(0, BUDGET, delays=delays)
    model = case.model(torch.bfloat16)
    model, optimizer = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        plan=plan,
        device_memory=BUDGET,
        disk=folder,
        device=device,
    )
    for step in range(3):
        model(**{k: v.to("cuda") for k, v in case.inputs(step, torch.bfloat16).items()})["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = {f"parameter {n}": p.cpu().clone() for n, p in forebay.parameters(model).items()}
    seen |= states_of(optimizer)
    forebay.close(model)
    assert device.ledger.live == 0
    device.close()
    return seen


@pytest.mark.parametrize("stays", get_args(Stays))
@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
@pytest.mark.parametrize("name", ["narrow", "llama-tied"])
def test_as_with_a_step_after_backward(name: str, disk: bool, stays: Stays, tmp_path: Path) -> None:
    """On the card as well, where blocks stay there (``stays``)."""
    case = NARROW if name == "narrow" else CASES[name]
    plan, folder = in_backward(case, torch.bfloat16, disk=disk, stays=stays), f"{tmp_path}:64MiB" if disk else None
    expected = left(case, at_home(plan, host=BUDGET), folder, None)
    made = left(case, plan, folder, RandomDelays(0, max_seconds=0.002))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[n], tensor) for n, tensor in expected.items())
