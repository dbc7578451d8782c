"""``forebay.optim.Muon`` beside ``torch.optim.Muon`` and ``torch.optim.AdamW(fused=True)``: the same bits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forebay.errors import OptimizerError
from forebay.model import Parameter
from forebay.optim import Muon, muon_groups
from forebay.optim.choosing import torch_arithmetic
from forebay.optim.orthogonal import MuonRule
from forebay.optim.parts import Part
from forebay.optim.reading import read_optimizer
from forebay.workspaces import workspace_nbytes

WAYS: dict[str, dict[str, Any]] = {
    "as torch": {},
    "adjusted": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    "without nesterov": {"nesterov": False, "ns_steps": 3, "eps": 1e-3},
    "other numbers": {"momentum": 0.8, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
    "a tensor": {"lr": torch.tensor(0.03)},
}
MATRICES = ((24, 40), (40, 24), (33, 33), (1, 7), (65, 3))
OTHERS = ((300,), (), (3, 5, 4, 4), (37, 41))


def drawn(shapes: tuple[tuple[int, ...], ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    # One does not lie in its order.
    return [value.t().contiguous().t() if value.shape == (24, 40) else value for value in made]


def take(parameters: list[nn.Parameter], seed: int, *optimizers: torch.optim.Optimizer) -> None:
    for parameter, gradient in zip(parameters, drawn(MATRICES + OTHERS, seed), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    for optimizer in optimizers:
        optimizer.step()


def fresh(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(value.to(dtype)) for value in drawn(MATRICES + OTHERS, 99)]


def of_forebay(parameters: list[nn.Parameter], **numbers: Any) -> Muon:
    matrices, others = parameters[: len(MATRICES)], parameters[len(MATRICES) :]
    rest = {"params": others, "use_muon": False, "lr": 1e-3, "weight_decay": 0.01}
    return Muon([{"params": matrices}, rest], **{"lr": 0.02, **numbers})


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_torchs(way: str) -> None:
    ours, theirs = fresh(), fresh()
    own = of_forebay(ours, **WAYS[way])
    plain = torch.optim.Muon(theirs[: len(MATRICES)], **{"lr": 0.02, **WAYS[way]})
    adamw = torch.optim.AdamW(theirs[len(MATRICES) :], lr=1e-3, weight_decay=0.01, fused=True)
    for step in range(3):
        take(ours, step, own)
        take(theirs, step, plain, adamw)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        states = {**plain.state, **adamw.state}[other]
        assert all(torch.equal(own.state[mine][key], value) for key, value in states.items())
        assert own.state[mine].keys() == {*states, "step"}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
def test_in_a_workspace(rows: int, columns: int, turned: bool, nesterov: bool, narrow: bool) -> None:
    """Of any shape and order, in as many bytes as a plan has room for: what torch makes of it."""
    value, gradient = drawn(((rows, columns),) * 2, rows)
    if turned:
        value, gradient = (t.t().contiguous().t() for t in (value, gradient))
    dtype = torch.bfloat16 if narrow else torch.float32
    value, gradient = value.to(dtype), gradient.to(dtype)
    theirs = nn.Parameter(value.float())
    theirs.grad = gradient.float()
    plain = torch.optim.Muon([theirs], lr=0.02, nesterov=nesterov)
    rule = MuonRule([])
    spec = Parameter("w", (rows, columns), value.stride(), str(dtype)[6:], value.nbytes, 0, True, orthogonal=True)
    room = torch.empty(workspace_nbytes(rule.state_names, 0, 0, [spec]), dtype=torch.uint8)
    flat = (rows * columns,), (1,)
    held, none = torch.zeros(rows * columns), torch.empty(0)
    own, grad = value.clone().as_strided(*flat), gradient.as_strided(*flat)
    master = own.float() if narrow else None
    part = Part(own, grad, master, (held, none, none), shape=(rows, columns), stride=value.stride())
    for step in (1, 2):
        plain.step()
        torch_arithmetic(rule, room).update([part], step, plain.param_groups[0])
    wide = own if master is None else master
    assert torch.equal(wide.as_strided((rows, columns), value.stride()), theirs)
    assert torch.equal(held.as_strided((rows, columns), value.stride()), plain.state[theirs]["momentum_buffer"])
    assert torch.equal(own, wide.to(dtype))


def test_masters_and_saved_states() -> None:
    whole = fresh(torch.bfloat16)
    optimizer = of_forebay(whole)
    take(whole, 0, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    loaded = of_forebay(again)
    loaded.load_state_dict(saved)
    for parameters, owner in ((whole, optimizer), (again, loaded)):
        take(parameters, 1, owner)
    for left, right in zip(whole, again, strict=True):
        assert torch.equal(left, right) and loaded.state[right]["master"].dtype is torch.float32
        assert torch.equal(left, optimizer.state[left]["master"].bfloat16())
    other = Muon([nn.Parameter(torch.zeros(2, 2)) for _ in whole])
    with pytest.raises(OptimizerError, match="momentum_buffer of parameter 0 has shape"):
        other.load_state_dict({**saved, "param_groups": other.state_dict()["param_groups"]})
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.rule.keeping.orthogonal == {id(p) for p in copied.param_groups[0]["params"]}


def test_bytes_of_states() -> None:
    """One of a matrix of Muon, two of what AdamW updates."""
    parameters = fresh()
    optimizer = of_forebay(parameters)
    take(parameters, 0, optimizer)
    for number, parameter in enumerate(parameters):
        held = sum(v.nbytes for k, v in optimizer.state[parameter].items() if k != "step")
        assert held == parameter.nbytes * (1 if number < len(MATRICES) else 2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Embedding(3, 8)) for _ in range(2)])
        self.mixed = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 50)


def test_groups_of_a_model() -> None:
    """Matrices of layers that are repeated; not embeddings, the head, vectors, or what is not trained."""
    model = Words()
    model.layers[1][0].requires_grad_(False)
    matrices, others = muon_groups(model)
    assert [p is model.layers[0][0].weight for p in matrices["params"]] == [True]
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in others["params"]} == {
        *("embedding.weight", "layers.0.0.bias", "layers.0.1.weight", "layers.1.1.weight"),
        *("mixed.0.weight", "mixed.0.bias", "head.weight", "head.bias"),
    }
    optimizer = Muon([matrices, {**others, "lr": 1e-4}], lr=0.02)
    assert [(g["use_muon"], g["lr"], g["eps"]) for g in optimizer.param_groups] == [
        (True, 0.02, 1e-7),
        (False, 1e-4, 1e-8),
    ]
    with pytest.raises(OptimizerError, match="no layers in a list"):
        muon_groups(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"momentum": -0.1}, "momentum must be 0 or more"),
        ({"ns_steps": 100}, "ns_steps must be 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn is one of"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
    ],
)
def test_what_is_refused(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(OptimizerError, match=words):
        Muon([nn.Parameter(torch.zeros(2, 2))], **numbers)


def test_what_is_no_matrix_is_refused() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(OptimizerError, match=r"shape \(4,\); put it in a group with use_muon=False"):
        Muon(layer.parameters())
    optimizer = Muon([layer.weight])
    with pytest.raises(OptimizerError, match="Muon updates matrices"):
        optimizer.add_param_group({"params": [layer.bias]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [layer.bias], "use_muon": False})
    assert read_optimizer(optimizer).keeping.orthogonal == {id(layer.weight)}
