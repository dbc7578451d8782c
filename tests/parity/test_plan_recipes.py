"""Recipes of every kind through ``forebay plan``'s own path: a plan of each policy, checked and foretold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

import torch

import forebay
from forebay.budgets import Budget
from forebay.catalogue import load_machine
from forebay.checking import check
from forebay.cli.main import app
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.machine import Machine
from forebay.planners.parts import recomputable
from forebay.planning import assess
from forebay.profiler.batch import with_values
from forebay.profiler.capture import capture
from forebay.recipes import load_recipe
from forebay.recipes.tasks import sample
from forebay.trace import Trace

GiB = 2**30


def roomy(name: str = "rtx-4090") -> Machine:
    return replace(load_machine(name), host_capacity=512 * GiB, pinned_capacity=512 * GiB)


def shorter(tmp_path: Path, recipe: str, **changes: object) -> str:
    """The recipe with some settings changed: the same layers, fewer of them."""
    folder = tmp_path / recipe
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**load_recipe(recipe).model, **changes}))
    return str(folder)


def step(name: str, dtype: str = "float32", batch: int = 1) -> Trace:
    made = sample(name, batch=batch, seq=64, dtype=dtype)
    return capture(made.model, made.batch, "adamw", "cuda").trace


def assert_planned(trace: Trace, policy: str) -> None:
    machine = roomy()
    report = assess("model", trace, machine, Budget(machine.device_capacity), policy)
    assert report.plan is not None and report.step is not None, report.reasons
    assert report.step.limit_seconds <= report.step.seconds
    assert all(usage.peak <= (usage.limit or usage.peak) for usage in report.tiers)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recipe", ["gpt2", "t5-small", "vit-base"])
def test_recipes_of_every_kind_are_planned(recipe: str) -> None:
    trace = step(recipe)
    for policy in ("resident", "recompute", "stream", "stream-recompute", "auto"):
        assert_planned(trace, policy)


@pytest.mark.parametrize("recipe", ["gpt2", "llama-135m", "t5-small", "olmoe-1b-7b", "vit-base"])
def test_a_step_has_no_cache_for_generation(recipe: str, tmp_path: Path) -> None:
    """Its output would hold the keys and values of all layers; the configuration, which is exported, still asks for
    one."""
    fewer = {} if recipe == "vit-base" else {"num_layers": 2} if recipe == "t5-small" else {"num_hidden_layers": 2}
    made = sample(shorter(tmp_path, recipe, **fewer), batch=1, seq=8, dtype="float32")
    model: Any = made.model.to_empty(device="cpu")
    batch = with_values(made.batch, model, "cpu")
    assert model(**batch).get("past_key_values") is None
    if recipe != "vit-base":
        assert model.config.use_cache
        assert model(**{**batch, "use_cache": True}).past_key_values is not None


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_that_are_part_of_something_larger_are_planned(accumulates: bool) -> None:
    """The class token's gradient is a row of that of all tokens, which stays with it (605,184 bytes for 3,072)."""
    trace, machine = step("vit-base"), roomy()
    plan = forebay.plan(trace, machine, Budget(machine.device_capacity), "resident", accumulates=accumulates)
    for micro_batches in (1, 2) if accumulates else (1,):
        check(trace, machine, plan, lower(trace, plan, micro_batches=micro_batches))


def test_a_mixture_of_experts_is_planned(tmp_path: Path) -> None:
    trace = step(shorter(tmp_path, "mixtral-8x7b", num_hidden_layers=2, intermediate_size=1024), "bfloat16")
    for policy in ("resident", "stream", "auto"):
        assert_planned(trace, policy)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_gradient_that_autograd_hands_on_as_it_is_stays_until_its_last_reader(batch: int) -> None:
    # The gradient of the position embeddings of one image is that of the sum they are added to, and that one is read
    # again, by the backward of the patches.
    trace = step("vit-base", batch=batch)
    roots = {number: tensor.root for number, tensor in trace.tensors()}
    complete: set[int] = set()
    late: set[int] = set()
    for _, visit, op in trace.ops():
        late |= complete & {roots[visit.resolve(r)] for r in op.inputs}
        complete |= {roots[visit.resolve(g.tensor)] for g in op.gradients}
    assert bool(late) == (batch == 1)
    assert_planned(trace, "stream")


def test_the_layers_of_recipes_may_recompute() -> None:
    trace = step("gpt2")
    layers = {b.name for b in trace.model.blocks if b.name.startswith("transformer.h.")}
    assert len(layers) == 12 and layers <= set(recomputable(trace))


def test_a_plan_of_our_own_that_is_rejected_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise PlanInvalid("action 7 (fetch h.0): it reads what is not there", action=7, subject="h.0")

    monkeypatch.setattr("forebay.planners.bench.check", reject)
    done = CliRunner().invoke(app, ["plan", "tiny", "--machine", "rtx-4090", "--seq", "16", "--json"])
    assert done.exit_code == 1
    assert done.stdout == "" and "Traceback" not in done.output
    said = " ".join(done.stderr.split())
    assert "this is a fault of forebay" in said and "action 7 (fetch h.0)" in said


def test_capture_leaves_threads_and_collector_as_they_were() -> None:
    import gc

    threads, running = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(2)
    try:
        step("tiny")
        assert torch.get_num_threads() == 2 and gc.isenabled()
        gc.disable()
        step("tiny")
        assert not gc.isenabled()
    finally:
        torch.set_num_threads(threads)
        if running:
            gc.enable()
