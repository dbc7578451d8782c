"""A small network, and what must be the same after something failed: threads, descriptors, parameters, hooks."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import forebay
from forebay.plans import Plan

__all__ = [
    "ON_DISK",
    "WIDTH",
    "Footing",
    "a_batch",
    "adamw",
    "assert_trains",
    "assert_trains_under_forebay",
    "descriptors",
    "network",
    "plan_for",
]

WIDTH = 512


def network(width: int = WIDTH) -> nn.Module:
    """Four blocks of 1.0 MiB; with gradients and AdamW 16 MiB in all."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def a_batch(width: int = WIDTH) -> torch.Tensor:
    return torch.ones(2, width)


def plan_for(model: nn.Module, **options: Any) -> Plan:
    model, _ = forebay.prepare(model, adamw(model), device_memory="64MiB", policy="stream", device="cpu", **options)
    plan = forebay.report(model).plan
    forebay.close(model)
    return plan


ON_DISK = {"host_memory": "15MiB", "device_memory": "6MiB"}
"""Budgets that put states on disk."""


def descriptors() -> list[str]:
    """What this process has open: a path each."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return sorted(path for path in found if "/proc/" not in path)


@dataclass(frozen=True)
class Footing:
    """What must be the same afterwards."""

    threads: set[threading.Thread]
    descriptors: list[str]
    parameters: list[nn.Parameter]
    values: list[torch.Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, model: nn.Module) -> Footing:
        gc.collect()
        parameters = list(model.parameters())
        return cls(
            set(threading.enumerate()),
            descriptors(),
            parameters,
            [p.detach().clone() for p in parameters],
            [p.data_ptr() for p in parameters],
        )

    def assert_kept(self, model: nn.Module, *, moved: bool = False) -> None:
        gc.collect()
        assert set(threading.enumerate()) == self.threads
        assert descriptors() == self.descriptors
        now = list(model.parameters())
        assert all(p is q for p, q in zip(now, self.parameters, strict=True))
        assert all(torch.equal(p, value) for p, value in zip(now, self.values, strict=True))
        assert moved or [p.data_ptr() for p in now] == self.addresses
        hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
        assert not hooks and all(not p._post_accumulate_grad_hooks for p in now)


def assert_trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A plain step changes every parameter as it should."""
    before = [p.detach().clone() for p in model.parameters()]
    model(a_batch()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def assert_trains_under_forebay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = dict(forebay.parameters(model).items())
    model(a_batch()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(not torch.equal(value, before[name]) for name, value in forebay.parameters(model).items())
