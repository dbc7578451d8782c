"""Adafactor and CAME behind ``forebay.prepare``: the last bits of the optimizer that is given, wherever updates run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

import forebay
from forebay.arenas import arenas_of
from forebay.errors import DoesNotFit, OptimizerError
from forebay.layout import PAGE, align, state_layout
from forebay.memory import Kind, Tier
from forebay.optim import Adafactor
from forebay.optim.reading import read_optimizer
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.states import plain_name
from forebay.units import MiB
from tests.null.updating import updating

AMPLE = "64MiB"
STEPS = 3
WORDS, WIDTH = 300, 48

Groups = list[dict[str, Any]]

Make = Callable[[nn.Module], torch.optim.Optimizer]

Left = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Losses of a run, and the parameters and states that it leaves."""


def came(groups: Any, **numbers: Any) -> torch.optim.Optimizer:
    """That of came_pytorch, which machines with a card may lack."""
    from came_pytorch import CAME

    made: torch.optim.Optimizer = CAME(groups, lr=1e-3, **numbers)
    return made


MAKERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "forebay": lambda g: Adafactor(g, lr=1e-2, weight_decay=0.1),
    "torch": lambda g: torch.optim.Adafactor(g, lr=1e-2, weight_decay=0.1),
    "torch-tensor": lambda g: torch.optim.Adafactor(g, lr=torch.tensor(1e-2), weight_decay=0.1),
    "torch-maximize": lambda g: torch.optim.Adafactor(g, lr=1e-2, eps=(1e-10, 1e-3), d=2.0, maximize=True),
    "transformers": TransformersAdafactor,
    "transformers-warmup": lambda g: TransformersAdafactor(g, warmup_init=True, weight_decay=0.1),
    "transformers-momentum": lambda g: TransformersAdafactor(
        g, lr=1e-3, relative_step=False, scale_parameter=False, weight_decay=0.1, beta1=0.9
    ),
    "came": lambda g: came(g),
    "came-other": lambda g: came(g, eps=(1e-20, 1e-12), clip_threshold=0.5, betas=(0.8, 0.99, 0.999), weight_decay=0.1),
}


class Layer(nn.Module):
    """A matrix, tensors of four dimensions, in their order and in another one, vectors, and what has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH + 5), nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH + 5, WIDTH, bias=False)
        self.mix = nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(self.norm(x)).tanh()) * self.scale
        return x + self.last(self.mix(y.view(len(x), 3, -1, WIDTH // 3))).reshape(x.shape)


class Words(nn.Module):
    """Layers between an embedding that is larger than a chunk, and a head; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Words().to(dtype)


def groups_of(model: nn.Module) -> Groups:
    """Two, of which the second one decays otherwise."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.01}]


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 12), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: bool = True) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step))
        loss.backward()
        if clip:
            # The first step is clipped: an update ahead of it is made anew.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6 if step else 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The states that are tensors and are kept in a plan, by the place of their parameter."""
    kept = {*map(plain_name, names), "master"}
    saved = optimizer.state_dict()["state"]
    return {f"{i}.{k}": v.clone() for i, state in saved.items() for k, v in state.items() if k in kept}


def by(name: str) -> Make:
    """Makes the optimizer called ``name`` for a model."""
    return lambda model: MAKERS[name](groups_of(model))


def plain(name: str, clip: bool = True) -> Left:
    """Losses, parameters and states of plain PyTorch."""
    model = network()
    optimizer = MAKERS[name](groups_of(model))
    losses = train(model, optimizer, range(STEPS), clip)
    states = states_of(optimizer, read_optimizer(MAKERS[name](groups_of(network()))).state_names)
    return losses, {n: p.detach() for n, p in model.named_parameters()}, states


def streamed_by(make: Make, dtype: torch.dtype, update: Update, *, disk: bool) -> Plan:
    """Every block on the host or on ``disk``, in chunks of 1,024 elements or of one parameter, with this ``update``."""
    model = network(dtype)
    model, _ = forebay.prepare(model, make(model), device_memory=AMPLE, policy="stream", device="cpu")
    made = forebay.report(model).plan
    forebay.close(model)
    home = Tier.DISK if disk else Tier.HOST
    homes = tuple(p if p.parameters is Tier.DEVICE else replace(p, parameters=home) for p in made.placements)
    largest = align(max(made.streaming.slots), PAGE)
    how = replace(made.streaming, update_chunk=1024, host_slots=(largest,) * 2 if disk else ())
    window = 8 * MiB if update is Update.DEVICE else 0
    plan = replace(made, placements=tuple(replace(p, states=home) for p in homes), streaming=how)
    plan = updating(plan, update, [p.block for p in homes], streaming=replace(how, update_window=window))
    bare = network(dtype)
    rule = read_optimizer(make(bare))
    sizes = arenas_of(find_blocks(bare, keeping=rule.keeping).model, plan, rule.state_names)
    return replace(plan, device=sizes.device, host=sizes.host, disk=sizes.disk)


WAYS = [(how, disk) for how in (Update.STEP, Update.AHEAD, Update.DEVICE) for disk in (False, True)]


def assert_the_same_wherever(
    make: Make, names: tuple[str, ...], expected: Left, update: Update, folder: Path, *, disk: bool
) -> None:
    """Losses, states called ``names`` and parameters are ``expected`` where updates run as ``update`` says."""
    losses, parameters, states = expected
    plan = streamed_by(make, torch.float32, update, disk=disk)
    model = network()
    model, optimizer = forebay.prepare(
        model, make(model), plan=plan, device_memory=AMPLE, disk=f"{folder}:64MiB", device="cpu"
    )
    assert train(model, optimizer, range(STEPS)) == losses
    found = states_of(optimizer, names)
    assert found.keys() == states.keys()
    assert all(torch.equal(found[key], value) for key, value in states.items())
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in parameters.items())
    counted = forebay.report(model).timeline.counters
    assert update is not Update.AHEAD or (counted["committed"] > 0 and counted["redone"] > 0)
    forebay.close(model)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("update", "disk"), [*WAYS, (Update.STORAGE, True)])
@pytest.mark.parametrize("name", MAKERS)
def test_wherever_an_update_runs(name: str, update: Update, disk: bool, tmp_path: Path) -> None:
    assert_the_same_wherever(by(name), read_states(name), plain(name), update, tmp_path, disk=disk)


def wide(dtype: torch.dtype, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and masters of plain PyTorch with an fp32 copy of each parameter."""
    model = network(dtype)
    masters = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    optimizer = MAKERS[name]([{"params": list(masters.values())}])
    for step in range(STEPS):
        model(batch(step)).backward()
        for n, p in model.named_parameters():
            masters[n].grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(masters[n])
    return {n: p.detach() for n, p in model.named_parameters()}, {n: p.detach() for n, p in masters.items()}


@pytest.mark.parametrize("policy", ["resident", "stream"])
@pytest.mark.parametrize("name", ["torch", "transformers-momentum", "came-other"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_have_masters(dtype: torch.dtype, name: str, policy: str) -> None:
    values, masters = wide(dtype, name)
    model = network(dtype)
    optimizer = MAKERS[name]([{"params": list(model.parameters())}])
    model, optimizer = forebay.prepare(model, optimizer, device_memory=AMPLE, policy=policy, device="cpu")
    train(model, optimizer, range(STEPS), clip=False)
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in masters.items())
    assert all(torch.equal(p, values[n]) for n, p in model.state_dict().items())
    forebay.close(model)


def assert_states_are_exchanged(make: Make, losses: list[float], refused: str) -> None:
    """Plain and prepared go on from each other's states, to ``losses``; those of AdamW are ``refused``."""
    one, two = network(), network()
    first = make(one)
    begun = train(one, first, range(2))
    two.load_state_dict(one.state_dict())
    prepared, second = forebay.prepare(two, make(two), device_memory=AMPLE, policy="stream", device="cpu")
    second.load_state_dict(first.state_dict())
    assert begun + train(prepared, second, range(2, STEPS)) == losses
    three = network()
    three.load_state_dict(prepared.state_dict())
    third = make(three)
    third.load_state_dict(second.state_dict())
    assert train(prepared, second, range(STEPS, 5)) == train(three, third, range(STEPS, 5))
    assert all(torch.equal(forebay.parameters(prepared)[n], p) for n, p in three.named_parameters())
    other = network()
    wrong = torch.optim.AdamW([{"params": group["params"]} for group in make(other).param_groups])
    train(other, wrong, range(1))
    with pytest.raises(OptimizerError, match=refused):
        second.load_state_dict(wrong.state_dict())
    forebay.close(prepared)


@pytest.mark.parametrize("name", ["forebay", "torch", "transformers", "came"])
def test_plain_and_prepared_load_each_others_states(name: str) -> None:
    losses, _, _ = plain(name)
    assert_states_are_exchanged(by(name), losses, r"has no .*; it is another optimizer's")


def assert_resumes(make: Make, names: tuple[str, ...], expected: Left, folder: Path, *, disk: bool) -> None:
    """Saved with states at home on the host or on ``disk``, and resumed under another plan: what is ``expected``."""
    losses, parameters, states = expected
    saved = folder / "run"
    plan = streamed_by(make, torch.float32, Update.STEP, disk=disk)
    model = network()
    model, optimizer = forebay.prepare(
        model, make(model), plan=plan, device_memory=AMPLE, disk=f"{folder}:64MiB", device="cpu"
    )
    begun = train(model, optimizer, range(2))
    forebay.save(model, optimizer, saved, step=2)
    forebay.close(model)
    other = network()
    other, resumed = forebay.prepare(other, make(other), device_memory=AMPLE, device="cpu")
    forebay.resume(other, resumed, saved)
    assert begun + train(other, resumed, range(2, STEPS)) == losses
    assert all(torch.equal(forebay.parameters(other)[n], p) for n, p in parameters.items())
    assert all(torch.equal(value, states[k]) for k, value in states_of(resumed, names).items())
    forebay.close(other)


@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
def test_saved_and_resumed_under_another_plan(disk: bool, tmp_path: Path) -> None:
    assert_resumes(by("torch"), read_states("torch"), plain("torch"), tmp_path, disk=disk)


def read_states(name: str) -> tuple[str, ...]:
    return read_optimizer(MAKERS[name](groups_of(network()))).state_names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["forebay", "torch"])
def test_what_the_host_holds(name: str, dtype: torch.dtype) -> None:
    """Parameters, their gradients, and of states a number for each row and column (and masters), in whole pages for a
    chunk; to update in, the largest parameter (and its gradient in fp32), or for forebay's gradient, parameter and
    update of a part of it; its rows and columns, and 64 bytes; one gradient waits to be added to what has landed
    before."""
    model = network(dtype)
    optimizer = MAKERS[name](groups_of(model))
    model, optimizer = forebay.prepare(model, optimizer, device_memory=AMPLE, policy="stream", device="cpu")
    plan = forebay.report(model).plan
    train(model, optimizer, range(2))
    (host,) = (u for u in forebay.report(model).timeline.tiers if u.tier is Tier.HOST)
    forebay.close(model)
    blocks = [b for b in find_blocks(network(dtype)).model.blocks for p in plan.placements if p.block == b.name]
    hosted = [b for b in blocks if not next(p.resident for p in plan.placements if p.block == b.name)]
    width = 4 if dtype is torch.float32 else 2
    copies = 3 if name == "forebay" else 1 if dtype is torch.float32 else 2
    largest = WORDS * WIDTH * 4 * copies + 4 * (WORDS + WIDTH)
    states = sum(
        state_layout(b, read_states(name), plan.streaming.update_chunk, plan.streaming.masters).nbytes for b in hosted
    )
    masters = 4 * sum(p.numel for b in hosted for p in b.parameters) if width == 2 else 0
    assert 0 < states - masters < 3 * PAGE * len(hosted)
    assert host.at_peak[Kind.STATE] == states
    assert host.at_peak[Kind.STAGING] == align(largest) + 64 + WORDS * WIDTH * width
    assert host.peak == plan.host


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["forebay", "torch", "transformers-momentum", "came"])
def test_the_least_device_memory_is_enough(name: str) -> None:
    """What an update makes on the device is within the budget, where all is there and where nothing stays."""
    losses, _, _ = plain(name)
    for policy in ("resident", "stream"):
        model = network()
        with pytest.raises(DoesNotFit) as refused:
            forebay.prepare(
                model, MAKERS[name](groups_of(model)), batch(0), device_memory=4096, policy=policy, device="cpu"
            )
        model, optimizer = forebay.prepare(
            model,
            MAKERS[name](groups_of(model)),
            batch(0),
            device_memory=refused.value.needed,
            policy=policy,
            device="cpu",
        )
        assert train(model, optimizer, range(STEPS)) == losses
        forebay.close(model)


def test_rows_of_a_tile_are_no_rows_of_the_weight() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
    forebay.tile(model, "128KiB")
    optimizer = torch.optim.Adafactor(model.parameters())
    model, _ = forebay.prepare(model, optimizer, torch.ones(2, 256), device_memory=AMPLE, device="cpu")
    (said,) = forebay.report(model).plan.changes_numbers
    assert said.startswith("0: the optimizer looks at each tile by itself")
    forebay.close(model)
