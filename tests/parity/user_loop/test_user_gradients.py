"""What a loop does with gradients under plain PyTorch, it does here, with the same numbers, bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from tests.parity.user_loop.pair import Pair, loss_of


def test_accumulation_over_many_backwards(pair: Pair) -> None:
    for step in range(3):
        for micro in range(4):
            for model, _ in pair.both():
                (loss_of(model, 4 * step + micro) / 4).backward()
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


Clip = Callable[[nn.Module], Any]
CLIPS: dict[str, Clip] = {
    "norm": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "norm, no foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False),
    "norm of 1": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=1.0),
    "largest": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type=float("inf")),
    "finite": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, error_if_nonfinite=True),
    "value": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "value, no foreach": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=False),
    "total": lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(pair: Pair, clip: str) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss_of(model, step).backward()
        results = [CLIPS[clip](model) for model, _ in pair.both()]
        assert results[0] is results[1] is None or torch.equal(*results)
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


def test_clipping_by_the_optimizer(pair: Pair) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss_of(model, step).backward()
        norm = pair.optimizer.clip_grad_norm_(0.1)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1))
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


ZERO: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "to none": lambda m, o: o.zero_grad(),
    "to zero": lambda m, o: o.zero_grad(set_to_none=False),
    "by the model": lambda m, o: m.zero_grad(),
    "by the model, to zero": lambda m, o: m.zero_grad(set_to_none=False),
    "by hand": lambda m, o: [setattr(p, "grad", None) for p in m.parameters()] and None,
    "by hand, to zero": lambda m, o: [p.grad.zero_() for p in m.parameters()] and None,
}


@pytest.mark.parametrize("zero", ZERO)
def test_zero_grad(pair: Pair, zero: str) -> None:
    for step in range(3):
        for model, optimizer in pair.both():
            loss_of(model, step).backward()
            optimizer.step()
            ZERO[zero](model, optimizer)
        pair.assert_equal()
        # Gradients of zero are gradients: momentum and decay move the parameters.
        for _, optimizer in pair.both():
            optimizer.step()
        pair.assert_equal()


EDITS: dict[str, Callable[[nn.Parameter], None]] = {
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "scaled": lambda p: p.grad.mul_(0.5),
    "divided": lambda p: p.grad.div_(4),
    "clamped": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "noise added": lambda p: p.grad.add_(torch.ones_like(p.grad), alpha=1e-3),
    "summed": lambda p: setattr(p, "grad", p.grad + 1e-3 * p.grad.sign()),
    "centred": lambda p: p.grad.sub_(p.grad.mean()),
    "filled": lambda p: p.grad.fill_(1e-3),
    "copied into": lambda p: p.grad.copy_(torch.full_like(p.grad, 1e-3)),
    "an element": lambda p: p.grad.view(-1).__setitem__(0, 1.0),
    "rows": lambda p: p.grad[:2].zero_(),
    "a row": lambda p: p.grad.__setitem__(1, 0.5),
    "masked": lambda p: p.grad.__setitem__(p.grad < 0, 0.0),
    "transposed": lambda p: p.grad.t().mul_(2),
    "deep": lambda p: p.grad.flatten()[1:].unsqueeze(0)[:, ::2].add_(1e-3),
    "halves": lambda p: [half.mul_(k + 2) for k, half in enumerate(p.grad.view(-1).chunk(2))],
    "through data": lambda p: p.grad.data.mul_(3),
    "nan removed": lambda p: torch.nan_to_num_(p.grad, nan=0.0),
    "handed on": lambda p: setattr(p, "grad", p.grad.detach().clone().neg_()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_user_edits_gradients(pair: Pair, edit: str) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss_of(model, 2 * step).backward()
            for parameter in model.parameters():
                EDITS[edit](parameter)
        pair.assert_equal()
        for model, _ in pair.both():
            loss_of(model, 2 * step + 1).backward()  # accumulates on the edited gradient
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_equal()


def test_copies_of_gradients_are_tensors_of_their_own(pair: Pair) -> None:
    kept = []
    for model, _ in pair.both():
        loss_of(model, 0).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        torch.save(gradients, file := io.BytesIO())
        file.seek(0)
        kept.append((copy.deepcopy(gradients), torch.load(file)))
    for model, optimizer in pair.both():
        optimizer.zero_grad()
        loss_of(model, 1).backward()
    for ours, theirs in zip(*kept, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_kept_gradient_is_never_that_of_another_step(pair: Pair) -> None:
    """torch leaves the old gradient to whoever holds it; here its bytes are overwritten, and a read says so."""
    kept = []
    for model, optimizer in pair.both():
        loss_of(model, 0).backward()
        kept.append(model.get_parameter("body.head.weight").grad)
        optimizer.zero_grad()
    assert torch.equal(*kept)
    for model, _ in pair.both():
        loss_of(model, 1).backward()
    pair.assert_equal()
    if type(kept[0]) is torch.Tensor:
        assert torch.equal(*kept)
    else:
        with pytest.raises(forebay.ForebayError, match=r"body\.head\.weight .*clone\(\)"):
            kept[0].norm()


@pytest.mark.parametrize("policy", ["stream"])
def test_gradients_that_change_places(pair: Pair) -> None:
    """A landed gradient given to another parameter of the same shape lands there, also where the two are exchanged."""
    names = ("body.layers.0.weight", "body.layers.1.weight")
    for model, _ in pair.both():
        loss_of(model, 0).backward()
        first, second = (model.get_parameter(name) for name in names)
        first.grad = second.grad
    for _, optimizer in pair.both():
        optimizer.step()
    pair.assert_equal()
    for model, optimizer in pair.both():
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        first, second = (model.get_parameter(name) for name in names)
        first.grad, second.grad = second.grad, first.grad
        optimizer.step()
    pair.assert_equal()


@pytest.mark.parametrize("policy", ["stream"])
def test_a_gradient_of_an_earlier_backward_is_refused_before_anything_changes(pair: Pair) -> None:
    kept = pair.model.get_parameter("body.layers.0.weight")
    loss_of(pair.model, 0).backward()
    old = kept.grad
    pair.optimizer.zero_grad()
    loss_of(pair.model, 1).backward()
    before = dict(forebay.parameters(pair.model).items())
    pair.model.get_parameter("body.layers.1.weight").grad = old
    kept.grad = torch.zeros_like(kept)
    with pytest.raises(forebay.ForebayError, match=r"clone\(\)"):
        pair.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in forebay.parameters(pair.model).items())
    pair.optimizer.zero_grad()


@pytest.mark.parametrize("enabled", [False, True])
def test_grad_scaler(pair: Pair, enabled: bool) -> None:
    scalers = [torch.amp.GradScaler("cpu", enabled=enabled, init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for scaler, (model, optimizer) in zip(scalers, pair.both(), strict=True):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
        pair.assert_equal()
        for scaler, (model, optimizer) in zip(scalers, pair.both(), strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.assert_equal()
