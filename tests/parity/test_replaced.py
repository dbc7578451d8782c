"""Parameters that the user's loop replaces between passes: it is trained as in plain PyTorch, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ModelError
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
