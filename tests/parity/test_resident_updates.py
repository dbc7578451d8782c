"""Updates of what stays on a card: as many chunks in a call as there is room for, with the bits of each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.layout import state_layout
from forebay.memory import Tier
from forebay.optim.arithmetic import TorchArithmetic
from forebay.optim.parts import Arithmetic, Part, Prepared
from forebay.optim.rules import AdamRule
from forebay.plans import Placement
from forebay.runtime.applying import Task
from forebay.runtime.blockstate import BlockState
from forebay.runtime.resident import WIDENED, ResidentUpdates
from forebay.states import Masters
from tests.null.synthetic import ADAM, block

CHUNK = 1024
"""Elements: the first parameter is two and a half chunks, and there are five in all."""

BLOCK = block("layer", ((40, 64), "bfloat16", True), ((1024,), "bfloat16", True), ((24, 64), "bfloat16", True))
GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
}


@dataclass
class Noting(Arithmetic):
    """torch's own, and the bytes that each call has widened."""

    inner: TorchArithmetic
    calls: list[int] = field(default_factory=list)

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        self.calls.append(sum(4 * part.gradient.numel() for part in parts))
        return self.inner.prepared(parts)


def a_state() -> tuple[BlockState, dict[str, torch.Tensor]]:
    """The block with parameters and states from a seed, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    layout = state_layout(BLOCK, ADAM, CHUNK, Masters.WHOLE)
    contents = []
    for nbytes in (BLOCK.nbytes, layout.nbytes):
        contents.append(torch.rand(nbytes // 4, generator=generator).view(torch.uint8))
    homes: list[Any] = [SimpleNamespace(read=lambda content=content: content) for content in contents]
    state = BlockState(BLOCK, Placement(BLOCK.name, Tier.DEVICE, Tier.DEVICE, Tier.DEVICE), layout, *homes, {})
    gradients = {p.name: torch.randn(p.shape, generator=generator).bfloat16() for p in BLOCK.parameters}
    return state, gradients


def updated(room: int, kind: str = "cuda:0", steps: int = 2) -> tuple[list[int], list[torch.Tensor]]:
    """What each call of the last of ``steps`` widened, and all bytes of the block behind it. ``room`` is what the plan
    has left of the device."""
    rule = AdamRule(decoupled=True, amsgrad=False)
    noting = Noting(TorchArithmetic(rule))
    device: Any = SimpleNamespace(name=kind, usage=lambda: SimpleNamespace(live=1000))
    updates = ResidentUpdates(device, rule, noting, promised=1000 + room)
    state, gradients = a_state()
    for step in range(1, steps + 1):
        noting.calls.clear()
        updates.begin()
        updates.run(state, {p.name: Task(step, GROUP) for p in BLOCK.parameters}, gradients)
    return noting.calls, [state.parameters.read(), state.states.read()]


@pytest.mark.parametrize("room", [-500, 0, 3 * 4 * CHUNK, WIDENED])
def test_as_many_chunks_in_a_call_as_there_is_room_for(room: int) -> None:
    calls, made = updated(room)
    expected, chunk_by_chunk = updated(0)
    assert sum(calls) == sum(expected) == 4 * BLOCK.trainable_numel
    assert max(expected) == 4 * CHUNK and len(expected) == 5
    assert max(calls) <= max(4 * CHUNK, room)
    assert len(calls) == {-500: 5, 0: 5, 3 * 4 * CHUNK: 2, WIDENED: 1}[room]
    assert all(torch.equal(a, b) for a, b in zip(made, chunk_by_chunk, strict=True))


def test_on_the_cpu_nothing_is_widened_but_a_chunk() -> None:
    calls, _ = updated(WIDENED, kind="cpu")
    assert max(calls) == 4 * CHUNK
