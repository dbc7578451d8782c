"""Accumulation block by block beside the loop that it replaces, on plain PyTorch: the same numbers, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import forebay
from forebay.timeline import Lane
from tests.parity.compare import adamw
from tests.parity.models import Case

__all__ = ["assert_same_accumulation", "loss_of", "moved", "opened"]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"] / 3
    return loss


def _loop(model: nn.Module, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def assert_same_accumulation(
    case: Case,
    dtype: torch.dtype,
    *,
    steps: int = 2,
    count: int = 3,
    clip: float | None = 0.5,
    device: str = "cpu",
    **prepare: Any,
) -> nn.Module:
    """Losses, gradients, buffers and random numbers of ``steps`` steps of ``count`` micro-batches equal those of the
    loop, and so do the parameters after each step. Returns the prepared model, still open."""
    model, reference = case.model(dtype), case.model(dtype).to(device)
    made = adamw([p for p in model.parameters() if p.requires_grad])
    model, made = forebay.prepare(model, made, case.inputs(0, dtype), device=device, **prepare)
    for step in range(steps):
        values = forebay.parameters(model)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(values[name])
        reference.zero_grad()
        batches = [
            {k: v.to(device) for k, v in case.inputs(step * count + micro, dtype).items()} for micro in range(count)
        ]
        torch.manual_seed(step)
        expected = _loop(reference, batches)
        after = _random_states(device)
        torch.manual_seed(step)
        losses = forebay.accumulate(model, batches, loss_of)
        assert all(map(torch.equal, _random_states(device), after))
        assert len(losses) == count
        assert all(map(torch.equal, losses, expected)), (step, losses, expected)
        _assert_same(model, reference)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), clip))
        made.step()
        made.zero_grad()
    return model


def _random_states(device: str) -> list[torch.Tensor]:
    on_device = [torch.cuda.get_rng_state(device)] if torch.device(device).type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def _assert_same(model: nn.Module, reference: nn.Module) -> None:
    gradients = forebay.gradients(model)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert set(gradients) == set(expected)
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient.cpu()), name
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def moved(model: nn.Module, lane: Lane, verb: str) -> Counter[str]:
    """Bytes of a lane's events by what they move, of all whose description begins with ``verb``."""
    found = Counter[str]()
    for event in forebay.report(model).timeline.events:
        if event.lane is lane and event.what.startswith(f"{verb} "):
            found[event.what.removeprefix(f"{verb} ")] += event.nbytes
    return found


@contextmanager
def opened(case: Case, dtype: torch.dtype, **prepare: Any) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """The case's model under forebay with AdamW; closed at the end."""
    model = case.model(dtype)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    model, optimizer = forebay.prepare(model, optimizer, case.inputs(0, dtype), device="cpu", **prepare)
    try:
        yield model, optimizer
    finally:
        forebay.close(model)
