"""A program that has told torch where tensors are made by default (``torch.set_default_device("cuda")``): what lies on
the host lies there all the same. ``meta`` stands for the card, of which no byte can be read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from tests.parity.content import content, expect_same
from tests.parity.models import llama, tokens

STEPS = 3
MAKERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "8bit": lambda m: forebay.optim.AdamW(m.parameters(), lr=1e-3, moments="8bit"),
    "rounded": lambda m: forebay.optim.AdamW(m.parameters(), lr=1e-3, stochastic_rounding=True),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "muon": lambda m: forebay.optim.Muon(forebay.optim.muon_groups(m), lr=1e-2),
}


def left(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, device: str, **prepare: Any) -> Any:
    """What a run leaves that is saved and resumed in between, with ``device`` as the default."""
    batches = [tokens(step) for step in range(STEPS)]
    with torch.device(device):
        model, optimizer = forebay.prepare(model, optimizer, batches[0], device="cpu", **prepare)
        for step, batch in enumerate(batches):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                forebay.save(model, optimizer, folder / "saved", step=step)
                forebay.resume(model, optimizer, folder / "saved")
        forebay.accumulate(model, batches[:2], lambda model, batch: model(**batch).loss)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        forebay.synchronize(model)
    found = content(model, optimizer)
    forebay.close(model)
    return found


EACH = [
    ("adamw", "auto", True),
    ("8bit", "offload-all", False),
    ("rounded", "stream", True),
    ("adafactor", "stream", False),
    ("muon", "resident", False),
]
"""Every optimizer, policy and home."""

ALL = itertools.product(MAKERS, ["auto", "stream", "offload-all", "resident"], [False, True])


@pytest.mark.parametrize(
    ("name", "policy", "disk"), [*EACH, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in EACH)]
)
def test_what_lies_on_the_host_lies_there(name: str, policy: str, disk: bool, tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = llama().to(torch.bfloat16 if name == "rounded" else torch.float32)
        folder = tmp_path / device
        folder.mkdir()
        home = {"disk": f"{folder}:64MiB", "host_memory": "6MiB"} if disk else {}
        found.append(left(model, MAKERS[name](model), folder, device, device_memory="64MiB", policy=policy, **home))
    expect_same(*found)
