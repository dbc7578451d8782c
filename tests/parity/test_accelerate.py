"""A loop with Accelerate and a memory plan: the losses, norms and weights of the loop without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.errors import ConfigError, ModelError
from forebay.integrations.accelerate import FOLDER, ForebayAccelerator, Memory
from forebay.memory import Tier

BUDGET = "1408KiB"
"""Of device memory: parameters, gradients and states of the model take 2.4 MiB."""


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (24, 32), generator=generator)]


@pytest.fixture(autouse=True)
def apart() -> None:
    """Accelerate keeps its settings for a whole process."""
    begin_anew()


def begin_anew() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Loop:
    """A loop as Accelerate's documentation has it; with ``memory`` its first line is another one."""

    def __init__(self, memory: Memory | None, **more: Any) -> None:
        torch.manual_seed(3)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        made = LlamaForCausalLM(LlamaConfig(vocab_size=256, attention_dropout=0.1, **shape))
        given = {"cpu": True, "gradient_accumulation_steps": 2, **more}
        self.accelerator = Accelerator(**given) if memory is None else ForebayAccelerator(memory=memory, **given)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        # A generator of its own: dropout draws from the common one.
        order = torch.Generator().manual_seed(5)
        loader = DataLoader(data(), batch_size=4, shuffle=True, generator=order)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            made, optimizer, loader, scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, batches: int, skipped: int = 0) -> None:
        """``batches`` of one epoch after the first ``skipped``."""
        self.model.train()
        loader = self.accelerator.skip_first_batches(self.loader, skipped) if skipped else self.loader
        for batch, _ in zip(loader, range(batches), strict=False):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


@pytest.fixture
def closed() -> Iterator[list[Loop]]:
    """Loops whose models are closed at the end."""
    loops: list[Loop] = []
    yield loops
    for loop in loops:
        forebay.close(loop.model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_it_trains_as_accelerate_does(closed: list[Loop], precision: str) -> None:
    own = Loop(Memory(BUDGET), mixed_precision=precision)
    closed.append(own)
    torch.manual_seed(5)
    own.run(6)
    theirs = Loop(None, mixed_precision=precision)
    torch.manual_seed(5)
    theirs.run(6)
    assert (own.losses, own.norms) == (theirs.losses, theirs.norms)
    assert len(own.norms) == 3
    assert same(own.weights(), theirs.weights())
    assert own.scheduler.get_last_lr() == theirs.scheduler.get_last_lr()
    # It did stream, and says so to any tracker.
    figures = own.accelerator.figures()
    assert 0 < figures["forebay_device_bytes"] <= figures["forebay_predicted_device_bytes"] <= 1408 << 10
    record = forebay.report(own.model)
    assert any(not placement.resident for placement in record.plan.placements)
    assert record.measured_peaks()[Tier.DEVICE] == figures["forebay_device_bytes"]


@pytest.mark.slow
def test_states_are_saved_and_loaded(closed: list[Loop], tmp_path: Path) -> None:
    straight = Loop(Memory(BUDGET, policy="stream-recompute"))
    closed.append(straight)
    torch.manual_seed(5)
    straight.run(6)
    broken = Loop(Memory(BUDGET, policy="stream-recompute"))
    closed.append(broken)
    torch.manual_seed(5)
    broken.run(4)
    broken.accelerator.save_state(str(tmp_path / "state"))
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {FOLDER, "model.safetensors", "scheduler.bin", "random_states_0.pkl"} <= names
    assert "optimizer.bin" not in names
    assert same(load_file(tmp_path / "state" / "model.safetensors"), broken.weights())
    again = Loop(Memory("3MiB", policy="stream"))
    closed.append(again)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert same(again.weights(), broken.weights())
    again.run(2, skipped=4)
    assert again.losses == straight.losses[4:]
    assert same(again.weights(), straight.weights())


def test_what_is_not_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="what the model is called with"):
        ForebayAccelerator(memory=Memory(BUDGET), cpu=True).prepare(*parts())
    pairs = DataLoader([(torch.zeros(2), torch.zeros(2))] * 2)
    with pytest.raises(ConfigError, match="batches are of list, of which nobody knows"):
        ForebayAccelerator(memory=Memory(BUDGET), cpu=True).prepare(*parts(), pairs)
    begin_anew()
    with pytest.raises(ModelError, match="no model was prepared with its optimizer"):
        ForebayAccelerator(memory=Memory(BUDGET), cpu=True).figures()


@pytest.mark.parametrize("way", [ForebayAccelerator.prepare, ForebayAccelerator.prepare_optimizer])
def test_an_optimizer_without_its_model_is_refused_where_nothing_has_a_plan(way: Callable[..., Any]) -> None:
    model, optimizer = parts()
    accelerator = ForebayAccelerator(memory=Memory("1MiB", example=torch.zeros(3, 2)), cpu=True)
    alone = accelerator.prepare(model)
    assert torch.equal(alone(torch.zeros(3, 2)), model(torch.zeros(3, 2)))  # to evaluate it, say
    with pytest.raises(ConfigError, match=r"with no plan; give both to one call: accelerator\.prepare\(model, optim"):
        way(accelerator, optimizer)
    model, planned = accelerator.prepare(alone, optimizer)
    _, others = parts()
    assert accelerator.prepare(planned) is planned
    assert accelerator.prepare(others).optimizer is others  # of another model, which trains beside it
    forebay.close(model)


def test_blocks_are_compiled_one_by_one() -> None:
    model, optimizer = parts()
    example = torch.zeros(3, 2)
    accelerator = ForebayAccelerator(memory=Memory("1MiB", example=example), cpu=True, dynamo_backend="eager")
    prepared, optimizer = accelerator.prepare(model, optimizer)
    # Neither wrapped nor compiled as a whole; what Accelerate was asked for holds for another model.
    assert prepared is model and accelerator.state.dynamo_plugin.backend.value == "EAGER"
    assert [module._compiled_call_impl is not None for module in model.modules()] == [False, True, True]
    accelerator.backward(prepared(example).sum())
    optimizer.step()
    forebay.close(model)
    assert all(module._compiled_call_impl is None for module in model.modules())
    begin_anew()
    alone = torch.nn.Linear(2, 2)
    accelerator = ForebayAccelerator(memory=Memory("1MiB", example=example), cpu=True, dynamo_backend="eager")
    with pytest.raises(ModelError, match="the model has no blocks; name them"):
        accelerator.prepare(alone, torch.optim.SGD(alone.parameters(), lr=0.1))


def test_an_example_says_what_the_model_is_called_with() -> None:
    model, optimizer = parts()
    example = torch.zeros(3, 2)
    accelerator = ForebayAccelerator(memory=Memory("1MiB", example=example), cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    other, others = parts()
    with pytest.raises(ConfigError, match="plans for one model with one optimizer"):
        accelerator.prepare(other, others)
    accelerator.backward(model(example).sum())
    optimizer.step()
    forebay.close(model)


def test_a_model_that_was_closed_is_accelerates_own(tmp_path: Path) -> None:
    example = torch.zeros(3, 2)
    accelerator = ForebayAccelerator(memory=Memory("1MiB", example=example), cpu=True)
    own, optimizer = parts()
    model, _ = accelerator.prepare(own, optimizer)
    forebay.close(model)
    accelerator.save_state(str(tmp_path / "closed"))
    assert same(load_file(tmp_path / "closed" / "model.safetensors"), model.state_dict())
    assert not (tmp_path / "closed" / FOLDER).exists()
    with pytest.raises(ModelError, match="no model was prepared with its optimizer"):
        accelerator.figures()
    model, again = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    accelerator.backward(model(example).sum())
    again.step()
    accelerator.save_state(str(tmp_path / "again"))
    assert {path.name for path in (tmp_path / "again").iterdir()} >= {FOLDER, "model.safetensors"}
    assert not (tmp_path / "again" / "optimizer.bin").exists()
    accelerator.load_state(str(tmp_path / "again"))
    forebay.close(model)


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
