"""Input that cannot be used: one clear error that says what was needed, what was there and what to change; the model
and the optimizer as they were; and no thread, descriptor or file left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import forebay
from forebay.errors import ConfigError, DoesNotFit, ForebayError, ModelError, OptimizerError, UnitError, UsageError
from forebay.planners import PLANNERS
from forebay.plans import PLAN_SCHEMA, Plan
from forebay.tiers.host import available_host_memory
from tests.faults.footing import (
    ON_DISK,
    WIDTH,
    Footing,
    a_batch,
    adamw,
    assert_trains,
    assert_trains_under_forebay,
    network,
    plan_for,
)


class MyAdamW(torch.optim.AdamW):
    """A subclass may compute something else."""


Change = Callable[[nn.Module, Path], dict[str, Any]]


@dataclass(frozen=True)
class Bad:
    """A wrong call: what differs from a right one, the error, and parts of its message."""

    change: Change
    error: type[ForebayError]
    says: tuple[str, ...]


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    model(a_batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def a_file(folder: Path) -> str:
    (folder / "file").write_text("")
    return f"{folder / 'file'}:1GiB"


TABLE: dict[str, Bad] = {
    "budget below the largest block": Bad(
        lambda m, f: {"device_memory": "900KiB", "batch": a_batch()},
        DoesNotFit,
        ("device memory", "MiB are needed", "900.0 KiB are allowed", "largest block (", "activations", "raise device"),
    ),
    "budget below the block and its working set": Bad(
        lambda m, f: {"device_memory": "1100KiB", "batch": torch.ones(512, WIDTH)},
        DoesNotFit,
        ("are needed", "1.1 MiB are allowed", "for the activations of one step", "smaller batch"),
    ),
    "no device memory": Bad(lambda m, f: {"device_memory": 0}, ConfigError, ("device budget", "more than 0", "got 0")),
    "unknown unit": Bad(
        lambda m, f: {"device_memory": "24XB"}, UnitError, ("unknown unit 'XB' in '24XB'", "sizes are written like")
    ),
    "negative size": Bad(lambda m, f: {"host_memory": "-1GiB"}, UnitError, ("'-1GiB'", "sizes are written like")),
    "host budget too small": Bad(
        lambda m, f: {"device_memory": "6MiB", "host_memory": "1MiB"},
        DoesNotFit,
        ("host memory", "are needed", "1.0 MiB are allowed", "optimizer states", "raise host_memory", "give disk="),
    ),
    "host budget larger than the machine": Bad(
        lambda m, f: {"host_memory": available_host_memory().total * 2},
        DoesNotFit,
        ("host memory", "are allowed", "this machine has", "lower host_memory"),
    ),
    "unknown policy": Bad(
        lambda m, f: {"policy": "magic"},
        ConfigError,
        ("unknown policy 'magic'", f"there are {', '.join(sorted(PLANNERS))}"),
    ),
    "several policies": Bad(
        lambda m, f: {"policy": ["auto"], "batch": a_batch()}, ConfigError, ("unknown policy ['auto']", "there are")
    ),
    "micro-batches as a text": Bad(
        lambda m, f: {"micro_batches": "2", "batch": a_batch()}, ConfigError, ("micro_batches must be an int", "'2'")
    ),
    "half a micro-batch": Bad(
        lambda m, f: {"micro_batches": 1.5}, ConfigError, ("micro_batches must be an int, 1 or more, got 1.5",)
    ),
    "unknown device": Bad(lambda m, f: {"device": "abacus"}, ModelError, ("no device 'abacus'", "use one of cpu")),
    "disk path missing": Bad(
        lambda m, f: {**ON_DISK, "disk": f"{f / 'nowhere'}:1GiB"},
        ConfigError,
        ("nowhere", "No such file", "name a folder that exists"),
    ),
    "disk path missing, no size": Bad(
        lambda m, f: {**ON_DISK, "disk": str(f / "nowhere")}, ConfigError, ("nowhere", "No such file", "name a folder")
    ),
    "disk path missing, not needed": Bad(
        lambda m, f: {"disk": f"{f / 'nowhere'}:1GiB"}, ConfigError, ("nowhere", "No such file", "name a folder")
    ),
    "disk path is a file": Bad(
        lambda m, f: {**ON_DISK, "disk": a_file(f)}, ConfigError, ("Not a directory", "name a folder")
    ),
    "disk path is a file, not needed": Bad(
        lambda m, f: {"disk": a_file(f)}, ConfigError, ("Not a directory", "name a folder")
    ),
    "no disk": Bad(lambda m, f: {"disk": 5}, UnitError, ("PATH or PATH:SIZE", "got 5")),
    "crash_safe is no folder": Bad(
        lambda m, f: {"disk": f, "crash_safe": True}, ConfigError, ("crash_safe is the path of a folder", "got True")
    ),
    "disk budget too small": Bad(
        lambda m, f: {**ON_DISK, "disk": f"{f}:8KiB"},
        DoesNotFit,
        ("disk:", "are needed", "8.0 KiB are allowed", "more room", "raise host_memory"),
    ),
    "disk with an unknown unit": Bad(lambda m, f: {"disk": f"{f}:5XB"}, UnitError, ("PATH:SIZE", "unknown unit 'XB'")),
    "unsupported optimizer": Bad(
        lambda m, f: {"optimizer": torch.optim.RAdam(m.parameters())},
        OptimizerError,
        (
            "RAdam is not an optimizer that forebay runs",
            "use AdamW, Adam, SGD, RMSprop, Adagrad, Adadelta, Adamax, Adafactor or Muon of torch.optim, AdamW, Lion, "
            "Adafactor or Muon of forebay.optim, Adafactor of transformers, or CAME of came_pytorch",
        ),
    ),
    "subclass of an optimizer": Bad(
        lambda m, f: {"optimizer": MyAdamW(m.parameters())},
        OptimizerError,
        ("MyAdamW is not an optimizer that forebay runs", "use AdamW, Adam"),
    ),
    "differentiable optimizer": Bad(
        lambda m, f: {"optimizer": torch.optim.AdamW(m.parameters(), differentiable=True)},
        OptimizerError,
        ("differentiable=True", "set it to False"),
    ),
    "optimizer of another model": Bad(
        lambda m, f: {"optimizer": adamw(network())},
        OptimizerError,
        ("parameters that are not the model's", "make it from this model"),
    ),
    "optimizer with steps taken": Bad(
        lambda m, f: {"optimizer": stepped(m)},
        OptimizerError,
        ("has taken steps already", "before the first step", "load its state_dict()"),
    ),
    "batch without tensors": Bad(
        lambda m, f: {"batch": {"text": "hello"}}, ModelError, ("batch holds no tensors", "a dict or a tuple")
    ),
    "blocks that are not there": Bad(
        lambda m, f: {"blocks": ["layers.0"]}, ModelError, ("no module called 'layers.0'", "model.named_modules()")
    ),
    "blocks as one text": Bad(
        lambda m, f: {"blocks": "layers"}, ModelError, ("names of modules in a list", "'layers'", "give ['layers']")
    ),
    "unknown loss": Bad(
        lambda m, f: {"loss": "chunk"}, ConfigError, ("loss must be auto, plain or chunked", "got 'chunk'")
    ),
    "bits as a text": Bad(
        lambda m, f: {"compress": "8", "batch": a_batch()}, ConfigError, ("8, 4 or 2 bits", "got '8'")
    ),
    "the path of a plan": Bad(
        lambda m, f: {"plan": "plan.json"}, ConfigError, ("plan is a forebay.Plan, got a str", "Plan.from_json(text)")
    ),
    "plan for another model": Bad(
        lambda m, f: {"plan": plan_for(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))},
        ConfigError,
        ("made for another model", "block 3", "make the plan again"),
    ),
    "plan for a smaller model of the same kind": Bad(
        lambda m, f: {"plan": plan_for(network(128))},
        ConfigError,
        ("made for another model", "make the plan again"),
    ),
    "plan over the device budget": Bad(
        lambda m, f: {"plan": plan_for(network()), "device_memory": "1100KiB"},
        DoesNotFit,
        ("device: the plan needs", "1.1 MiB are allowed", "raise device_memory, or make another plan"),
    ),
    "plan over the host budget": Bad(
        lambda m, f: {"plan": plan_for(network()), "host_memory": "1MiB"},
        DoesNotFit,
        ("host: the plan needs", "1.0 MiB are allowed", "raise host_memory, or make another plan"),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused(name: str, tmp_path: Path) -> None:
    bad = TABLE[name]
    model = network()
    changed = bad.change(model, tmp_path)
    options: dict[str, Any] = {"device_memory": "64MiB", "device": "cpu", **changed}
    optimizer = options.pop("optimizer", None) or adamw(model)
    there = set(tmp_path.iterdir())
    footing = Footing.of(model)
    with pytest.raises(bad.error) as caught:
        forebay.prepare(model, optimizer, options.pop("batch", None), **options)
    message = str(caught.value)
    for part in bad.says:
        assert part in message, message
    assert "\n" not in message
    assert type(caught.value) is bad.error
    if isinstance(caught.value, DoesNotFit):
        assert caught.value.tier in message and caught.value.needed != caught.value.allowed
    del caught
    footing.assert_kept(model)
    assert set(tmp_path.iterdir()) == there
    if name not in ("optimizer of another model", "differentiable optimizer"):
        assert_trains(model, optimizer)
    # And a right call works at once.
    prepared, made = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu")
    assert_trains_under_forebay(prepared, made)
    forebay.close(prepared)


def test_model_on_another_device() -> None:
    model = network()
    with FakeTensorMode():  # a device that need not be here
        model.register_parameter("far", nn.Parameter(torch.empty(8, 8, device="cuda:0")))
    with pytest.raises(ModelError, match=r"parameter far is on cuda:0.* trains on cpu; keep the model on the cpu"):
        forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu")


def test_the_optimizer_first() -> None:
    model = network()
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module, and then its .*Optimizer, got AdamW and Seq"):
        forebay.prepare(adamw(model), model, device_memory="64MiB", device="cpu")  # type: ignore[arg-type]


def test_two_optimizers() -> None:
    model = network()
    both = [torch.optim.SGD([p], lr=0.1) for p in list(model.parameters())[:2]]
    with pytest.raises(UsageError, match=r"takes one optimizer, got 2: .* in groups of it, .*forebay\.optim\.Muon"):
        forebay.prepare(model, both, device_memory="64MiB", device="cpu")  # type: ignore[arg-type]


def test_a_batch_that_the_model_cannot_take_is_warned_of() -> None:
    """The plan does not know the activations then: a promise that nobody has made."""
    model = network()
    with pytest.warns(UserWarning, match=r"activations are not planned: a step on the batch cannot be looked at"):
        forebay.prepare(model, adamw(model), torch.ones(8, WIDTH - 1), device_memory="64MiB", device="cpu")
    assert not forebay.report(model).plan.fingerprint
    forebay.close(model)


def test_a_forward_under_another_autocast_is_warned_of() -> None:
    """Once, and not where the plan was made under the same."""
    for given, used, warned in ((False, True, 1), (True, True, 0), (False, False, 0)):
        model = network()
        with torch.autocast("cpu", torch.bfloat16, enabled=given):
            model, _ = forebay.prepare(model, adamw(model), a_batch(), device_memory="64MiB", device="cpu")
        with warnings.catch_warnings(record=True) as said, torch.autocast("cpu", torch.bfloat16, enabled=used):
            warnings.simplefilter("always")
            for _ in range(2):
                model(a_batch())
        forebay.close(model)
        told = [str(w.message) for w in said if "autocast" in str(w.message)]
        assert len(told) == warned, (given, used, told)
        for message in told:
            assert "prepared outside of torch.autocast and is trained under torch.autocast to bfloat16" in message
        assert not model._forward_pre_hooks


def test_model_without_parameters() -> None:
    other = network()
    with pytest.raises(ModelError, match="no parameters; there is nothing to train"):
        forebay.prepare(nn.Sequential(nn.ReLU()), adamw(other), device_memory="64MiB", device="cpu")


def test_model_with_gradients() -> None:
    model = network()
    model(a_batch()).sum().backward()
    with pytest.raises(ModelError, match=r"0.weight has a gradient already; call optimizer.zero_grad"):
        forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu")
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("policy", ["auto", "stream"])
def test_second_prepare(policy: str) -> None:
    model = network()
    model, optimizer = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu", policy=policy)
    for outer in (model, nn.Sequential(model), model[0]):
        with pytest.raises(ModelError, match=r"is prepared already; call forebay\.close\(model\)"):
            forebay.prepare(outer, adamw(model), device_memory="64MiB", device="cpu")
    assert_trains_under_forebay(model, optimizer)
    forebay.close(model)
    model, optimizer = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu", policy=policy)
    assert_trains_under_forebay(model, optimizer)
    forebay.close(model)


def test_a_prepared_optimizer_with_another_model() -> None:
    model = network()
    model, optimizer = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu")
    with pytest.raises(OptimizerError, match="StreamedOptimizer is not an optimizer that forebay runs"):
        forebay.prepare(network(), optimizer, device_memory="64MiB", device="cpu")
    forebay.close(model)


@pytest.mark.parametrize(
    "use",
    [
        forebay.parameters,
        forebay.gradients,
        forebay.report,
        forebay.synchronize,
        forebay.initialize,
        lambda m: forebay.load(m, "/"),
    ],
)
def test_a_model_that_is_not_prepared(use: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(UsageError, match=r"not prepared; call forebay\.prepare\(model, optimizer, \.\.\.\) first"):
        use(network())


def test_closing_what_is_not_prepared_does_nothing() -> None:
    model = network()
    forebay.close(model)
    assert_trains(model, adamw(model))


TEXTS = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "another object": lambda text: "[1, 2]",
    "another schema": lambda text: text.replace(f'"schema": {PLAN_SCHEMA}', '"schema": 99'),
    "a word for a number": lambda text: text.replace('"prefetch_distance": ', '"prefetch_distance": "many", "x": '),
    "an unknown tier": lambda text: text.replace('"parameters": "host"', '"parameters": "attic"', 1),
}


@pytest.mark.parametrize("how", TEXTS)
def test_a_plan_that_cannot_be_read(how: str) -> None:
    text = TEXTS[how](plan_for(network()).to_json())
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(text)
    assert "\n" not in str(caught.value)
    assert "Plan" in str(caught.value) or "make the plan again" in str(caught.value)


def test_a_plan_that_was_read_is_the_plan() -> None:
    plan = plan_for(network())
    read = Plan.from_json(plan.to_json())
    assert read == plan
    model = network()
    model, optimizer = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu", plan=read)
    assert_trains_under_forebay(model, optimizer)
    forebay.close(model)
