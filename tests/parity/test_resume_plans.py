"""A checkpoint under plans that do more than stream: updates ahead, on the device, or late; activations as codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.checkpoint.manifest import Manifest
from forebay.checkpoint.randomness import capture, restore
from forebay.plans import Plan
from forebay.runtime.hooks import prepared_session
from tests.parity.device_updating import on_device
from tests.parity.models import CASES
from tests.parity.scheduled import Scheduled, passed
from tests.parity.speculating import MIXED, Run, counters, speculating
from tests.parity.test_delayed_updates import late

STEPS = 3

PLANS: dict[str, tuple[torch.dtype, Callable[[torch.dtype], Plan]]] = {
    "ahead": (torch.float32, lambda dtype: speculating(MIXED, dtype, disk=True)),
    "ahead, 16 bits": (torch.bfloat16, lambda dtype: speculating(MIXED, dtype, disk=True)),
    "on the device": (torch.bfloat16, lambda dtype: on_device(MIXED, dtype, disk=True, speculate=1)),
}


def train(run: Run, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        losses.append(run.backward(step))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", PLANS)
def test_it_is_the_copy_that_stands(name: str, tmp_path: Path) -> None:
    """Blocks on all tiers, several chunks each, a frozen parameter and one that has not taken a step."""
    dtype, planned = PLANS[name]
    plan, disk = planned(dtype), f"{tmp_path}:64MiB"
    first = Run(MIXED, dtype, plan, disk, None)
    train(first, range(STEPS))
    forebay.save(first.model, first.optimizer, tmp_path / "kept", step=STEPS)
    expected = train(first, range(STEPS, 2 * STEPS))
    assert counters(first.model)[1] > 0, "updates ran ahead of their step and were taken over"
    everything = first.everything()
    first.close()
    second = Run(MIXED, dtype, plan, disk, None)
    train(second, range(1))
    second.backward(7)  # under way: updates ahead of a step that never comes
    second.optimizer.zero_grad()
    forebay.resume(second.model, second.optimizer, tmp_path / "kept")
    assert all(map(torch.equal, train(second, range(STEPS, 2 * STEPS)), expected))
    found = second.everything()
    assert found.keys() == everything.keys()
    assert all(torch.equal(found[key], value) for key, value in everything.items())
    second.close()


def test_updates_a_step_late_are_all_in_it(tmp_path: Path) -> None:
    """The step behind a save sees every update, as it does behind a ``state_dict``: in the run that was saved, and in
    the one that goes on from there."""
    case, dtype = CASES["llama"], torch.float32

    def steps(run: Scheduled, which: range) -> list[torch.Tensor]:
        found = []
        for step in which:
            found += passed(run.model, case, dtype, step)
            run.step()
        return found

    first, second = late("llama", dtype), late("llama", dtype)
    steps(first, range(STEPS))
    forebay.save(first.model, first.optimizer, tmp_path / "kept", step=STEPS, scheduler=first.scheduler)
    expected = steps(first, range(STEPS, 2 * STEPS))
    first.close()
    steps(second, range(2))
    forebay.resume(second.model, second.optimizer, tmp_path / "kept", scheduler=second.scheduler)
    assert all(map(torch.equal, steps(second, range(STEPS, 2 * STEPS)), expected))
    second.close()


def test_codes_are_rounded_on_as_they_would_have_been() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = forebay.prepare(model, optimizer, device_memory="1MiB", device="cpu")
    session = prepared_session(model)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))

    def codes() -> torch.Tensor:
        return session.stash.coder.encode(values, values.nbytes, 2)[0].clone()

    before = capture(session)  # of a coder that has drawn nothing
    first = codes()
    middle = Manifest(0, 1, (), {}, (), None, capture(session))
    second = codes()
    assert not torch.equal(first, second)
    restore(session, Manifest.from_bytes(middle.to_bytes(), "the manifest").randomness)
    assert torch.equal(codes(), second)
    restore(session, before)
    assert torch.equal(codes(), first)
    forebay.close(model)
