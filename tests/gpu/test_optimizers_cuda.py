"""Optimizers of whole parameters, of parameters without masters, and those that torch does not fuse, on a card: the
same bits wherever an update runs there, and the numbers of a plain model on the card."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import forebay
from forebay.device.cuda import CudaDevice
from forebay.plans import Update
from tests.parity.content import states_of
from tests.parity.test_adafactor_prepared import MAKERS, batch, groups_of, network, streamed_by
from tests.parity.test_muon_prepared import muon
from tests.parity.test_stochastic_rounding import MAKERS as DRAWN

pytestmark = pytest.mark.gpu

BUDGET = 2 * 2**30
STEPS = 3

ONE_BY_ONE = {
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
}
"""As forebay calls torch's functions, which is not torch's default on a card."""

EVERY = {
    **{
        name: (torch.float32, lambda m, make=make: make(groups_of(m)))
        for name, make in MAKERS.items()
        if not name.startswith("came")
    },
    "muon": (torch.float32, muon),
    "muon-bf16": (torch.bfloat16, muon),
    **{
        name: (torch.float32, lambda m, make=make: make(m.parameters(), lr=1e-2, foreach=False))
        for name, make in ONE_BY_ONE.items()
    },
    **{f"{name}-sr": (torch.bfloat16, lambda m, make=make: make(m.parameters())) for name, make in DRAWN.items()},
}


def left(name: str, **prepare: Any) -> dict[str, torch.Tensor]:
    """All that three steps leave."""
    dtype, make = EVERY[name]
    device, model = CudaDevice(0, BUDGET), network(dtype)
    optimizer = make(model)  # type: ignore[no-untyped-call]
    model, optimizer = forebay.prepare(
        model, optimizer, batch(0).to("cuda"), device_memory=BUDGET, device=device, **prepare
    )
    for step in range(STEPS):
        model(batch(step).to("cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = {f"parameter {n}": p.cpu().clone() for n, p in forebay.parameters(model).items()}
    seen |= states_of(optimizer)
    peak = device.usage().peak
    forebay.close(model)
    device.close()
    assert peak <= BUDGET
    return seen


@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith(("bfloat16", "8bit", "4bit"))])
def test_brought_to_the_card_as_if_they_stayed(name: str) -> None:
    dtype, make = EVERY[name]
    resident = left(name, policy="resident")
    made = left(name, plan=streamed_by(make, dtype, Update.DEVICE, disk=False))
    assert made.keys() == resident.keys()
    assert all(torch.equal(made[key], value) for key, value in resident.items())


@pytest.mark.parametrize("name", [name for name in EVERY if name != "muon-bf16"])
def test_what_stays_is_a_plain_model(name: str) -> None:
    """Muon in bf16 has masters in fp32, which a plain model has not."""
    dtype, make = EVERY[name]
    model = network(dtype).to("cuda")
    optimizer = make(model)  # type: ignore[no-untyped-call]
    for step in range(STEPS):
        model(batch(step).to("cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    resident = left(name, policy="resident")
    assert all(torch.equal(resident[f"parameter {n}"], p.detach().cpu()) for n, p in model.named_parameters())
