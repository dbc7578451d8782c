"""What happens to a model between the forward of a batch and its backward: as in plain PyTorch, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError
from forebay.memory import Tier
from forebay.runtime.blocks import find_blocks
from tests.parity.recomputing import AMPLE, plan_of, recomputable
from tests.parity.test_recompute_edges import WHERE

WIDTH = 8

Between = Callable[[nn.Module], None]

KINDS = pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])


class Layer(nn.Module):
    """Has modes (dropout), and a buffer of which a forward changes nothing unless it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.moves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.shift.add_(x.detach().mean(0))
        y = x + self.drop(self.down(self.up(self.norm(x)).tanh()))
        return (y - self.shift).tanh()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)))


def prepared(recomputes: bool, resident: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    blocks = find_blocks(model).model
    plan = plan_of(blocks, recomputable(blocks) if recomputes else [], resident=resident, slots=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return forebay.prepare(model, optimizer, plan=plan, device_memory=AMPLE, device="cpu")


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(between: Between, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses and gradients of two steps with something between forward and backward, what modes that leaves and which
    parameters train, and the buffers behind them."""
    torch.manual_seed(1)
    found = []
    for step in range(2):
        loss = model(batch(step)).square().mean()
        between(model)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() + 0 for p in model.parameters() if p.grad is not None)]
        found.append(torch.tensor([m.training for m in model.modules()]))
        found.append(torch.tensor([p.requires_grad for p in model.parameters()]))
        model.train().requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(b.clone() for b in model.buffers())]


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(7))


def freeze(model: nn.Module) -> None:
    model[1].up.weight.requires_grad_(False)


def run_on(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(7))


@KINDS
@WHERE
@pytest.mark.parametrize("between", [nn.Module.eval, evaluate, freeze, run_on])
def test_what_plain_pytorch_allows(between: Between, recomputes: bool, resident: bool) -> None:
    plain = make()
    expected = train(between, plain, torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True))
    model, optimizer = prepared(recomputes, resident)
    found = train(between, model, optimizer)
    assert len(found) == len(expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert model.training and all(p.requires_grad for p in model.parameters())
    forebay.close(model)


def test_a_mode_that_a_forward_has_not_had_before() -> None:
    """The buffers that it changes are not those that were changed before."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        found = []
        for training in (False, True):
            model.train(training)
            for layer in model:
                layer.moves, layer.drop.p = training, 0.0
            model(batch(0)).square().mean().backward()
            found += [p.grad.clone() + 0 for p in model.parameters() if p.grad is not None]
        return found

    model, optimizer = prepared(recomputes=True, resident=False)
    found, expected = run(model, optimizer), run(make(), None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    forebay.close(model)


def test_a_buffer_changed_for_the_first_time_in_a_later_forward_is_refused_once() -> None:
    model, _ = prepared(recomputes=True, resident=False)
    model(batch(0)).sum().backward()
    model[1].moves = True
    loss = model(batch(1)).sum()
    with pytest.raises(ModelError, match=r"block 1 has changed its buffer shift in this forward"):
        loss.backward()
    model(batch(2)).sum().backward()
    forebay.close(model)


def test_a_buffer_changed_between_is_refused() -> None:
    model, _ = prepared(recomputes=True, resident=False)
    model(batch(0)).sum().backward()
    loss = model(batch(1)).sum()
    model[1].shift.add_(1)
    with pytest.raises(ModelError, match=r"buffer shift of block 1 was changed after the block's forward"):
        loss.backward()
    forebay.close(model)


def step_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    output = model(batch(0))
    first, second = output.square().mean(), output.abs().mean()
    first.backward(retain_graph=True)
    optimizer.step()
    return second


def load_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    loss = model(batch(0)).square().mean()
    model.load_state_dict(values)
    return loss


@KINDS
@WHERE
@pytest.mark.parametrize("change", [step_between, load_between])
def test_parameters_that_changed_are_refused_as_in_plain_pytorch(
    change: Callable[[nn.Module, torch.optim.Optimizer], torch.Tensor], recomputes: bool, resident: bool
) -> None:
    """torch's fused kernels do not count what they change, and plain PyTorch goes on behind them."""
    words = "modified by an inplace operation"
    plain = make()
    with pytest.raises(RuntimeError, match=words):
        change(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)).backward()
    model, optimizer = prepared(recomputes, resident)
    loss = change(model, optimizer)
    with pytest.raises(ModelError, match=f"{words}|was changed in place afterwards"):
        loss.backward()
    optimizer.zero_grad()
    model(batch(0)).sum().backward()
    forebay.close(model)


@WHERE
def test_only_what_changed_is_refused(resident: bool) -> None:
    """A step for biases alone: no backward reads those."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(1)
        step_between(model, optimizer).backward()
        return [p.grad.clone() + 0 for p in model.parameters() if p.grad is not None]

    def biases(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("down.bias"))
        return model

    plain = biases(make())
    model = biases(make())
    trained = [p for p in model.parameters() if p.requires_grad]
    plan = plan_of(find_blocks(model).model, [], resident=resident, slots=2)
    model, optimizer = forebay.prepare(
        model, torch.optim.SGD(trained, lr=0.1), plan=plan, device_memory=AMPLE, device="cpu"
    )
    expected = run(plain, torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1))
    found = run(model, optimizer)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    forebay.close(model)


class Hidden:
    generator = torch.Generator()


class Drawing(nn.Module):
    """Draws from a generator that nobody finds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.rand(x.shape, generator=Hidden.generator)


def test_a_generator_that_nobody_finds_is_refused_where_no_op_is_named() -> None:
    model = nn.Sequential(*(Drawing() for _ in range(3)))
    plan = plan_of(find_blocks(model).model, ["1"], resident=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = forebay.prepare(model, optimizer, plan=plan, device_memory=AMPLE, device="cpu")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"block 1 .*draws from a generator of its own"):
            model(batch(0)).sum().backward()
    forebay.close(model)


class Book(nn.Module):
    """Its forward changes a buffer that is much larger than what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("book", torch.ones(ENTRIES))
        self.register_buffer("table", torch.ones(ENTRIES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.book.mul_(0.9)
        return self.linear(x).tanh() * self.book[:WIDTH] + self.table[:WIDTH]


ENTRIES, DEPTH = 4096, 4


def test_what_forward_found_in_buffers_is_part_of_the_promise() -> None:
    """Of 2 buffers a block changes one, of ENTRIES fp32: DEPTH copies of that, made before forward and held until
    backward, and while a block runs again one more of both."""
    model: nn.Module = nn.Sequential(*(Book() for _ in range(DEPTH)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = forebay.prepare(model, optimizer, batch(0), device_memory=AMPLE, policy="recompute")
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = forebay.report(model)
    peak = report.timeline.peaks[Tier.DEVICE]
    assert report.plan.recompute
    copies = (len(report.plan.recompute) + 2) * 4 * ENTRIES
    assert 2 * DEPTH * 4 * ENTRIES + copies < peak <= report.plan.device <= 1.05 * peak
    forebay.close(model)
