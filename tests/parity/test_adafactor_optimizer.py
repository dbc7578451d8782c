"""``forebay.optim.Adafactor`` beside ``torch.optim.Adafactor``, up to the rounding of sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from forebay import workspaces
from forebay.errors import OptimizerError
from forebay.model import Parameter
from forebay.optim import Adafactor, adafactor_parts
from forebay.optim.factored import AdafactorRule
from forebay.optim.parts import Part
from forebay.states import Shape, form_of

NUMBERS = {"lr": 1e-2, "weight_decay": 0.1}
SHAPES = ((37, 41), (300,), (), (3, 5, 4, 4), (1, 7), (0, 3))


def drawn(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def take(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter, gradient in zip(parameters, drawn(step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def test_a_step_is_torchs() -> None:
    ours, theirs = ([nn.Parameter(value) for value in drawn(99)] for _ in range(2))
    own, plain = Adafactor(ours, **NUMBERS), torch.optim.Adafactor(theirs[:-1], **NUMBERS)
    for step in range(3):
        take(ours, own, step)
        for parameter, gradient in zip(theirs[:-1], drawn(step), strict=False):
            parameter.grad = gradient
        plain.step()
        for mine, other in zip(ours, theirs[:-1], strict=False):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
            for key, value in plain.state[other].items():
                torch.testing.assert_close(own.state[mine][key], value, rtol=1e-5, atol=0)


def test_masters_and_saved_states() -> None:
    whole = [nn.Parameter(value.bfloat16()) for value in drawn(99)]
    optimizer = Adafactor(whole, **NUMBERS)
    take(whole, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    loaded = Adafactor(again, **NUMBERS)
    loaded.load_state_dict(saved)
    for parameters, owner in ((whole, optimizer), (again, loaded)):
        take(parameters, owner, 1)
    for left, right in zip(whole, again, strict=True):
        assert torch.equal(left, right) and loaded.state[right]["master"].dtype is torch.float32
        assert torch.equal(left, optimizer.state[left]["master"].bfloat16())
    other = Adafactor([nn.Parameter(torch.zeros(2, 2)) for _ in SHAPES])
    with pytest.raises(OptimizerError, match="row_var of parameter 0 has shape"):
        other.load_state_dict(saved)


def test_a_matrix_takes_a_number_for_each_row_and_column() -> None:
    weight = nn.Parameter(torch.ones(64, 48))
    weight.grad = torch.ones(64, 48)
    optimizer = Adafactor([weight])
    optimizer.step()
    assert sum(v.nbytes for k, v in optimizer.state[weight].items() if k != "step") == 4 * (64 + 48)


def test_what_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match="beta2_decay is 0 or less"):
        Adafactor(model.parameters(), beta2_decay=0.5)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("part", [8, 64, 1000])
def test_part_by_part(part: int, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix, several small matrices or all of it at a time, in no more memory than is said: the same up to
    the rounding of sums."""
    monkeypatch.setattr(workspaces, "PART", part)
    monkeypatch.setattr(adafactor_parts, "PART", part)
    rule = AdafactorRule(masters=not drawn)
    group = {"eps": (None, 1e-3), "beta2_decay": -0.8, "d": 1.0, **NUMBERS}
    for shape in SHAPES[:-1]:
        stride = torch.empty(shape).stride()
        value = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        if drawn:
            value = value.bfloat16().float()
        theirs = nn.Parameter(value.clone())
        plain = torch.optim.Adafactor([theirs], **group)
        dtype = torch.bfloat16 if drawn else torch.float32
        own = Part(
            value.to(dtype).flatten(),
            torch.zeros(value.numel()),
            None,
            tuple(torch.zeros(form_of(state).count_for(Shape(shape))) for state in rule.state_names),
            shape=shape,
            stride=stride,
        )
        spec = Parameter("p", shape, stride, str(dtype)[6:], own.parameter.nbytes, 0, True, master=not drawn)
        room = torch.empty(workspaces.workspace_nbytes(rule.state_names, 0, 0, [spec]), dtype=torch.uint8)
        for step in (1, 2):
            theirs.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            own.gradient.copy_(theirs.grad.flatten())
            before = theirs.detach().clone()
            plain.step()
            adafactor_parts.AdafactorParts(rule, room).update([own], step, group)
            moved = own.parameter.view(shape).float()
            # Rounded by chance it is one of the two numbers of bf16 beside the exact one.
            last = 2**-7 * torch.maximum(before.abs(), theirs.detach().abs()) if drawn else 0.0
            assert ((moved - theirs).abs() <= last + 1e-5 * theirs.detach().abs() + 1e-6).all()
            with torch.no_grad():
                theirs.copy_(moved)
