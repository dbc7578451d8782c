"""Graphs of every kind over what was moved to the host: nothing is left behind, and no number changes."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import ModelError
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.runtime.stash import Stash
from forebay.timeline import Event
from forebay.treatments import Fate, Selection, Treatment
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import CASES, Case
from tests.parity.offloading import larger, movable, moving
from tests.parity.recomputing import AMPLE, plan_of
from tests.parity.test_offload_memory import DEPTH, INPUT, TOWER, of_layers

EACH = DEPTH * 9 * INPUT
"""Bytes that one pass moves."""


class Trial:
    """A tower of which everything is moved, beside the same in plain PyTorch."""

    def __init__(self, arena: int = EACH, device: CpuDevice | None = None) -> None:
        self.plain = TOWER.model(torch.float32)
        model = TOWER.model(torch.float32)
        plan = plan_of(find_blocks(model).model, (), resident=True)
        plan = moving(plan, of_layers(DEPTH), arena=arena, offload_window=4 * INPUT, reload_window=8 * INPUT)
        self.device = device or CpuDevice(AMPLE)
        self.model, self.optimizer = forebay.prepare(
            model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device=self.device
        )
        self.standing = self.device.ledger.live

    @property
    def stash(self) -> Stash:
        attachment = session_of(self.model)
        assert attachment is not None
        return attachment.session.stash

    def loss(self, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**TOWER.inputs(step, torch.float32))["loss"]
        return loss

    def assert_same_gradients(self, *steps: int) -> None:
        """As plain PyTorch makes them in ``steps``; afterwards, because what it takes would be charged in between."""
        self.plain.zero_grad()
        for step in steps:
            self.plain(**TOWER.inputs(step, torch.float32))["loss"].backward()
        gradients = forebay.gradients(self.model)
        for name, parameter in self.plain.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(gradients[name], parameter.grad), name

    def assert_nothing_left(self) -> None:
        """Once the gradients are gone: no byte of the arena is taken, none of the device beside what stands."""
        forebay.synchronize(self.model)
        self.optimizer.zero_grad()
        assert self.stash.taken == 0
        assert self.device.ledger.live == self.standing

    def close(self) -> None:
        forebay.close(self.model)
        self.device.close()
        assert self.device.ledger.live == 0


def moves(model: nn.Module, verb: str) -> list[Event]:
    """The copies to the host (``offload``) or back (``reload``) so far."""
    return [e for e in forebay.report(model).timeline.events if e.what.startswith(f"{verb} ")]


def test_nothing_is_left_after_a_step() -> None:
    trial = Trial()
    for step in range(2):
        loss = trial.loss(step)
        assert trial.stash.taken == EACH
        loss.backward()
    trial.assert_same_gradients(0, 1)
    del loss
    trial.assert_nothing_left()
    trial.close()


def test_evaluation_moves_nothing() -> None:
    trial = Trial()
    with torch.no_grad():
        loss = trial.loss(0)
        assert torch.equal(loss, trial.plain(**TOWER.inputs(0, torch.float32))["loss"])
    assert not moves(trial.model, "offload")
    del loss
    trial.assert_nothing_left()
    trial.close()


def test_evaluation_between_forward_and_backward() -> None:
    trial = Trial()
    loss = trial.loss(0)
    with torch.no_grad():
        trial.loss(1)
    loss.backward()
    trial.assert_same_gradients(0)
    del loss
    trial.assert_nothing_left()
    trial.close()


def test_a_graph_that_nobody_runs_backward() -> None:
    """With late copies, the last of which are still under way when the graph goes."""
    trial = Trial(device=CpuDevice(AMPLE, delays=RandomDelays(seed=1, max_seconds=0.002)))
    for step in range(3):
        trial.loss(step)
    loss = trial.loss(3)
    loss.backward()
    trial.assert_same_gradients(3)
    assert trial.stash.kept == 0  # what is free as soon as a copy is done is waited for
    del loss
    trial.assert_nothing_left()
    trial.close()


@pytest.mark.parametrize(("arena", "kept"), [(2 * EACH, 0), (EACH, 3 * DEPTH), (EACH + 8 * INPUT, 3 * DEPTH - 2)])
def test_two_forwards_before_one_backward(arena: int, kept: int) -> None:
    """An arena for one pass holds one: what the second makes stays on the device."""
    trial = Trial(arena)
    first, second = trial.loss(0), trial.loss(1)
    assert trial.stash.kept == kept
    (first + second).backward()
    trial.assert_same_gradients(1, 0)
    del first, second
    trial.assert_nothing_left()
    trial.close()


def test_backward_in_the_order_of_forward() -> None:
    trial = Trial(2 * EACH)
    losses = [trial.loss(step) for step in range(2)]
    for loss in losses:
        loss.backward()
    trial.assert_same_gradients(0, 1)
    losses.clear()
    del loss
    trial.assert_nothing_left()
    trial.close()


def test_a_second_backward_over_the_same_graph() -> None:
    trial = Trial()
    loss = trial.loss(0)
    loss.backward(retain_graph=True)
    trial.assert_same_gradients(0)
    loss.backward()
    trial.assert_same_gradients(0, 0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert (
        len(moves(trial.model, "reload")) == 3 * DEPTH
    )  # once each: a graph that is retained keeps on the device what has come back
    del loss
    trial.assert_nothing_left()
    trial.close()


def test_a_gradient_of_a_gradient() -> None:
    def norm(model: nn.Module) -> torch.Tensor:
        loss = model(**TOWER.inputs(0, torch.float32))["loss"]
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return torch.stack([g.square().sum() for g in gradients]).sum()

    trial = Trial()
    norm(trial.model).backward()
    norm(trial.plain).backward()
    gradients = forebay.gradients(trial.model)
    for name, parameter in trial.plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], parameter.grad), name
    del gradients, parameter
    gc.collect()
    trial.assert_nothing_left()
    trial.close()


def test_a_backward_of_a_part_of_the_graph() -> None:
    """What it did not ask for is let go with the graph, brought back ahead or not."""
    trial = Trial()
    last = trial.model.get_submodule(f"layers.{DEPTH - 1}")
    torch.autograd.grad(trial.loss(0), list(last.parameters()))
    trial.assert_nothing_left()
    trial.close()


def test_an_output_that_the_user_keeps() -> None:
    """Its storage lives on; its range in the arena is free with the graph."""
    trial, seen = Trial(), list[torch.Tensor]()
    layer = trial.model.get_submodule("layers.1")
    handle = layer.register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    trial.loss(0).backward()
    trial.assert_same_gradients(0)
    assert trial.stash.taken == 0
    handle.remove()
    assert seen[0].isfinite().all()
    seen.clear()
    trial.assert_nothing_left()
    trial.close()


class Changing(nn.Module):
    """Layers whose result is changed in place before it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).relu_()
        return {"loss": x.mean()}


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(64, 32, generator=torch.Generator().manual_seed(step))}


def by_hand(case: Case, op: str, arena: int) -> Plan:
    """A plan that moves the first run of ``op`` in every block, whatever a trace would say about what is done to it."""
    plan = plan_of(find_blocks(case.model(torch.float32)).model, (), resident=True)
    blocks = tuple(p.block for p in plan.placements)
    streaming = replace(plan.streaming, host_activations=arena, offload_window=arena)
    chosen = (Selection(blocks, (Treatment(op, 0, Fate.OFFLOAD),)),)
    return replace(plan, streaming=streaming, activations=chosen, host=plan.host + arena)


def test_what_is_changed_before_it_is_saved_leaves_as_it_is_then() -> None:
    case = Case(Changing, batch)
    plan = by_hand(case, "aten.addmm.default", 2**20)
    model = assert_same_training(case, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    assert len(moves(model, "offload")) == len(moves(model, "reload")) == 3 * 4
    forebay.close(model)


class Squashed(nn.Module):
    """Autograd saves what ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).sigmoid()
        return {"loss": x.mean()}


@pytest.mark.parametrize("recompute", [(), ("layers.1",)], ids=["kept", "again"])
def test_a_graph_without_a_backward_goes_with_its_loss(recompute: tuple[str, ...]) -> None:
    """Nothing moves here. A node that had its own result by way of forebay's hooks would hold itself for good."""
    model, device = Squashed(), CpuDevice(AMPLE)
    plan = plan_of(find_blocks(model).model, recompute, resident=False)
    prepared, _ = forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device=device)
    standing = device.ledger.live
    prepared(**batch(0))
    assert device.ledger.live == standing
    forebay.close(prepared)


class Conjugated(nn.Module):
    """What is saved are views of layers' results, as complex numbers, of which autograd conjugates (or negates) what it
    reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        one, two = (torch.view_as_complex(layer(x).unflatten(-1, (16, 2))) for layer in self.layers)
        return {"loss": (one.conj() * two).real.square().mean() + (two.conj().imag * one.real).mean()}


def test_what_is_saved_conjugated_comes_back_so() -> None:
    case = Case(Conjugated, batch)
    plan = by_hand(case, "aten.addmm.default", 2**20)
    model = assert_same_training(case, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    assert len(moves(model, "offload")) == 2 * 4
    forebay.close(model)


def test_what_is_changed_after_it_was_saved_is_an_error_as_in_plain_pytorch() -> None:
    trial = Trial()
    outputs: list[torch.Tensor] = []
    for model, error in ((trial.plain, RuntimeError), (trial.model, ModelError)):
        model.get_submodule("layers.1").register_forward_hook(lambda m, a, out: outputs.append(out))
        loss = model(**TOWER.inputs(0, torch.float32))["loss"]
        with torch.no_grad():
            outputs.pop().mul_(2)
        with pytest.raises(error, match=r"(changed|modified).*version 1"):
            loss.backward()
    del loss
    gc.collect()  # the error's frames
    trial.assert_nothing_left()
    trial.close()


def test_a_model_that_checkpoints_itself() -> None:
    """Its checkpoints lie inside the blocks: of what a block makes only its result is saved outside of them."""
    case = larger(CASES["checkpointed"])
    # With its checkpoints, which forebay.profile leaves to a plan; one without a trace leaves them on.
    named = movable(capture(case.model(torch.float32), case.inputs(0, torch.float32)).trace)
    plan = moving(plan_of(find_blocks(case.model(torch.float32)).model, (), resident=False), named)
    model = assert_same_training(case, torch.float32, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    moved = Counter(e.what.split(maxsplit=1)[1] for e in moves(model, "offload") if "layers" in e.what)
    assert set(moved) == {f"model.layers.{i} aten.add.Tensor#5" for i in range(4)}
    assert moved == Counter(e.what.split(maxsplit=1)[1] for e in moves(model, "reload") if "layers" in e.what)
    forebay.close(model)


class Wrapped(nn.Module):
    """Checkpoints each of its layers from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return {"loss": x.square().mean()}


def test_a_checkpoint_around_the_block_keeps_what_it_keeps() -> None:
    """It decides what is saved: nothing is moved in its forward, nor in its recomputation."""
    case = Case(Wrapped, batch)
    plan = by_hand(case, "aten.addmm.default", 2**20)
    model = assert_same_training(case, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    assert not moves(model, "offload")
    forebay.close(model)


def test_an_op_that_the_model_does_not_have_moves_nothing() -> None:
    plan = by_hand(TOWER, "aten.relu.default", 2**20)
    model = assert_same_training(TOWER, torch.float32, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    assert not moves(model, "offload")
    forebay.close(model)
