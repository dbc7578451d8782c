"""Passes whose moved activations are known by their place among what is saved: no op is seen, and the numbers, the
bytes that move and their order are those of a pass in which every op is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import forebay
from forebay.device.modes import OpMode
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.treatments import Fate, Selection, Treatment, seen_by_op
from tests.parity.compare import assert_same_training
from tests.parity.offloading import SUBJECTS, offload_plan
from tests.parity.recomputing import AMPLE, plan_of
from tests.parity.test_offload import counters, moved

WIDTH, ROWS = 32, 48


class Entered(Protocol):
    """How often modes that see ops were put on, by pass."""

    def __call__(self) -> int: ...


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Entered:
    """Modes of blocks that were put on since the last call."""
    times, right = [0], OpMode.on

    def noting(mode: OpMode) -> Any:
        times[0] += 1
        return right(mode)

    def since() -> int:
        count, times[0] = times[0], 0
        return count

    monkeypatch.setattr(OpMode, "on", noting)
    return since


@pytest.mark.thinned(8)
@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_behind_two_passes_no_op_is_seen_and_the_same_moves(name: str, resident: bool, entered: Entered) -> None:
    case = SUBJECTS[name]
    plan = offload_plan(case, torch.float32, resident=resident, offload_window=20_000, reload_window=20_000)
    model = assert_same_training(case, torch.float32, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    learned, one = entered(), moved(model, "offload")
    forebay.close(model)
    model = assert_same_training(case, torch.float32, steps=5, plan=plan, device_memory=AMPLE, device="cpu")
    assert learned and entered() == learned, "only the first passes of one shape have their ops seen"
    assert moved(model, "offload") == one * 5
    assert sorted(moved(model, "reload")) == sorted(moved(model, "offload")) and counters(model) == 0
    forebay.close(model)


class Layer(nn.Module):
    """Two linear layers, whose first result is saved by what follows it. ``other``: it does something else."""

    other = ""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.sin() if self.other == "more" else torch.cat([x, x]) if self.other == "wider" else x
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(rows)))[: len(x)]
        return made


class Stack(nn.Module):
    """Layers of which ``left_out`` may change from pass to pass, as under layer dropout."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.left_out: Sequence[int] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, training=self.training)
        for number, layer in enumerate(self.layers):
            if number not in self.left_out:
                x = layer(x)
        return x


MOVED = (Treatment("aten.addmm.default", 0, Fate.OFFLOAD), Treatment("aten.gelu.default", 0, Fate.OFFLOAD))


def stack_and_plan(treatments: tuple[Treatment, ...] = MOVED) -> tuple[Stack, Plan]:
    torch.manual_seed(0)
    model = Stack()
    plan = plan_of(find_blocks(model).model, (), resident=True, slots=2)
    names = tuple(placement.block for placement in plan.placements)
    streaming = replace(plan.streaming, offload_window=1 << 16, reload_window=1 << 16, host_activations=1 << 20)
    chosen = (Selection(names, treatments),)
    plan = replace(plan, changes_numbers=("codes",) if any(t.lossy for t in treatments) else ())
    return model, replace(plan, streaming=streaming, activations=chosen, host=plan.host + streaming.host_activations)


def stack_of(model: nn.Module) -> Any:
    return next(module for module in model.modules() if isinstance(module, Stack))


def gradients(model: nn.Module, rows: int, left_out: Sequence[int] = ()) -> list[torch.Tensor | None]:
    stack_of(model).left_out = left_out
    torch.manual_seed(1)
    x = torch.randn(rows, WIDTH, requires_grad=True)
    model(x).square().sum().backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def same(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def prepared(treatments: tuple[Treatment, ...] = MOVED) -> tuple[Stack, nn.Module]:
    """A plain model and the same one prepared."""
    plain, _ = stack_and_plan()
    model, plan = stack_and_plan(treatments)
    trained, _ = forebay.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), plan=plan, device_memory=AMPLE, device="cpu"
    )
    return plain, trained


def test_every_shape_is_learned_for_itself(entered: Entered) -> None:
    plain, model = prepared()
    few, many = ROWS, 2 * ROWS
    for rows, seen in ((few, 4), (many, 4), (few, 4), (few, 0), (many, 4), (few, 0), (many, 0)):
        assert same(gradients(model, rows), gradients(plain, rows))
        assert entered() == seen, rows
    assert len(moved(model, "offload")) == 7 * 4 * len(MOVED)
    forebay.close(model)


def test_a_pass_that_saves_other_things_is_the_last_to_be_followed(entered: Entered) -> None:
    """Its numbers are right; and so are those of the passes behind it, in which ops are seen. In itself they are from
    the block on that comes in the place of another, so that nothing stays that is to leave."""
    plain, model = prepared()
    for left_out, seen in (((), 4), ((), 4), ((), 0), ((1,), 2), ((), 4), ((1, 2), 2), ((), 4)):
        before = len(moved(model, "offload"))
        assert same(gradients(model, ROWS, left_out), gradients(plain, ROWS, left_out))
        assert entered() == seen, left_out
        assert len(moved(model, "offload")) - before == (4 - len(left_out)) * len(MOVED)
    forebay.close(model)


@pytest.mark.parametrize("other", ["more", "wider"])
def test_only_the_block_that_saves_other_things_keeps_what_is_to_leave(other: str, entered: Entered) -> None:
    """Layer 1 saves one thing more than it did, or something of another shape, in the place of what was to leave."""
    plain, model = prepared()
    for _ in range(3):
        gradients(model, ROWS)
    assert entered() == 8
    before = len(moved(model, "offload"))
    for one in (plain, model):
        stack_of(one).layers[1].other = other
    assert same(gradients(model, ROWS), gradients(plain, ROWS))
    assert entered() == 2, "from the next block on ops are seen"
    assert len(moved(model, "offload")) - before == 3 * len(MOVED)
    assert same(gradients(model, ROWS), gradients(plain, ROWS))
    assert entered() == 4
    forebay.close(model)


def test_what_blocks_that_run_again_have_moved_comes_back_in_a_pass_that_strays() -> None:
    """It leaves behind its op, and the next block's checkpoint saves it at another place than before."""
    plain, plan = stack_and_plan()
    model, _ = stack_and_plan()
    again = tuple(placement.block for placement in plan.placements)
    chosen = Selection(again[::2], (Treatment("aten.add.Tensor", 0, Fate.OFFLOAD),))
    plan = replace(plan, recompute=again, activations=(chosen,))
    trained, _ = forebay.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), plan=plan, device_memory=AMPLE, device="cpu"
    )
    for left_out in ((), (), (), (0,), ()):
        assert same(gradients(trained, ROWS, left_out), gradients(plain, ROWS, left_out))
    assert len(moved(trained, "offload")) == len(moved(trained, "reload")) == 4 * 2 + 1
    forebay.close(trained)


def test_passes_in_another_mode_are_others(entered: Entered) -> None:
    """Without dropout a pass saves less; those with it go on being followed."""
    plain, model = prepared()
    for training, seen in ((True, 4), (True, 4), (False, 4), (True, 0), (False, 4), (False, 0), (True, 0)):
        found = []
        for one in (plain, model):
            one.train(training)
            found.append(gradients(one, ROWS))
        assert same(*found)
        assert entered() == seen, training
    forebay.close(model)


def test_passes_that_are_not_alike_are_not_followed(entered: Entered) -> None:
    plain, model = prepared()
    for left_out, seen in (((), 4), ((1,), 3), ((), 4), ((2,), 3), ((2,), 3), ((2,), 0)):
        assert same(gradients(model, ROWS, left_out), gradients(plain, ROWS, left_out))
        assert entered() == seen, left_out
    forebay.close(model)


def test_a_pass_that_fails_teaches_nothing(entered: Entered) -> None:
    plain, model = prepared()
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(ROWS, WIDTH + 1))
    entered()
    for seen in (4, 4, 0):
        assert same(gradients(model, ROWS), gradients(plain, ROWS))
        assert entered() == seen
    handle = model.layers[2].down.register_forward_pre_hook(lambda module, args: 1 // 0)  # type: ignore[union-attr, index]
    with pytest.raises(ZeroDivisionError):
        gradients(model, ROWS)
    handle.remove()
    assert same(gradients(model, ROWS), gradients(plain, ROWS)) and entered() == 0
    forebay.close(model)


def test_what_becomes_codes_has_its_ops_seen(entered: Entered) -> None:
    treatments = (Treatment("aten.gelu.default", 0, Fate.OFFLOAD, bits=8),)
    _, model = prepared(treatments)
    for _ in range(3):
        gradients(model, ROWS)
        assert entered() == 4
    forebay.close(model)


def test_a_forward_behind_another_has_tickets_of_its_own(entered: Entered) -> None:
    """Two passes before a backward, both followed."""
    plain, model = prepared()
    for _ in range(2):
        gradients(model, ROWS)
    entered()
    found = []
    for one in (plain, model):
        torch.manual_seed(2)
        first, second = (one(torch.full((ROWS, WIDTH), value, requires_grad=True)) for value in (0.5, -0.25))
        (first.sum() * 2 + second.square().sum()).backward()
        found.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
    assert same(*found) and entered() == 0
    forebay.close(model)


def test_seen_by_op() -> None:
    """Blocks that run again, and all where what another one makes becomes codes."""
    plain, coded = Treatment("op", 0, Fate.OFFLOAD), Treatment("op", 0, Fate.OFFLOAD, bits=1)
    assert seen_by_op([Selection(("a", "b"), (plain,))], ()) == frozenset()
    assert seen_by_op([Selection(("a", "b"), (plain,))], ("b", "c")) == {"b"}
    assert seen_by_op([Selection(("b",), (coded,)), Selection(("a",), (plain,))], ("b",)) == {"b"}
    assert seen_by_op([Selection(("b",), (coded,)), Selection(("a",), (plain,))], ()) == {"a", "b"}
