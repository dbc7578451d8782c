"""What loops do beside the plain step: the same numbers as plain PyTorch, or one clear refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ForebayError, ModelError, UsageError
from forebay.runtime.blocks import find_blocks
from tests.parity.compare import stepped
from tests.parity.recomputing import plan_of, recomputable
from tests.parity.small import Layer, Network, batch, prepared, train


class Keeping(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.inner.weight[:2].detach()
        return super().forward(x)


def keeping_in_the_middle() -> nn.Module:
    model = Network()
    torch.manual_seed(1)
    model.layers[1] = Keeping()
    return model


def test_a_step_is_refused_before_anything_changes() -> None:
    model, optimizer = prepared(keeping_in_the_middle(), "stream")
    model(batch(0)).square().mean().backward()
    before = {n: p.clone() for n, p in forebay.parameters(model).items()}
    with pytest.raises(ForebayError, match=r"block layers\.1 are about to change, .* keep a copy"):
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in forebay.parameters(model).items())
    # Without the view the same step is taken.
    del model.get_submodule("layers.1").seen
    optimizer.step()
    plain = keeping_in_the_middle()
    rule = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    plain(batch(0)).square().mean().backward()
    rule.step()
    assert all(torch.equal(p, plain.get_parameter(n)) for n, p in forebay.parameters(model).items())
    forebay.close(model)


def test_parts_are_not_trained_by_themselves() -> None:
    model, optimizer = prepared(Network(), "stream")
    with pytest.raises(UsageError, match=r"model \(Linear\) is called outside .* call the prepared model"):
        model.get_submodule("emb")(batch(0))
    plain = Network()
    with torch.no_grad():
        assert torch.equal(model.get_submodule("emb")(batch(0)), plain.emb(batch(0)))
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    forebay.close(model)


def test_a_loss_of_parts_alone_is_refused_when_it_is_planned() -> None:
    """And one of the whole model and of a part beside it is planned."""
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    for policy in ("auto", "stream"):
        limits: Any = {"device_memory": "64MiB", "device": "cpu", "policy": policy}
        with pytest.raises(UsageError, match=r"model \(Linear\) is called outside .*prepare a module around it"):
            forebay.prepare(model, optimizer, batch(0), loss_fn=lambda m, x: m.emb(x).square().mean(), **limits)
    prepared, _ = forebay.prepare(model, optimizer, batch(0), loss_fn=lambda m, _: beside(m), **limits)
    beside(prepared).backward()
    forebay.close(prepared)


def beside(model: nn.Module) -> torch.Tensor:
    """A loss that calls a part of the model once more."""
    return model(batch(0)).square().mean() + model.get_submodule("emb")(batch(1)).square().mean()


def test_a_part_beside_a_pass_of_the_whole_model_is_as_in_plain_pytorch() -> None:
    model, optimizer = prepared(Network(), "auto")
    plain = Network()
    made = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        losses = []
        for one, its in ((model, optimizer), (plain, made)):
            loss = beside(one)
            loss.backward()
            its.step()
            its.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    forebay.close(model)


def penalised(model: nn.Module) -> torch.Tensor:
    x = batch(0).requires_grad_()
    y = model(x).square().mean()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.norm()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_second_derivative_is_refused_where_blocks_stream(recomputes: bool) -> None:
    made = find_blocks(Network()).model
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    plan = plan_of(made, recomputable(made) if recomputes else (), resident=False, slots=1)
    model, optimizer = forebay.prepare(model, optimizer, plan=plan, device_memory="64MiB", device="cpu")
    with pytest.raises(ModelError, match=r"create_graph=True keeps .* policy='keep'"):
        penalised(model)
    optimizer.zero_grad()
    plain = Network()
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    forebay.close(model)


def test_a_second_derivative_of_what_stays() -> None:
    plain = Network()
    model, _ = prepared(Network(), "keep")
    for one in (plain, model):
        penalised(one).backward()
    gradients = forebay.gradients(model)
    assert all(torch.equal(gradients[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None)
    forebay.close(model)


class Force(nn.Module):
    """Adds the gradient of an energy, which its forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.energy = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(self.up(at).tanh()).sum(), at, create_graph=True)
        return x - force


class Adapting(nn.Module):
    """Computes with the weights that are one step of descent away, as test-time training does."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.key, self.value = nn.Parameter(torch.eye(16)), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missed = (self.key(x) @ self.fast - self.value(x)).square().sum()
        (slope,) = torch.autograd.grad(missed, self.fast, create_graph=True)
        return x + x @ (self.fast - 0.01 * slope)


def feeding() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["stream-recompute", "offload-all", "auto"])
@pytest.mark.parametrize(("layer", "room"), [(Force, "130KiB"), (Adapting, "74KiB")])
def test_a_gradient_that_the_forward_of_a_block_takes(layer: type[nn.Module], room: str, policy: str) -> None:
    """What was saved for it is read again before the forward is over: such blocks do not run again, others do."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer() if place % 2 else feeding() for place in range(6)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    x = torch.linspace(-1, 1, 32 * 16).view(32, 16)
    model, optimizer = forebay.prepare(
        *made(), x, device_memory=room, policy=policy, device="cpu", blocks=list("012345")
    )
    again = forebay.report(model).plan.recompute
    assert set(again) <= {"0", "2", "4"} and (again or policy != "stream-recompute")
    plain, its = made()
    expected = stepped(its, (plain(x).square().mean() for _ in range(3)))
    assert stepped(optimizer, (model(x).square().mean() for _ in range(3))) == expected
    forebay.close(model)


def test_a_recording_says_which_blocks_take_a_gradient() -> None:
    model = nn.Sequential(feeding(), Force(), Adapting())
    trace = forebay.profile(model, torch.zeros(32, 16), "adamw", blocks=list("012"), loss_fn=lambda m, x: m(x).sum())
    assert trace.unrepeatable == ("1", "2")
    assert any("block 1 and 1 more are not recomputed" in n and "takes a gradient" in n for n in trace.notes)


def test_backward_of_some_parameters_where_blocks_run_again() -> None:
    made = find_blocks(Network()).model
    model, plain = Network(), Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    plan = plan_of(made, recomputable(made), resident=False, slots=2)
    model, optimizer = forebay.prepare(model, optimizer, plan=plan, device_memory="64MiB", device="cpu")
    rule = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        losses = []
        for m, o in ((plain, rule), (model, optimizer)):
            losses.append(m(batch(step)).square().mean())
            losses[-1].backward(inputs=[m.get_parameter("head.weight"), m.get_parameter("layers.0.inner.weight")])
            o.step()
            o.zero_grad()
        assert torch.equal(*losses)
    assert all(torch.equal(p, plain.get_parameter(n)) for n, p in forebay.parameters(model).items())
    forebay.close(model)


class Calling(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.inner)(x)


class Computing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.tanh(row @ self.weight))(x)


@pytest.mark.parametrize("policy", ["resident", "stream", "stream-recompute"])
def test_transforms_of_torch_func_around_the_model_are_refused(policy: str) -> None:
    model, optimizer = prepared(Network(), policy)
    transforms = torch.func.vmap(model), torch.func.grad(lambda x: model(x).sum())
    for transform in (*transforms, lambda x: torch.func.jvp(lambda scale: scale * model(x), (x,), (x,))):
        with pytest.raises(UsageError, match=r"a prepared model is called inside of torch.func"):
            transform(batch(0))
    plain = Network()
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    forebay.close(model)


def test_a_transform_of_torch_func_over_a_part_of_the_model_is_refused() -> None:
    model, _ = prepared(Network(Calling), "stream")
    with pytest.raises(UsageError, match=r"a module of a prepared model \(Linear\) is called inside of torch.func"):
        model(batch(0))
    forebay.close(model)


@pytest.mark.parametrize("policy", ["stream", "stream-recompute", "offload-all"])
def test_a_transform_of_torch_func_that_calls_no_module(policy: str) -> None:
    model, optimizer = prepared(Network(Computing), policy)
    plain = Network(Computing)
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    forebay.close(model)


@pytest.mark.parametrize("policy", ["resident", "stream-recompute"])
def test_a_trace_of_the_model_is_refused_and_leaves_it_as_it_is(policy: str) -> None:
    model, optimizer = prepared(Network(), policy)
    for trace in (torch.jit.trace, torch.export.export):
        with pytest.raises(UsageError, match=r"a prepared model is traced .* forebay\.close\(\) this one first"):
            trace(model, (batch(0),))
    plain = Network()
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    forebay.close(model)


@pytest.mark.parametrize("policy", ["resident", "stream"])
def test_a_parameter_put_in_the_place_of_another_is_the_one_that_is_saved(policy: str) -> None:
    states = []
    plain = Network()
    for m, o in (prepared(Network(), policy), (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))):
        m.get_submodule("head").bias = nn.Parameter(torch.ones(plain.head.bias.shape))
        train(m, o)
        states.append({name: value.clone() for name, value in m.state_dict().items()})
        if m is not plain:
            forebay.close(m)
    ours, theirs = states
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
