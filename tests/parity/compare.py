"""Trains a model under forebay beside plain PyTorch and demands the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import forebay
from forebay.device.base import Device
from tests.parity.models import Case

__all__ = ["STEPS", "adamw", "assert_same_steps", "assert_same_training", "stepped"]

STEPS = 4
"""The ledger looks at the first two on batches of one shape, and rests in the others."""

ACCUMULATE = 2
CPU = torch.device("cpu")

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def assert_same_training(
    case: Case,
    dtype: torch.dtype,
    *,
    optimizer: Make = adamw,
    clip: float | None = 0.5,
    steps: int = STEPS,
    tile: str | None = None,
    **prepare: Any,
) -> nn.Module:
    """Loss and every gradient equal those of plain PyTorch, over ``steps`` steps of two micro-batches.

    Before each step the reference takes over forebay's parameters, so that a difference cannot hide in a history of
    its own. With ``tile`` larger weights of the prepared model are in tiles of that size, and those of the reference as
    they are. Returns the prepared model, still open.
    """
    asked = prepare.get("device", "cpu")
    device = torch.device(asked.name if isinstance(asked, Device) else asked)
    model = case.model(dtype)
    if tile is not None:
        assert forebay.tile(model, tile)
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    model, made = forebay.prepare(model, made, case.inputs(0, dtype), **prepare)
    assert_same_steps(model, made, case, dtype, clip=clip, steps=steps, device=device)
    return model


def assert_same_steps(
    model: nn.Module,
    made: torch.optim.Optimizer,
    case: Case,
    dtype: torch.dtype,
    *,
    clip: float | None = 0.5,
    steps: int = STEPS,
    device: torch.device = CPU,
) -> None:
    """``assert_same_training`` of a model that is prepared."""
    reference = case.model(dtype).to(device)
    for step in range(steps):
        _take_over(model, reference)
        reference.zero_grad()
        for micro in range(ACCUMULATE):
            inputs = {k: v.to(device) for k, v in case.inputs(step * ACCUMULATE + micro, dtype).items()}
            loss = model(**inputs)["loss"]
            loss.backward()
            # After backward: what the reference takes is not charged to the device then.
            expected = reference(**inputs)["loss"]
            expected.backward()
            assert torch.equal(loss, expected), (step, micro, loss, expected)
        _assert_same_gradients(model, reference)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), clip))
            _assert_same_gradients(model, reference)
        made.step()
        made.zero_grad()


def stepped(optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor]) -> list[float]:
    """The losses of a loop that takes a step for each of ``losses``, which are made one after the other meanwhile."""
    found = []
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _take_over(model: nn.Module, reference: nn.Module) -> None:
    values = forebay.parameters(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])


def _assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    gradients = forebay.gradients(model)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient.cpu()), name
