"""Several models on one device, in turns: each with the numbers of plain PyTorch, all of them within one budget."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.timeline import Event, Lane
from tests.parity.compare import adamw, assert_same_steps
from tests.parity.models import CASES, VOCABULARY, Case, WithLoss, images, tokens
from tests.parity.recomputing import AMPLE

STEPS = 3
DTYPE = torch.float32
EACH = (CASES["llama"], CASES["t5"], CASES["mixtral"])
QUICK = (CASES["used-twice"], CASES["unused"])
"""Plain layers: prepared in next to no time."""


def prepared(*cases: Case, **prepare: object) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    models = [case.model(DTYPE) for case in cases]
    given = [
        (model, adamw([p for p in model.parameters() if p.requires_grad]), case.inputs(0, DTYPE))
        for model, case in zip(models, cases, strict=True)
    ]
    asked: dict[str, object] = {"device": "cpu", "device_memory": AMPLE, **prepare}
    return forebay.prepare_several(given, **asked)  # type: ignore[arg-type]


def least(case: Case, policy: str = "zero-infinity") -> int:
    """Bytes of the device with which ``case`` can be trained."""
    model = case.model(DTYPE)
    optimizer, batch = adamw(list(model.parameters())), case.inputs(0, DTYPE)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, optimizer, batch, device_memory=1, policy=policy, loss="plain", device="cpu")
    return refused.value.needed


def train(*cases: Case, steps: int = STEPS, **prepare: object) -> list[nn.Module]:
    """Trained in turns, each beside plain PyTorch."""
    pairs = prepared(*cases, **prepare)
    models = [model for model, _ in pairs]
    loops: list[Callable[[], None]] = [
        partial(assert_same_steps, model, made, case, DTYPE, steps=steps)
        for case, (model, made) in zip(cases, pairs, strict=True)
    ]
    forebay.alternate(models, loops)
    return models


def close(*models: nn.Module) -> None:
    for model in models:
        forebay.close(model)


def within(models: list[nn.Module]) -> None:
    """All of them are within what their plans promise, and that is within the budget."""
    report = forebay.report_several(models)
    promised = report.predicted_peaks()
    for usage in report.tiers:
        assert usage.peak <= promised[usage.tier], usage
        assert usage.limit is None or promised[usage.tier] <= usage.limit
        # The account of all is no less than that of any, and no more than that of all at their highest.
        own = [run.measured_peaks()[usage.tier] for run in report.runs]
        assert max(own) <= usage.peak <= sum(own)
    assert report.measured_peaks()[Tier.DEVICE] > 0 and report.measured_peaks()[Tier.HOST] > 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("policy", "cases"), [("hydra", EACH), ("auto", QUICK)], ids=["hydra", "auto"])
def test_each_has_the_numbers_of_plain_pytorch(policy: str, cases: tuple[Case, ...]) -> None:
    device = int(1.3 * sum(map(least, cases)))
    models = train(*cases, policy=policy, steps=2, device_memory=device)
    within(models)
    close(*models)


def wide() -> nn.Module:
    """So wide that what passes through the host on its way to disk is little beside it."""
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def test_within_little_more_than_they_need_in_three_tiers(tmp_path: Path) -> None:
    cases = (Case(wide, tokens), Case(wide, tokens))
    device = int(1.05 * sum(map(least, cases)))
    host = 31 * sum(p.numel() for p in wide().parameters())  # of 32 bytes that they have at home
    asked = {"device_memory": device, "host_memory": host, "disk": f"{tmp_path}:64MiB", "policy": "zero-infinity"}
    models = train(*cases, steps=1, **asked)
    within(models)
    assert forebay.report_several(models).measured_peaks()[Tier.DISK] > 0
    close(*models)


def covered_by(events: list[Event], others: list[Event]) -> float:
    """Seconds of ``events`` during which one of ``others`` ran too."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in events for b in others)


def test_while_one_computes_the_others_blocks_come() -> None:
    whole = CpuDevice(AMPLE, delays=RandomDelays(1, 0.004, (Lane.H2D,)))
    models = train(*QUICK, device=whole, policy="hydra")
    events = [forebay.report(model).timeline.events for model in models]
    fetches, computed = [[[e for e in own if e.lane is lane] for own in events] for lane in (Lane.H2D, Lane.COMPUTE)]
    assert covered_by(fetches[0], computed[1]) > 0 and covered_by(fetches[1], computed[0]) > 0
    close(*models)


def test_random_numbers_are_those_of_training_alone() -> None:
    """Each finds the generators as the caller left them; the caller finds them as the first one has left them."""
    body = (nn.Flatten(), nn.Linear(768, 32), nn.Dropout(), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4))
    case = Case(lambda: WithLoss(nn.Sequential(*deepcopy(body))), images)

    def losses(model: nn.Module, count: int) -> list[float]:
        found = []
        for step in range(count):
            loss = model(**case.inputs(step, DTYPE))["loss"]
            loss.backward()
            model.zero_grad()
            found.append(loss.item())
        return found

    counts = (2, 4)
    expected = []
    for count in counts[::-1]:
        model = case.model(DTYPE)
        torch.manual_seed(7)
        expected.append(losses(model, count))
        left = torch.rand(1)
    models = [model for model, _ in prepared(case, case, policy="stream")]
    torch.manual_seed(7)
    found = forebay.alternate(models, [partial(losses, m, n) for m, n in zip(models, counts, strict=True)])
    assert found == expected[::-1]
    assert torch.equal(torch.rand(1), left)
    close(*models)


def test_in_a_loop_of_the_users_own_each_has_its_numbers_too() -> None:
    """One step of each, in one thread, without ``alternate``."""
    pairs = prepared(*QUICK, policy="stream")
    for _ in range(2):
        for case, (model, made) in zip(QUICK, pairs, strict=True):
            assert_same_steps(model, made, case, DTYPE, steps=1)
    within([model for model, _ in pairs])
    close(*(model for model, _ in pairs))


def test_one_that_never_waits_lets_the_others_go_first() -> None:
    """With everything on the device there is nothing to wait for: they take turns block by block."""
    models = train(*QUICK, policy="resident")
    spans = []
    for model in models:
        events = [e for e in forebay.report(model).timeline.events if e.lane is Lane.COMPUTE]
        spans.append((min(e.start for e in events), max(e.end for e in events)))
    assert spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
    close(*models)


def test_micro_batches_together_in_turns() -> None:
    """``accumulate`` inside of a loop."""
    case = Case(lambda: WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 4))), images)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        value: torch.Tensor = model(**case.inputs(step, DTYPE))["loss"]
        return value

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        forebay.accumulate(model, [0, 1], loss)
        return dict(forebay.gradients(model))

    plain = case.model(DTYPE)
    for step in (0, 1):
        loss(plain, step).backward()
    models = [model for model, _ in prepared(case, case, policy="stream")]
    for found in forebay.alternate(models, [partial(gradients, model) for model in models]):
        assert all(torch.equal(found[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)
        assert found
    close(*models)


def test_the_report_has_a_step_in_turns() -> None:
    models = train(*QUICK, policy="hydra")
    report = forebay.report_several(models)
    written = report.to_json_dict()
    for run, one in zip(report.runs, written["models"], strict=True):
        assert run.steps == STEPS and run.plan.step_seconds is not None
        # Of two micro-batches, of which the second takes as long as the first, or less.
        assert run.plan.step_seconds < one["predicted"]["step_seconds"] < 2.1 * run.plan.step_seconds
        assert any(
            "one of 2 models that take turns on the device: a step takes" in reason for reason in run.plan.reasons
        )
    assert written["measured"]["peaks"]["device"] <= written["predicted"]["peaks"]["device"] <= AMPLE
    assert written["budgets"]["device"] == AMPLE
    close(*models)


def test_what_one_had_is_given_back_when_it_is_closed() -> None:
    """The other trains on."""
    (first, _), (second, made) = prepared(*QUICK, policy="stream")
    before = forebay.report_several([first, second]).tiers
    forebay.close(first)
    after = forebay.report_several([second]).tiers
    for tier in (Tier.DEVICE, Tier.HOST):
        then, now = ([u.live for u in tiers if u.tier is tier] for tiers in (before, after))
        assert now[0] < then[0]
    forebay.alternate([second], [partial(assert_same_steps, second, made, QUICK[1], DTYPE, steps=1)])
    forebay.close(second)


def test_under_autocast_a_parameter_is_cast_once() -> None:
    """The cache of autocast is one for all threads: were it emptied by the other model in between, a tied weight would
    be cast twice, and its gradient be another sum."""
    case = CASES["llama-tied"]

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        for step in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**case.inputs(step, DTYPE))["loss"]
            loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(case.model(DTYPE))
    whole = CpuDevice(AMPLE, delays=RandomDelays(2, 0.004, (Lane.H2D,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        models = [model for model, _ in prepared(case, case, policy="hydra", device=whole)]

    def landed(model: nn.Module) -> dict[str, torch.Tensor]:
        gradients(model)
        return dict(forebay.gradients(model))

    for found in forebay.alternate(models, [partial(landed, model) for model in models]):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    close(*models)
