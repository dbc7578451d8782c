"""What training has come to, copied: parameters, buffers, the optimizer's states; and whether two of them are one."""

from __future__ import annotations

import torch
from torch import nn

import forebay

__all__ = ["content", "expect_same", "states_of"]


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint has to bring back but the generators."""
    found = {f"parameter {n}": v.clone() for n, v in forebay.parameters(model).items()}
    found |= {f"buffer {n}": v.clone() for n, v in model.named_buffers()}
    return found | states_of(optimizer)


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's states on the host, by name and the number of their parameter."""
    entries = optimizer.state_dict()["state"]
    return {f"{name} {i}": state.cpu().clone() for i, entry in entries.items() for name, state in entry.items()}


def expect_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
