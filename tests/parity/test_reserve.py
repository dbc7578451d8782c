"""What a loop has on the device beside the model's step: no plan takes the room that it leaves for that."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ConfigError, DeviceOutOfMemory, DoesNotFit
from forebay.integrations.common import Memory
from forebay.memory import Tier
from forebay.reporting.cautions import cautions
from forebay.reporting.run import RunReport
from forebay.units import MiB
from tests.parity.models import CASES, VOCABULARY
from tests.parity.page_programs import programs

CASE = CASES["llama"]
ROOM = 24 * MiB


def program() -> str:
    """The one of the page: a generator and a discriminator in one loop."""
    (found,) = programs("does-not-fit.md", "test_reserve.py")
    return found.replace("lr=2e-4", "lr=2e-4, fused=True")


def run(text: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names of the program ``text`` when it has ended; where it does not, they are in ``names``."""
    torch.manual_seed(0)
    names = {} if names is None else names
    names["__name__"] = "page"
    exec(text, names)
    return names


def test_two_models_of_the_page_in_one_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither fits by itself, both together keep what both are promised, and the numbers are those of plain PyTorch."""
    found = run(program())
    assert all(int(peak) <= ROOM for peak in re.findall(r"DEVICE: 'device'>: (\d+)", capsys.readouterr().out))
    as_it_is = re.sub(r"return forebay\.prepare\(.*\)", "return model, optimizer", program())
    plain = run(re.sub(r"\n    (print|forebay)[^\n]*", "\n    pass", as_it_is))
    for name in ("generator", "discriminator"):
        values = plain[name].state_dict()
        assert 4 * sum(value.nbytes for value in values.values()) > ROOM
        assert all(torch.equal(values[key], value) for key, value in found[name].state_dict().items()), name


def test_a_plan_without_it_leaves_no_room_for_another_model() -> None:
    """The same budget, filled; then what the other makes is more than there is, and the error says what to do."""
    filled = program().replace('device_memory="24MiB", device_reserve="13MiB"', 'device_memory="11MiB"')
    names: dict[str, Any] = {}
    with pytest.raises(DeviceOutOfMemory, match=r"copies of gradients, .*\), leave room .* device_reserve"):
        run(filled, names)
    for name in ("generator", "discriminator"):
        forebay.close(names[name])


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@cache
def least() -> int:
    model = CASE.model(torch.float32)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, torch.optim.AdamW(model.parameters()), batch(0), device_memory=1, device="cpu")
    return refused.value.needed


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses of steps with two forwards before each backward."""
    found = []
    for number in range(3):
        loss = model(**batch(2 * number)).loss + model(**batch(2 * number + 1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def over(report: RunReport) -> list[str]:
    """What is said of a device that had more than was promised."""
    return [said for said in cautions(report, []) if said.startswith("device: the peak was")]


def test_two_forwards_before_a_backward() -> None:
    """A plan for one of them, at its least, under which activations move; those of the second find no room on the host,
    and stay in the reserve."""
    reference = CASE.model(torch.float32)
    expected = steps(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True))
    needed, reserve = least(), 2 * MiB
    model = CASE.model(torch.float32)
    model, optimizer = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        batch(0),
        device_memory=needed + reserve,
        device_reserve=reserve,
        device="cpu",
    )
    assert all(map(torch.equal, steps(model, optimizer), expected))
    report = forebay.report(model)
    assert report.plan.activations and report.plan.device <= needed
    assert needed < report.measured_peaks()[Tier.DEVICE] <= needed + reserve
    assert not over(report)
    without = replace(report.plan, budget=replace(report.plan.budget, device_reserve=0))
    assert over(replace(report, plan=without))
    forebay.close(model)
    values = reference.state_dict()
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())


def test_memory_of_the_integrations_passes_it_on() -> None:
    needed, model = least(), CASE.model(torch.float32)
    Memory(2 * needed, device_reserve=needed).prepare(
        model, torch.optim.AdamW(model.parameters()), batch(0), torch.device("cpu")
    )
    budget = forebay.report(model).plan.budget
    assert (budget.device, budget.planned_device) == (2 * needed, needed)
    forebay.close(model)
    with pytest.raises(ConfigError, match="device_reserve"):
        Memory("1MiB", device_reserve="1MiB")


def test_a_given_plan_leaves_it_too() -> None:
    """A plan that was made for all of the budget is refused beside a reserve."""
    model = CASE.model(torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, _ = forebay.prepare(model, optimizer, batch(0), device_memory=2 * least(), device="cpu")
    plan = forebay.report(model).plan
    forebay.close(model)
    with pytest.raises(DoesNotFit, match="device: the plan needs"):
        forebay.prepare(
            model, optimizer, batch(0), device_memory=plan.device + 9, device_reserve=10, plan=plan, device="cpu"
        )
    forebay.prepare(
        model, optimizer, batch(0), device_memory=plan.device + 10, device_reserve=10, plan=plan, device="cpu"
    )
    forebay.close(model)
