"""A plan read from JSON does what the plan itself does, and is refused where it was made for something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forebay
from forebay.errors import ConfigError
from forebay.plans import PLAN_SCHEMA, Plan
from forebay.profiler.capture import capture
from tests.parity.compare import adamw
from tests.parity.models import CASES
from tests.parity.recomputing import AMPLE, SUBJECTS, plan_for
from tests.parity.test_delays import tiered

DTYPE = torch.float32


def outcome(plan: Plan, disk: str | None = None) -> list[torch.Tensor]:
    """Losses of three steps, and the parameters after them."""
    case = CASES["llama"]
    model = case.model(DTYPE)
    model, optimizer = forebay.prepare(
        model,
        adamw(list(model.parameters())),
        case.inputs(0, DTYPE),
        plan=plan,
        device_memory=AMPLE,
        disk=disk,
        device="cpu",
    )
    seen = []
    for step in range(3):
        loss = model(**case.inputs(step, DTYPE))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    seen += [p.clone() for _, p in sorted(forebay.parameters(model).items())]
    forebay.close(model)
    return seen


def test_the_same_numbers_as_the_plan_itself(tmp_path: Path) -> None:
    made = tiered(CASES["llama"], DTYPE, overlap=True, host_slots=2)
    plan = replace(made, recompute=("model.layers.1", "model.layers.2"), fingerprint=fingerprint("llama"))
    read = Plan.from_json(plan.to_json())
    assert read == plan
    disk = f"{tmp_path}:64MiB"
    expected, actual = outcome(plan, disk), outcome(read, disk)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def fingerprint(name: str) -> str:
    case = CASES[name]
    return capture(case.model(DTYPE), case.inputs(0, DTYPE)).trace.fingerprint


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "used-twice"])
def test_the_plan_of_a_trace_is_that_of_its_model_and_batch(name: str) -> None:
    """What prepare works out from model and batch is what capture recorded: a plan made from the trace is adopted."""
    case = CASES[name]
    plan = replace(plan_for(SUBJECTS[name], DTYPE, [], resident=True), fingerprint=fingerprint(name))
    for rows, fits in ((None, True), (1, False)):
        model = case.model(DTYPE)
        batch = {k: v[:rows] for k, v in case.inputs(0, DTYPE).items()}
        arguments = (model, adamw(list(model.parameters())), batch)
        if fits:
            forebay.close(forebay.prepare(*arguments, plan=plan, device_memory=AMPLE, device="cpu")[0])
        else:
            with pytest.raises(ConfigError, match="another model, batch shape or optimizer"):
                forebay.prepare(*arguments, plan=plan, device_memory=AMPLE, device="cpu")


def test_a_plan_for_another_optimizer_is_refused() -> None:
    case = CASES["llama"]
    plan = replace(plan_for(case, DTYPE, [], resident=True), fingerprint=fingerprint("llama"))
    model = case.model(DTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="another model, batch shape or optimizer"):
        forebay.prepare(model, optimizer, case.inputs(0, DTYPE), plan=plan, device_memory=AMPLE, device="cpu")


def test_without_a_batch_the_fingerprint_is_not_asked() -> None:
    case = CASES["llama"]
    plan = replace(plan_for(case, DTYPE, [], resident=True), fingerprint="of another day")
    model = case.model(DTYPE)
    model, _ = forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")
    forebay.close(model)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = plan_for(CASES["llama"], DTYPE, [], resident=True)
    model = CASES["vit"].model(DTYPE)
    with pytest.raises(ConfigError, match="made for another model"):
        forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")


def test_a_newer_schema_is_named_before_what_follows_from_it() -> None:
    """A newer plan may lack fields that this one has: the schema is the reason to give."""
    whole = json.loads(plan_for(CASES["llama"], DTYPE, [], resident=True).to_json())
    newer = {"schema": PLAN_SCHEMA + 1, "homes": whole["placements"]}
    with pytest.raises(ConfigError, match=rf"plan has schema {PLAN_SCHEMA + 1}.*reads schema {PLAN_SCHEMA}"):
        Plan.from_json(json.dumps(newer))
