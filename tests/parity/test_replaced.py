"""Parameters that the user's loop replaces or writes between passes: it is trained as in plain PyTorch, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError, ParameterReleased
from tests.parity.small import Network, batch, prepared, train


def halve(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """As plain PyTorch has it: ``values`` are those of the parameters, in their order."""
    nn.utils.vector_to_parameters(torch.cat([v.reshape(-1) for v in values.values()]) * 0.5, model.parameters())


@pytest.mark.parametrize("policy", ["keep", "stream"])
def test_replaced_data_is_trained(policy: str) -> None:
    plain = Network()
    rule = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    model, optimizer = prepared(Network(), policy)
    for m, o in ((plain, rule), (model, optimizer)):
        train(m, o)
    halve(plain, {n: p.detach() for n, p in plain.named_parameters()})
    halve(model, {n: p.clone() for n, p in forebay.parameters(model).items()})
    assert train(model, optimizer) == train(plain, rule)
    # Between backward and step too.
    for m, o in ((plain, rule), (model, optimizer)):
        m(batch(3)).square().mean().backward()
        m.get_parameter("head.weight").data = torch.ones(8, 8)
        o.step()
        o.zero_grad()
    assert train(model, optimizer) == train(plain, rule)
    forebay.close(model)
    assert all(torch.equal(p, plain.get_parameter(n)) for n, p in model.named_parameters())


def test_another_dtype_is_refused() -> None:
    model, optimizer = prepared(Network(), "keep")
    before = {n: p.clone() for n, p in forebay.parameters(model).items()}
    model(batch(0)).square().mean().backward()
    model.double()
    with pytest.raises(ModelError, match=r"emb\.weight was replaced .* by torch\.float64 .* prepare it anew"):
        optimizer.step()
    with pytest.raises(ModelError, match=r"emb\.weight was replaced"):
        model(batch(0).double())
    model.float()  # the same values
    optimizer.step()
    optimizer.zero_grad()
    assert any(not torch.equal(p, before[n]) for n, p in forebay.parameters(model).items())
    forebay.close(model)


def test_another_dtype_of_what_streams_is_refused() -> None:
    model, optimizer = prepared(Network(), "stream")
    losses = train(model, optimizer)
    with pytest.raises(
        ParameterReleased, match=r"another dtype or device \(model\.to\(\.\.\.\)\), forebay\.close\(model\)"
    ):
        model.double()
    assert train(model, optimizer)[-1] < losses[0]
    forebay.close(model)
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}


def test_close_puts_everything_back_before_it_complains() -> None:
    model, optimizer = prepared(Network(), "keep")
    train(model, optimizer)
    model(batch(0)).square().mean().backward()
    before = {n: p.clone() for n, p in forebay.parameters(model).items()}
    model.double()
    with pytest.raises(ModelError, match=r"emb\.weight was replaced"):
        forebay.close(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    forebay.close(model)  # it is closed
    model.zero_grad()
    forebay.close(prepared(model, "keep")[0])


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "fill_": lambda p: p.fill_(0.0),
    "zeros_": nn.init.zeros_,
    "normal_": nn.init.normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "data.mul_": lambda p: p.data.mul_(2.0),
    "copy_": lambda p: p.copy_(torch.ones(8, 8)),
    "several": lambda p: torch._foreach_mul_([p], 2.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_before_the_first_pass_is_refused_by_name(write: Callable[[nn.Parameter], object]) -> None:
    plain = Network()
    model, optimizer = prepared(Network(), "stream")
    refused = r"would write parameter head\.weight .* model\.load_state_dict\(\{'head\.weight': values\}"
    with torch.no_grad(), pytest.raises(ParameterReleased, match=refused):
        write(model.get_parameter("head.weight"))
    rule = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    assert train(model, optimizer) == train(plain, rule)
    forebay.close(model)


def test_a_read_before_the_first_pass_is_refused_and_a_look_is_not() -> None:
    model, _ = prepared(Network(), "stream")
    with pytest.raises(ParameterReleased, match=r"read parameter emb\.weight"):
        sum(p.norm() for p in model.parameters())
    weight = model.get_parameter("head.weight")
    assert torch.equal(torch.zeros_like(weight), torch.zeros(8, 8))
    assert torch.equal(weight.new_ones(3), torch.ones(3))
    assert torch.empty_like(weight).shape == torch.rand_like(weight).shape == weight.shape
    model.load_state_dict({"head.weight": torch.ones(8, 8)}, strict=False)
    assert torch.equal(forebay.parameters(model)["head.weight"], torch.ones(8, 8))
    forebay.close(model)


def test_a_write_that_nobody_saw_is_told_once_before_the_next_pass() -> None:
    """What numpy or another thread writes, and on a GPU every write."""
    plain = Network()
    rule = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    model, optimizer = prepared(Network(), "stream")
    assert train(model, optimizer) == train(plain, rule)
    for write in (1.0, 0.0):
        model.get_parameter("layers.1.inner.bias").detach().numpy()[0] = write
        with pytest.raises(ModelError, match=r"parameter layers\.1\.inner\.bias was written to in place"):
            model(batch(0))
        assert train(model, optimizer) == train(plain, rule)
    model.get_parameter("head.bias").detach().numpy()[0] = 0.0
    with pytest.raises(ModelError, match=r"head\.bias"):
        forebay.close(model)
    assert all(torch.equal(p, plain.get_parameter(n)) for n, p in model.named_parameters())
