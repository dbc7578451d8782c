"""Blocks that stay, beside others that stream: what they save goes through no hooks, and nothing else is different."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.arenas import arenas
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import attachment_of
from forebay.runtime.saved import SavedTensors
from forebay.timeline import Lane
from tests.parity.compare import stepped

WIDTH, LAYERS, STEPS = 16, 6, 6
STREAMED = ("layers.1", "layers.4")
SEEN = 2  # steps in which all is counted: ``VigilPolicy.first``


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


Run = Callable[["Tower", int, torch.Tensor], torch.Tensor]


def called(tower: Tower, place: int, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = tower.layers[place](x)
    return out


class Tower(nn.Module):
    def __init__(self, run: Run, layer: type[Layer]) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in range(LAYERS):
            x = self.run(self, place, x)
        return x


def made(run: Run = called, layer: type[Layer] = Layer) -> Tower:
    torch.manual_seed(0)
    return Tower(run, layer)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def plan_with(streamed: Collection[str], recompute: Collection[str] = ()) -> Plan:
    """All other blocks stay."""
    module = made()
    model, _ = forebay.prepare(module, adamw(module), device_memory="16MiB", policy="stream", device="cpu")
    plan = forebay.report(model).plan
    forebay.close(model)
    here = {"parameters": Tier.DEVICE, "gradients": Tier.DEVICE, "states": Tier.DEVICE}
    homes = tuple(p if p.block in streamed else replace(p, **here) for p in plan.placements)
    sizes = arenas(find_blocks(made()).model, homes, plan.streaming, ("exp_avg", "exp_avg_sq"))
    return replace(plan, placements=homes, device=sizes.device, host=sizes.host, recompute=tuple(recompute))


def prepared(module: Tower, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    plan = plan_with(changes.pop("streamed", STREAMED), **changes)
    return forebay.prepare(module, adamw(module), plan=plan, device_memory="16MiB", device="cpu")


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[float]:
    return stepped(optimizer, (model(batch()).square().mean() for _ in range(steps)))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors went through the hooks, noted by whoever asks for it."""
    counts, pack = [0], SavedTensors.pack

    def counting(self: SavedTensors, tensor: torch.Tensor) -> Any:
        counts[0] += 1
        return pack(self, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(SavedTensors, "pack", counting)
        yield counts


def in_turns(model: nn.Module, phase: str) -> list[str]:
    """The blocks that compute in a phase, one after the other; what one waits for is no other turn."""
    computed = (event.what.split() for event in forebay.report(model).timeline.events if event.lane is Lane.COMPUTE)
    return [name for name, _ in groupby(what[1] for what in computed if what[0] == phase and len(what) > 1)]


def no_hooks_are_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("recompute", [(), ("layers.4",), ("layers.2", "layers.5")], ids=["none", "streamed", "stays"])
@pytest.mark.parametrize("streamed", [STREAMED, ("layers.0", "layers.5")])
def test_the_numbers_and_who_computes_when(streamed: tuple[str, ...], recompute: tuple[str, ...]) -> None:
    """In steps whose saved tensors are counted and in others; every block has a forward and a backward on the clock."""
    plain = made()
    expected = losses(plain, adamw(plain))
    ours, optimizer = prepared(made(), streamed=streamed, recompute=recompute)
    assert len(attachment_of(ours)._quiet) == LAYERS - len({*streamed, *recompute})
    assert losses(ours, optimizer) == expected
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    assert in_turns(ours, "forward") == [f"layers.{place}" for place in range(LAYERS)] * STEPS
    assert in_turns(ours, "backward") == [f"layers.{place}" for place in reversed(range(LAYERS))] * STEPS
    assert no_hooks_are_on()
    forebay.close(ours)


class HandingOn(Layer):
    """Returns what it was given, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x


def first_of_two(tower: Tower, place: int, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = tower.layers[place](x)[0]
    return out


def test_what_a_block_hands_on_is_not_its_own() -> None:
    """Each block has one backward a step, and not another one behind the block that made what it has handed on."""
    plain = made(first_of_two, HandingOn)
    expected = losses(plain, adamw(plain))
    ours, optimizer = prepared(made(first_of_two, HandingOn), streamed=("layers.1",))
    assert losses(ours, optimizer) == expected
    assert in_turns(ours, "backward") == [f"layers.{place}" for place in reversed(range(LAYERS))] * STEPS
    forebay.close(ours)


def test_only_what_streams_goes_through_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as counts:
        ours, optimizer = prepared(made())
        through = []
        for _ in range(STEPS):
            counts[0] = 0
            losses(ours, optimizer, 1)
            through.append(counts[0])
        forebay.close(ours)
    of_a_layer = (through[0] - through[SEEN]) / (LAYERS - len(STREAMED))
    assert through[:SEEN] == [through[0]] * SEEN and through[SEEN:] == [through[SEEN]] * (STEPS - SEEN)
    assert of_a_layer > 5 and through[SEEN] < through[0] - 4 * 5


def by_itself(tower: Tower, place: int, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(tower.layers[place], x, use_reentrant=False)
    return out


def by_itself_reentrant(tower: Tower, place: int, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(tower.layers[place], x, use_reentrant=True)
    return out


def on_the_host(tower: Tower, place: int, x: torch.Tensor) -> torch.Tensor:
    with nullcontext() if f"layers.{place}" in STREAMED else save_on_cpu():
        return called(tower, place, x)


def with_weights_of_another(tower: Tower, place: int, x: torch.Tensor) -> torch.Tensor:
    """Calls a layer that streams from the middle of one that stays, and saves a product with its weight."""
    if place != 2:
        return called(tower, place, x)
    layer, other = tower.layers[2], tower.layers[1]
    handle = layer.norm.register_forward_hook(lambda module, args, output: other(output))
    try:
        return called(tower, place, x)
    finally:
        handle.remove()


@pytest.mark.parametrize("run", [by_itself, by_itself_reentrant, on_the_host, with_weights_of_another])
def test_hooks_and_checkpoints_of_the_model_s_own(run: Run) -> None:
    def batch_of() -> torch.Tensor:
        return batch().requires_grad_()  # a reentrant checkpoint asks for it

    plain = made(run)
    expected = stepped(adamw(plain), (plain(batch_of()).square().mean() for _ in range(STEPS)))
    ours, optimizer = prepared(made(run))
    assert stepped(optimizer, (ours(batch_of()).square().mean() for _ in range(STEPS))) == expected
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    assert no_hooks_are_on()
    forebay.close(ours)


def test_hooks_around_the_forward_see_no_more_than_before() -> None:
    """While ours are on, they see nothing: so it is where ours would be off."""
    seen: list[torch.Tensor] = []

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    plain, found = made(), []
    expected = losses(plain, adamw(plain))
    ours, optimizer = prepared(made())
    for _ in range(STEPS):
        with saved_tensors_hooks(noting, lambda tensor: tensor):
            out = ours(batch())
        assert not seen
        found += stepped(optimizer, [out.square().mean()])
    assert found == expected and no_hooks_are_on()
    forebay.close(ours)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_forward_that_ends_in_the_middle(place: int, error: type[BaseException]) -> None:
    """In a block that stays or in one that streams; the next pass is as if it had not been."""
    plain = made()
    expected = losses(plain, adamw(plain))
    ours, optimizer = prepared(made())
    found = losses(ours, optimizer, 3)

    def failing(module: nn.Module, args: Any, output: Any) -> None:
        raise error("in the middle")

    handle = ours.layers[place].up.register_forward_hook(failing)
    with pytest.raises(error, match="in the middle"):
        ours(batch())
    handle.remove()
    found += losses(ours, optimizer, STEPS - 3)
    assert found == expected and no_hooks_are_on()
    forebay.close(ours)
    assert no_hooks_are_on()


def test_what_is_changed_in_place_is_refused_by_torch_itself() -> None:
    ours, optimizer = prepared(made())
    losses(ours, optimizer, 3)

    def changing(module: nn.Module, args: Any, output: Any) -> None:
        args[0].add_(1)

    handle = ours.layers[2].down.register_forward_hook(changing)
    loss = ours(batch()).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    handle.remove()
    del loss
    forebay.close(ours)


def test_several_micro_batches_that_pass_together() -> None:
    plain = made()
    its, expected = adamw(plain), []
    for _ in range(STEPS):
        for part in batch().split(2):
            loss = plain(part).square().mean()
            loss.backward()
            expected.append(loss.item())
        its.step()
        its.zero_grad()
    ours, optimizer = prepared(made())
    found = []
    for _ in range(STEPS):
        parts = list(batch().split(2))
        found += [x.item() for x in forebay.accumulate(ours, parts, lambda m, part: m(part).square().mean())]
        optimizer.step()
        optimizer.zero_grad()
    assert found == expected and no_hooks_are_on()
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    forebay.close(ours)
