"""A model under forebay beside the same one under plain PyTorch, for loops of a user's own."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaForCausalLM

import forebay
from tests.parity.models import images, tokens

__all__ = ["AMPLE", "Interrupted", "Pair", "loss_of", "same_step"]

AMPLE = "64MiB"


class Pair:
    """A model under forebay and the same one under plain PyTorch, with torch's fused AdamW or SGD for both."""

    def __init__(self, model: nn.Module, reference: nn.Module, policy: str) -> None:
        self.plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.model, self.optimizer = forebay.prepare(model, made, device_memory=AMPLE, policy=policy, device="cpu")
        self.reference = reference

    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.model, self.optimizer), (self.reference, self.plain)

    def assert_equal(self) -> None:
        """Parameters and gradients agree in every bit."""
        values, gradients = forebay.parameters(self.model), forebay.gradients(self.model)
        for name, parameter in self.reference.named_parameters():
            assert torch.equal(values[name], parameter), name
            assert (name in gradients) == (parameter.grad is not None), name
            if parameter.grad is not None:
                assert torch.equal(gradients[name], parameter.grad), name


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = tokens(step) if isinstance(model, LlamaForCausalLM) else images(step)
    loss: torch.Tensor = model(**batch)["loss"]
    return loss


def same_step(pair: Pair, step: int) -> None:
    """One ordinary step of both, compared before and after the update."""
    losses = []
    for model, _ in pair.both():
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    pair.assert_equal()
    for _, optimizer in pair.both():
        optimizer.step()
    pair.assert_equal()
    for _, optimizer in pair.both():
        optimizer.zero_grad()


class Interrupted(RuntimeError):
    """What a test raises inside a model."""
