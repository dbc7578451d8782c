"""Activations as 8, 4 or 2 bits: forward is plain PyTorch's, gradients are off by no more than codes may be, and the
bytes are released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.compression import CODE_BITS, DEFAULT, GROUP, encoded_nbytes
from forebay.errors import SessionClosed
from forebay.memory import ALIGNMENT, Kind, Tier
from forebay.plans import Plan
from forebay.runtime.hooks import session_of
from forebay.treatments import Fate, Treatment
from tests.parity.bits import bits_plan, opened
from tests.parity.models import Case
from tests.parity.test_offload import counters
from tests.parity.test_offload_memory import DEPTH, INPUT, TOWER
from tests.parity.treated import SUBJECTS

BITS = pytest.mark.parametrize("bits", CODE_BITS)
ROWS, WIDTH = 96, 48


class Weighted(nn.Module):
    """``sin(x)`` times a weight, summed with fixed factors: the weight's gradient is linear in what the sine makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x).sin())
        return made


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Weighted(), Weighted()])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers[1](self.layers[0](x)) * factors()).sum()}


def factors() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99))


FIXED = Case(Fixed, lambda step: {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))})
SINE = "aten.sin.default"


def sine(bits: int, fate: Fate, folder: Path, recompute: bool = False) -> Plan:
    chosen = {"layers.1": [Treatment(SINE, 0, fate, bits)]}
    again = ["layers.1"] if recompute else []
    return bits_plan(FIXED, chosen, recompute=again, elements=ROWS * WIDTH, folder=folder)


def gradients(case: Case, plan: Plan, seed: int = 0) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Loss and gradients of one pass."""
    torch.manual_seed(seed)
    model, _, _ = opened(case, plan)
    torch.manual_seed(seed)
    loss = model(**case.inputs(0, torch.float32))["loss"]
    loss.backward()
    made = {name: g.clone() for name, g in forebay.gradients(model).items()}
    assert counters(model) == 0
    forebay.close(model)
    return loss.detach(), made


@pytest.mark.parametrize("recompute", [False, True])
@BITS
def test_a_gradient_is_off_by_less_than_a_step_of_each_code(bits: int, recompute: bool, tmp_path: Path) -> None:
    """ActNN, section 4.1: less than s = (maximum - minimum) / (2^bits - 1) of the group, for each element. The gradient
    of the weight is factors.T @ sin, so it is off by less than |factors|.T @ s."""
    plain = FIXED.model(torch.float32)
    made = plain.layers[1].first(plain.layers[0](FIXED.inputs(0, torch.float32)["x"])).sin()
    loss = plain(**FIXED.inputs(0, torch.float32))["loss"]
    loss.backward()
    groups = made.detach().view(-1, GROUP)
    steps = (groups.amax(1) - groups.amin(1)).div(2**bits - 1).repeat_interleave(GROUP).view(ROWS, WIDTH)
    actual_loss, actual = gradients(FIXED, sine(bits, Fate.KEEP, tmp_path, recompute))
    assert torch.equal(actual_loss, loss)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    off = (actual["layers.1.second.weight"] - expected.pop("layers.1.second.weight")).abs()
    assert (off <= factors().abs().t() @ steps * 1.0001).all()
    assert off.max() > 0
    # No other gradient reads the sine.
    assert all(torch.equal(actual[name], gradient) for name, gradient in expected.items())


@BITS
def test_where_the_codes_are_changes_nothing_and_the_seed_says_what_they_are(bits: int, tmp_path: Path) -> None:
    first = gradients(FIXED, sine(bits, Fate.KEEP, tmp_path))[1]
    for fate in Fate:
        again = gradients(FIXED, sine(bits, fate, tmp_path))[1]
        assert all(torch.equal(first[name], again[name]) for name in first)
    other = gradients(FIXED, sine(bits, Fate.KEEP, tmp_path), seed=1)[1]
    assert not torch.equal(first["layers.1.second.weight"], other["layers.1.second.weight"])


def test_dropout_draws_what_it_draws_in_plain_pytorch(tmp_path: Path) -> None:
    """The rounding draws from elsewhere: losses of both micro-batches are those of plain PyTorch, mask for mask."""
    case = SUBJECTS["gpt2-dropout"]
    blocks = [f"transformer.h.{i}" for i in range(3)]
    chosen = {block: [Treatment("aten.tanh.default", 0, Fate.OFFLOAD, 4)] for block in blocks}
    seen = []
    for plan in (None, bits_plan(case, chosen, elements=2**15, folder=tmp_path)):
        model = case.model(torch.float32) if plan is None else opened(case, plan)[0]
        torch.manual_seed(5)
        for micro in range(2):
            loss = model(**case.inputs(micro, torch.float32))["loss"]
            loss.backward()
            seen.append(loss.detach())
        seen.append(torch.rand(1))
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert sum(e.what.startswith("offload ") for e in forebay.report(model).timeline.events) == 2 * 3
    forebay.close(model)


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_stay_close(recompute: bool, tmp_path: Path) -> None:
    """Ten steps of a small GPT-2 with every GELU's parts as 8 bits: within 1 % at each step."""
    case = SUBJECTS["gpt2-dropout"]
    blocks = [f"transformer.h.{i}" for i in range(3)]
    ops = ["aten.tanh.default", "aten.pow.Tensor_Scalar", "aten.native_layer_norm.default"]
    chosen = {block: [Treatment(op, 0, Fate.KEEP, 8) for op in ops[: 1 if recompute else 2]] for block in blocks}
    plan = bits_plan(case, chosen, recompute=blocks if recompute else [])
    losses: list[list[float]] = []
    for made in (None, plan):
        if made is None:
            model = case.model(torch.float32)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        else:
            model, optimizer, _ = opened(case, made)
        torch.manual_seed(3)
        losses.append([])
        for step in range(10):
            loss = model(**case.inputs(step, torch.float32))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert all(abs(a / b - 1) < 0.01 for a, b in zip(*losses, strict=True))
    assert losses[0] != losses[1]
    forebay.close(model)


# Memory.


def of_tower(count: int, fate: Fate, bits: int) -> dict[str, Sequence[Treatment]]:
    ops = ("aten.addmm.default", 0), ("aten.gelu.default", 0), ("aten.addmm.default", 1)
    return {f"layers.{i}": [Treatment(op, number, fate, bits) for op, number in ops] for i in range(count)}


def codes(bits: int) -> list[int]:
    """Bytes of the codes of a layer: of two tensors of 4 inputs and one of 1."""
    return [encoded_nbytes(parts * INPUT // 4, 4, bits) for parts in (4, 4, 1)]


def live_and_peak(plan: Plan) -> tuple[int, int, int]:
    """Device bytes between forward and backward, at the peak of the pass, and of the host's arena."""
    model, optimizer, device = opened(TOWER, plan)
    for step in range(2):  # the first makes the optimizer's states
        device.reset_peak()
        loss = model(**TOWER.inputs(step, torch.float32))["loss"]
        device.synchronize()
        live = device.ledger.live
        loss.backward()
        peak = device.usage().peak
        optimizer.step()
        optimizer.zero_grad()
    host = forebay.report(model).timeline.usage(Tier.HOST)
    assert counters(model) == 0
    forebay.close(model)
    del loss
    assert device.ledger.live == 0
    return live, peak, host.at_peak[Kind.ACTIVATION]


@pytest.mark.parametrize("count", [1, DEPTH - 1])
@BITS
def test_codes_take_the_place_of_what_they_stand_for(bits: int, count: int) -> None:
    """A layer leaves 9 inputs from forward to backward, or its codes. At the peak there is at most the work on the
    largest tensor beside that: what it is made from, its replica, and the workspace."""
    plain_live, plain_peak, _ = live_and_peak(bits_plan(TOWER, {}))
    plan = bits_plan(TOWER, of_tower(count, Fate.KEEP, bits))
    live, peak, host = live_and_peak(plan)
    assert plain_live - live == count * (9 * INPUT - sum(codes(bits)))
    assert peak <= plain_peak - count * (9 * INPUT - sum(codes(bits))) + 2 * 4 * INPUT + workspace()
    assert host == 0


def workspace() -> int:
    return DEFAULT.workspace_nbytes(4 * INPUT // 4)


@BITS
def test_codes_that_leave_take_nothing_on_the_device(bits: int, tmp_path: Path) -> None:
    count = DEPTH - 1
    plain_live, _, _ = live_and_peak(bits_plan(TOWER, {}))
    plan = bits_plan(TOWER, of_tower(count, Fate.OFFLOAD, bits), elements=4 * INPUT // 4)
    arena = count * sum(-(-n // ALIGNMENT) * ALIGNMENT for n in codes(bits))
    plan = replace(plan, streaming=replace(plan.streaming, host_activations=arena))
    live, _, host = live_and_peak(plan)
    assert plain_live - live == count * 9 * INPUT
    assert host == arena


def test_codes_without_room_stay_on_the_device_as_codes() -> None:
    """The numbers do not depend on the room there is."""
    plan = bits_plan(TOWER, of_tower(1, Fate.OFFLOAD, 8), elements=4 * INPUT // 4)
    small = replace(plan, streaming=replace(plan.streaming, host_activations=0), host=plan.host)
    made = []
    for one in (plan, small):
        torch.manual_seed(0)
        model, _, _ = opened(TOWER, one)
        loss = model(**TOWER.inputs(0, torch.float32))["loss"]
        loss.backward()
        made.append(forebay.gradients(model))
        assert counters(model) == (0 if one is plan else 3)
        forebay.close(model)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.parametrize("fate", Fate)
def test_nothing_is_left_of_a_graph_that_goes(fate: Fate, tmp_path: Path) -> None:
    plan = bits_plan(TOWER, of_tower(DEPTH, fate, 4), elements=4 * INPUT // 4, folder=tmp_path)
    model, optimizer, device = opened(TOWER, plan)
    attachment = session_of(model)
    assert attachment is not None
    standing = device.ledger.live
    for step in range(3):
        loss = model(**TOWER.inputs(step, torch.float32))["loss"]
        if step == 1:
            loss.backward()
        del loss
        optimizer.zero_grad()
        forebay.synchronize(model)
        assert attachment.session.stash.taken == 0
        assert device.ledger.live == standing
    forebay.close(model)


@pytest.mark.parametrize("fate", Fate)
def test_backward_after_close_says_so(fate: Fate, tmp_path: Path) -> None:
    plan = bits_plan(TOWER, of_tower(DEPTH, fate, 4), elements=4 * INPUT // 4, folder=tmp_path)
    model, _, device = opened(TOWER, plan)
    loss = model(**TOWER.inputs(0, torch.float32))["loss"]
    forebay.close(model)
    with pytest.raises(SessionClosed, match="went when the model was closed"):
        loss.backward()
    del loss
    assert not list(tmp_path.iterdir())
    assert device.ledger.live == 0
