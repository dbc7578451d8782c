"""A model whose masters are kept as halves trains as with whole ones, and every plan resumes from every other's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.errors import ConfigError
from forebay.layout import PAGE
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.hooks import prepared_session
from forebay.states import Masters
from tests.parity.content import states_of
from tests.parity.models import CASES
from tests.parity.speculating import speculating

CASE, DTYPE, STEPS, SAVED = CASES["llama"], torch.bfloat16, 5, 2
AMPLE = 1 << 30

HOMES: dict[str, dict[str, Any]] = {
    "everything stays": {"policy": "resident", "device_memory": AMPLE},
    "everything streams": {"policy": "stream", "device_memory": AMPLE},
    "whole masters": {"policy": "zero-offload", "device_memory": AMPLE},
}


class Run:
    """A prepared model with AdamW, and what it has seen."""

    def __init__(self, **how: Any) -> None:
        model = CASE.model(DTYPE)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = forebay.prepare(model, optimizer, CASE.inputs(0, DTYPE), device="cpu", **how)

    @property
    def plan(self) -> Plan:
        return forebay.report(self.model).plan

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        losses = []
        for step in range(first, last):
            loss = self.model(**CASE.inputs(step, DTYPE))["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def everything(self) -> dict[str, torch.Tensor]:
        """Masters, parameters and states."""
        seen = {f"master {n}": p.clone() for n, p in forebay.parameters(self.model).items()}
        return seen | {n: p.clone() for n, p in self.model.state_dict().items()} | states_of(self.optimizer)

    def close(self) -> dict[str, torch.Tensor]:
        seen = self.everything()
        forebay.close(self.model)
        return seen


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To the last bit, the signs of zeros too."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        mine, theirs = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (tensor, other[name]))
        assert torch.equal(mine, theirs), name


def on_disk(folder: Path) -> dict[str, Any]:
    """In turn wherever a block can be, parameters and states, and updated ahead of its step."""
    plan = speculating(CASE, DTYPE, disk=True)
    assert {p.states for p in plan.placements} == {Tier.HOST, Tier.DISK}
    return {"plan": plan, "device_memory": AMPLE, "disk": f"{folder}:1GiB"}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("where", [*HOMES, "on disk"])
def test_one_result_and_one_checkpoint(where: str, tmp_path: Path) -> None:
    """Masters that are no bf16 numbers come through a checkpoint, a saved optimizer, and steps behind both, wherever
    they are and whichever plan saved them."""
    how = on_disk(tmp_path) if where == "on disk" else HOMES[where]
    reference = Run(**HOMES["whole masters"])
    assert reference.plan.streaming.masters is Masters.WHOLE
    losses = reference.train(0, SAVED)
    forebay.save(reference.model, reference.optimizer, tmp_path / "whole", step=SAVED)
    losses += reference.train(SAVED, STEPS)
    expected = reference.close()
    assert any((t != t.bfloat16().float()).any() for n, t in expected.items() if n.startswith("master "))

    run = Run(**how)
    assert run.plan.streaming.masters is (Masters.WHOLE if where == "whole masters" else Masters.LOWER)
    assert (run.plan.disk > 0) == (where == "on disk")
    made = run.train(0, SAVED)
    forebay.save(run.model, run.optimizer, tmp_path / "own", step=SAVED)
    assert all(torch.equal(a, b) for a, b in zip(made + run.train(SAVED, STEPS), losses, strict=True))
    assert_same(run.close(), expected)

    for saved, again in (("whole", how), ("own", HOMES["whole masters"]), ("own", HOMES["everything stays"])):
        resumed = Run(**again)
        forebay.resume(resumed.model, resumed.optimizer, tmp_path / saved)
        assert all(torch.equal(a, b) for a, b in zip(resumed.train(SAVED, STEPS), losses[SAVED:], strict=True))
        assert_same(resumed.close(), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("where", ["everything stays", "everything streams"])
def test_states_are_loaded_with_their_masters(where: str) -> None:
    """The parameter is half of its master: what is loaded as one sets both, and what is loaded without leaves both."""
    source = Run(**HOMES["whole masters"])
    source.train(0, SAVED)
    saved, expected = source.optimizer.state_dict(), source.everything()
    source.close()
    run = Run(**HOMES[where])
    run.train(0, 1)
    run.optimizer.load_state_dict(saved)
    assert_same(run.everything(), expected)
    plain = {key: {n: t for n, t in state.items() if n != "master"} for key, state in saved["state"].items()}
    plain = {key: {**state, "exp_avg": 2 * state["exp_avg"]} for key, state in plain.items()}
    run.optimizer.load_state_dict({**saved, "state": plain})
    seen = run.everything()
    masters = {n: t for n, t in seen.items() if n.startswith("master ")}
    assert_same(masters, {n: expected[n] for n in masters})
    doubled = run.optimizer.state_dict()["state"]
    assert all(torch.equal(doubled[key]["exp_avg"], 2 * saved["state"][key]["exp_avg"]) for key in doubled)
    run.close()


def test_parameters_that_are_loaded_are_their_masters() -> None:
    run = Run(**HOMES["everything streams"])
    run.train(0, SAVED)
    loaded = {name: 0.75 * value for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(loaded)
    for name, master in forebay.parameters(run.model).items():
        assert torch.equal(master, loaded[name].float())
    run.close()


def test_fourteen_bytes_of_the_host_for_each_element() -> None:
    """Parameters and gradients, 2 bytes each; half a master and two moments, 10, each block of them whole pages and
    pieces whole lines; and what is staged: one gradient, and the largest chunk's gradients and masters in fp32."""
    run = Run(policy="stream", device_memory=AMPLE)
    plan, sizes = run.plan, prepared_session(run.model).store.sizes
    run.train(0, 1)
    peak = forebay.report(run.model).timeline.peaks[Tier.HOST]
    blocks = prepared_session(run.model).model.blocks
    forebay.close(run.model)
    elements, largest = (pick(sum(p.numel for p in b.parameters) for b in blocks) for pick in (sum, max))
    padding = sum(PAGE + 10 * 32 * len(b.parameters) for b in blocks)
    assert peak == plan.host == sizes.host_parameters + sizes.host_gradients + sizes.host_states + sizes.host_staging
    assert sizes.host_parameters == sizes.host_gradients == 2 * elements
    assert 10 * elements <= sizes.host_states <= 10 * elements + padding
    assert sizes.host_staging <= sizes.gradient_staging + 8 * (largest + 32 * max(len(b.parameters) for b in blocks))


def test_plans_for_others_are_refused() -> None:
    """With an optimizer that has no sign to spare, or in fp16."""
    run = Run(**HOMES["everything streams"])
    plan = replace(run.plan, fingerprint="", host=AMPLE, device=AMPLE)
    run.close()
    for dtype, kind in ((DTYPE, torch.optim.SGD), (torch.float16, torch.optim.AdamW)):
        model = CASE.model(dtype)
        with pytest.raises(ConfigError, match=r"lower halves of masters.*the model trains"):
            forebay.prepare(model, kind(model.parameters(), lr=1e-2), plan=plan, device_memory=AMPLE, device="cpu")
