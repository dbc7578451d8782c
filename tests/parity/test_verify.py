"""``forebay.testing``: equal where it is, and not where something was broken on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

import forebay
import forebay.device.cpu
from forebay.errors import ForebayError, UsageError
from forebay.optim import Adafactor, AdamW, Lion
from forebay.runtime.generators import HostNumbers
from forebay.testing import Course, Verdict, assert_same_training, train_both
from forebay.treatments import Fate, Treatment
from tests.parity.bits import bits_plan
from tests.parity.models import CASES, Case

SHORT = Course(steps=1)

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "8bit": lambda p: AdamW(p, lr=1e-2, moments="8bit"),
    "lion": lambda p: Lion(p, lr=1e-3),
    "adafactor": lambda p: Adafactor(p, lr=1e-3),
    "adafactor-torch": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "adafactor-transformers": TransformersAdafactor,
}


def run(
    name: str, optimizer: str = "adamw", dtype: torch.dtype = torch.float32, course: Course = SHORT, **prepare: Any
) -> Verdict:
    case = CASES[name]
    batches = [case.inputs(number, dtype) for number in range(3)]
    asked = {"device_memory": "64MiB", "device": "cpu", "policy": "stream", **prepare}
    return train_both(lambda: case.model(dtype), batches, OPTIMIZERS[optimizer], course=course, **asked)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "optimizer", "dtype", "more"),
    [
        ("llama-tied", "adamw", torch.bfloat16, {"micro_batches": 2}),
        ("gpt2", "momentum", torch.float32, {"policy": "stream-recompute"}),
        ("frozen", "lion", torch.bfloat16, {}),
        ("unused", "8bit", torch.bfloat16, {}),
        ("convnet", "amsgrad", torch.float32, {}),
        ("experts", "sgd", torch.float32, {"policy": "resident"}),
        ("llama-tied", "adafactor-torch", torch.bfloat16, {"micro_batches": 2}),
        ("convnet", "adafactor-transformers", torch.float32, {}),
        ("experts", "adafactor-transformers", torch.bfloat16, {"policy": "resident"}),
        ("gpt2", "adafactor", torch.bfloat16, {"policy": "l2l"}),
    ],
)
def test_equal(name: str, optimizer: str, dtype: torch.dtype, more: dict[str, Any]) -> None:
    verdict = run(name, optimizer, dtype, Course(steps=1, together="micro_batches" in more), **more)
    assert verdict.equal and verdict.kept, verdict.broken
    names = [check.name for check in verdict.checks]
    assert names[:7] == [
        "parameters at the start",
        "loss",
        "random numbers",
        "gradients",
        "accumulated gradients",
        "norm of the gradients",
        "clipped gradients",
    ]
    assert names[7:11] == [
        "parameters after one step",
        "losses of a run of 1 step",
        "evaluation in between",
        "parameters after a run of 1 step",
    ]
    assert ("optimizer states after a run of 1 step" in names) is (optimizer != "sgd")
    assert ("buffers after a run of 1 step" in names) is bool(list(CASES[name].make().named_buffers()))
    tensors = len(list(CASES[name].make().parameters()))
    compared = {check.name: check.compared for check in verdict.checks}
    assert (compared["loss"], compared["gradients"], compared["parameters after one step"]) == (2, tensors, tensors)
    assert bool(verdict.changes_numbers) is (optimizer == "8bit")


class Dropping(nn.Module):
    """Dropout in every layer, and batch statistics."""

    def __init__(self, share: float = 0.3) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(share)) for _ in range(3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square()


BATCHES = [torch.randn(8, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def drop(make: Callable[[], nn.Module] = Dropping, course: Course = SHORT, **more: Any) -> Verdict:
    asked = {"device_memory": "1MiB", "device": "cpu", "policy": "stream", **more}
    return train_both(make, BATCHES, OPTIMIZERS["adamw"], course=course, **asked)


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_dropout_draws_the_same_and_the_users_random_numbers_stay(policy: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    verdict = drop(policy=policy)
    assert verdict.equal, verdict.broken
    assert torch.equal(torch.get_rng_state(), before)
    assert {check.name: check.compared for check in verdict.checks}["buffers after a run of 1 step"] == 9


class Scaled(Dropping):
    """By numbers of Python's and NumPy's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random() + np.random.random()


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_so_it_is_with_the_numbers_of_python_and_numpy(policy: str) -> None:
    before = HostNumbers()
    verdict = drop(Scaled, policy=policy)
    assert verdict.equal, verdict.broken
    assert HostNumbers() == before


def test_a_model_on_the_meta_device_is_initialised_once() -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

    verdict = assert_same_training(
        make, BATCHES, OPTIMIZERS["adamw"], course=SHORT, device_memory="1MiB", device="cpu", policy="stream"
    )
    assert verdict.equal


# Broken on purpose


def spoil_copy(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The ``nth`` copy between the tiers turns a bit of every fp32 number in it, which changes each by some half."""
    copies, right = iter(range(10**9)), forebay.device.cpu._copy_bytes

    def wrong(here: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        right(here, target, source)
        if next(copies) == nth:
            forebay.device.cpu.as_bytes(target)[2::4] ^= 0x40

    monkeypatch.setattr(forebay.device.cpu, "_copy_bytes", wrong)


def test_a_copy_gone_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_copy(monkeypatch, 3)
    verdict = run("used-twice", course=Course(steps=1, accumulate=1))
    assert not verdict.equal and not verdict.kept
    assert any(check.worst_error > 0 and check.where for check in verdict.checks)


def test_a_copy_gone_wrong_fails_the_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_copy(monkeypatch, 3)
    case = CASES["used-twice"]
    with pytest.raises(AssertionError, match=r"not the numbers of plain PyTorch: .* step 1"):
        assert_same_training(
            lambda: case.model(torch.float32),
            [case.inputs(0, torch.float32)],
            OPTIMIZERS["adamw"],
            course=SHORT,
            device_memory="64MiB",
            device="cpu",
            policy="stream",
        )


LATER = Course(steps=1, accumulate=1, resumed=True)


@pytest.mark.parametrize(
    ("name", "optimizer", "dtype", "more"),
    [
        pytest.param("gpt2", "momentum", torch.float32, {"policy": "stream-recompute"}, marks=pytest.mark.slow),
        ("unused", "8bit", torch.bfloat16, {}),
        ("used-twice", "adamw", torch.float32, {"policy": "zero-offload-delayed"}),
        pytest.param("experts", "sgd", torch.float32, {"policy": "resident"}, marks=pytest.mark.slow),
    ],
)
def test_a_resume_goes_on_as_if_nothing_had_been(
    name: str, optimizer: str, dtype: torch.dtype, more: dict[str, Any]
) -> None:
    verdict = run(name, optimizer, dtype, replace(LATER, steps=2), **more)
    assert verdict.equal, verdict.broken
    compared = {check.name: check.compared for check in verdict.checks}
    assert compared["losses after a resume"] == 2
    assert compared["parameters after a resume"] == len(list(CASES[name].make().parameters()))
    assert ("optimizer states after a resume" in compared) is (optimizer != "sgd")


def test_a_resume_without_the_random_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drop(course=LATER).equal
    monkeypatch.setattr("forebay.checkpoint.resuming.restore", lambda session, saved: None)
    torch.manual_seed(1)
    verdict = drop(course=LATER)
    assert failed(verdict)[0] == "losses after a resume"


def test_a_resume_without_the_states_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = forebay.resume

    def forgetful(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        right(model, optimizer, folder)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})

    monkeypatch.setattr("forebay.testing.comparing.api.resume", forgetful)
    verdict = drop(course=LATER)
    assert failed(verdict) == [f"{what} after a resume" for what in ("parameters", "optimizer states")]


def failed(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if not check.kept]


def test_another_update_is_found() -> None:
    rates = iter([1e-2, 2e-2])
    case = CASES["used-twice"]
    verdict = train_both(
        lambda: case.model(torch.float32),
        [case.inputs(0, torch.float32)],
        lambda p: torch.optim.AdamW(p, lr=next(rates)),
        course=SHORT,
        device_memory="64MiB",
        device="cpu",
        policy="stream",
    )
    names = failed(verdict)
    assert names[0] == "parameters after one step" and "gradients" not in names and len(names) == 3


def test_another_forward_is_found() -> None:
    shares = iter([0.3, 0.31])
    assert failed(drop(lambda: Dropping(next(shares))))[0] == "loss"


def test_other_parameters_are_refused() -> None:
    widths = iter([3, 2])
    with pytest.raises(UsageError, match="have other parameters"):
        drop(lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(next(widths))]))


def test_no_batch_is_refused() -> None:
    with pytest.raises(ForebayError, match="there is no batch"):
        train_both(Dropping, [], OPTIMIZERS["adamw"], device_memory="1MiB", device="cpu", policy="stream")


# Where the plan changes the numbers


def test_delayed_updates_are_exact_until_they_are_late() -> None:
    verdict = run("used-twice", policy="zero-offload-delayed")
    assert verdict.equal and verdict.changes_numbers


class Gelus(nn.Module):
    """Blocks with an activation in them that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        make = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3))
        self.layers = nn.ModuleList(make)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def test_activations_in_few_bits_are_as_near_as_promised() -> None:
    rows = [torch.cat([batch] * 8) for batch in BATCHES]  # a smaller tensor stays as it is
    case = Case(Gelus, lambda number: {"x": rows[number]})
    plan = bits_plan(case, {"layers.1": [Treatment("aten.addmm.default", 0, Fate.KEEP, 4)]}, elements=64 * 32)
    verdict = train_both(
        Gelus,
        [case.inputs(number, torch.float32) for number in range(3)],
        OPTIMIZERS["adamw"],
        course=SHORT,
        plan=plan,
        device_memory=plan.budget.device,
        device="cpu",
    )
    assert verdict.kept and not verdict.equal and verdict.changes_numbers
    checks = {check.name: check for check in verdict.checks}
    assert checks["loss"].equal and not checks["gradients"].equal
    assert checks["gradients"].allowed is None and checks["losses of a run of 1 step"].allowed == 0.01
