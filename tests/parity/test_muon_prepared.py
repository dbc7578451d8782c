"""Muon behind ``forebay.prepare``: the bits of torch's optimizers, wherever an update runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit
from forebay.layout import PAGE, align, state_layout
from forebay.memory import Kind, Tier
from forebay.optim import Muon, muon_groups
from forebay.optim.reading import read_optimizer
from forebay.plans import Update
from forebay.profiler.capture import capture
from forebay.runtime.blocks import find_blocks
from forebay.states import MUON
from tests.parity.test_adafactor_prepared import (
    AMPLE,
    STEPS,
    WAYS,
    WIDTH,
    WORDS,
    Left,
    assert_resumes,
    assert_states_are_exchanged,
    assert_the_same_wherever,
    batch,
    network,
    states_of,
    train,
)

OTHER = {"lr": 1e-3, "weight_decay": 0.01}


def muon(model: nn.Module) -> Muon:
    matrices, others = muon_groups(model)
    return Muon([matrices, {**others, **OTHER}], lr=0.02)


def matrices_only(model: nn.Module) -> torch.optim.Optimizer:
    """torch's, of some of the parameters; the others stay as they are."""
    return torch.optim.Muon(muon_groups(model)[0]["params"], lr=0.02, nesterov=False)


MAKERS = {"forebay": muon, "torch": matrices_only}


class Pair(torch.optim.Optimizer):
    """torch's two, as its documentation puts them together: what is to be done."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = (group["params"] for group in muon_groups(model))
        self.both = (
            torch.optim.Muon(matrices, lr=0.02),
            torch.optim.AdamW(others, fused=True, **OTHER),
        )
        super().__init__([*matrices, *others], {})

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.both:
            optimizer.step()

    def states(self) -> dict[str, torch.Tensor]:
        found = {}
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            for optimizer in self.both:
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{number}.{key}"] = value
        return {key: value for key, value in found.items() if not key.endswith(".step")}


def plain(name: str) -> Left:
    """Losses, parameters and states of plain PyTorch."""
    model = network()
    if name == "forebay":
        pair = Pair(model)
        losses, states = train(model, pair, range(STEPS)), pair.states()
    else:
        optimizer = matrices_only(model)
        losses, states = train(model, optimizer, range(STEPS)), states_of(optimizer, MUON)
    return losses, {n: p.detach() for n, p in model.named_parameters()}, states


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("update", "disk"), [*WAYS, (Update.STORAGE, True)])
@pytest.mark.parametrize("name", MAKERS)
def test_wherever_an_update_runs(name: str, update: Update, disk: bool, tmp_path: Path) -> None:
    assert_the_same_wherever(MAKERS[name], MUON, plain(name), update, tmp_path, disk=disk)


@pytest.mark.parametrize("policy", ["resident", "stream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_have_masters(dtype: torch.dtype, policy: str) -> None:
    """The numbers of plain PyTorch with an fp32 copy of each parameter."""
    narrow, wide = network(dtype), network(dtype).float()
    optimizer = Pair(wide)
    for step in range(STEPS):
        narrow(batch(step)).backward()
        for own, copy in zip(narrow.parameters(), wide.parameters(), strict=True):
            copy.grad = None if own.grad is None else own.grad.float()
        optimizer.step()
        narrow.zero_grad()
        with torch.no_grad():
            for own, copy in zip(narrow.parameters(), wide.parameters(), strict=True):
                own.copy_(copy)
    model = network(dtype)
    model, prepared = forebay.prepare(model, muon(model), device_memory=AMPLE, policy=policy, device="cpu")
    train(model, prepared, range(STEPS), clip=False)
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in wide.named_parameters())
    assert all(torch.equal(p, narrow.state_dict()[n]) for n, p in model.state_dict().items())
    forebay.close(model)


@pytest.mark.parametrize("name", MAKERS)
def test_plain_and_prepared_load_each_others_states(name: str) -> None:
    losses, _, _ = plain(name)
    assert_states_are_exchanged(MAKERS[name], losses, r"has no momentum_buffer; it is another optimizer's")


@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
def test_saved_and_resumed_under_another_plan(disk: bool, tmp_path: Path) -> None:
    assert_resumes(muon, MUON, plain("forebay"), tmp_path, disk=disk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_host_holds(dtype: torch.dtype) -> None:
    """Parameters, their gradients, one state of matrices and two of all else (and masters), in whole pages for a chunk.
    To update in, an embedding's gradient in fp32 (of bf16), or what a matrix takes: the same, one and a half of it in
    fp32, two squares in bf16, and 256 bytes for their alignment. One gradient waits to be added to what has landed
    before."""
    model = network(dtype)
    model, optimizer = forebay.prepare(model, muon(model), device_memory=AMPLE, policy="stream", device="cpu")
    plan = forebay.report(model).plan
    train(model, optimizer, range(2))
    (host,) = (u for u in forebay.report(model).timeline.tiers if u.tier is Tier.HOST)
    forebay.close(model)
    bare = network(dtype)
    rule = read_optimizer(muon(bare))
    blocks = find_blocks(bare, keeping=rule.keeping).model.blocks
    hosted = [b for b in blocks if not next(p.resident for p in plan.placements if p.block == b.name)]
    width, wide = (4, 0) if dtype is torch.float32 else (2, 4)
    states = sum(state_layout(b, MUON, plan.streaming.update_chunk, plan.streaming.masters).nbytes for b in hosted)
    expected = sum((4 if p.orthogonal else 8) * p.numel + wide * p.numel for b in hosted for p in b.parameters)
    assert 0 <= states - expected < 3 * PAGE * len(hosted)
    assert any(p.orthogonal for b in hosted for p in b.parameters)
    matrix = WIDTH * (WIDTH + 5) * (wide + 6) + 4 * WIDTH**2
    assert host.at_peak[Kind.STATE] == states
    assert host.at_peak[Kind.STAGING] == max(align(matrix) + 256, align(wide * WORDS * WIDTH)) + WORDS * WIDTH * width
    assert host.peak == plan.host


@pytest.mark.parametrize("policy", ["resident", "stream", "auto"])
def test_the_least_device_memory_is_enough(policy: str) -> None:
    """What an update makes on the device is within the budget, where all is there and where nothing stays."""
    losses, parameters, _ = plain("forebay")
    model = network()
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, muon(model), batch(0), device_memory=4096, policy=policy, device="cpu")
    needed = refused.value.needed
    model, optimizer = forebay.prepare(model, muon(model), batch(0), device_memory=needed, policy=policy, device="cpu")
    assert train(model, optimizer, range(STEPS)) == losses
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in parameters.items())
    (device,) = (u for u in forebay.report(model).timeline.tiers if u.tier is Tier.DEVICE)
    assert device.peak <= needed
    forebay.close(model)


def test_updates_in_backward() -> None:
    model, other = network(), network()
    losses = train(model, Pair(model), range(STEPS), clip=False)
    other, optimizer = forebay.prepare(
        other, muon(other), batch(0), device_memory=AMPLE, policy="stream", device="cpu", update="backward"
    )
    assert train(other, optimizer, range(STEPS), clip=False) == losses
    assert all(torch.equal(forebay.parameters(other)[n], p) for n, p in model.named_parameters())
    forebay.close(other)


def test_a_trace_by_name_is_that_of_the_optimizer() -> None:
    model = network()
    by_name, given = capture(model, batch(0), "muon").trace, capture(model, batch(0), muon(model)).trace
    assert by_name.fingerprint == given.fingerprint
    assert by_name.fingerprint != capture(model, batch(0), matrices_of_none(model)).trace.fingerprint
    assert {p.name for b in given.model.blocks for p in b.parameters if p.orthogonal} == {
        f"layers.{layer}.{way}.weight" for layer in range(3) for way in ("up", "down")
    }


def matrices_of_none(model: nn.Module) -> Muon:
    return Muon([{"params": list(model.parameters()), "use_muon": False}])


def test_a_tile_is_no_matrix_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
    forebay.tile(model, "128KiB")
    groups = muon_groups(model)
    model, _ = forebay.prepare(model, Muon(groups), torch.ones(2, 256), device_memory=AMPLE, device="cpu")
    (said,) = forebay.report(model).plan.changes_numbers
    assert said.startswith("0: the optimizer looks at each tile by itself")
    forebay.close(model)
