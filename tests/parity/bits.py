"""Sessions whose plan keeps activations as fewer bits, opened without the check that a whole plan passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from forebay.compression import encoded_nbytes
from forebay.device.base import Device
from forebay.device.cpu import CpuDevice
from forebay.layout import align
from forebay.memory import ALIGNMENT
from forebay.opening import open_session
from forebay.optim.reading import read_optimizer
from forebay.plans import Plan, Streaming
from forebay.runtime.blocks import find_blocks
from forebay.treatments import Fate, Selection, Treatment
from tests.parity.compare import adamw
from tests.parity.models import Case
from tests.parity.offloading import with_disk
from tests.parity.recomputing import AMPLE, plan_of

__all__ = ["bits_plan", "opened"]


def bits_plan(
    case: Case,
    treatments: Mapping[str, Sequence[Treatment]],
    *,
    recompute: Sequence[str] = (),
    resident: bool = True,
    elements: int = 0,
    itemsize: int = 4,
    folder: Path | None = None,
    windows: int = 2**20,
) -> Plan:
    """What ``treatments`` says of each block. Every depot has room for all of them, of ``elements`` at most each."""
    plan = plan_of(find_blocks(case.model(torch.float32)).model, recompute, resident=resident)
    every = [t for ts in treatments.values() for t in ts]

    def sizes(fate: Fate) -> list[int]:
        return [encoded_nbytes(elements, itemsize, t.bits) for t in every if t.fate is fate]

    arena = sum(align(n, ALIGNMENT) for n in sizes(Fate.OFFLOAD))
    streaming: Streaming = replace(
        plan.streaming, host_activations=arena, offload_window=windows, reload_window=windows
    )
    plan = replace(
        plan,
        streaming=streaming,
        host=plan.host + arena,
        activations=tuple(Selection((block,), tuple(ts)) for block, ts in treatments.items()),
        changes_numbers=("activations as fewer bits",) if any(t.lossy for t in every) else (),
    )
    return plan if folder is None else with_disk(plan, folder, sizes(Fate.DISK))


def opened(case: Case, plan: Plan, device: Device | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Device]:
    """The case's model under ``plan``."""
    device = device or CpuDevice(AMPLE)
    model = case.model(torch.float32)
    optimizer = adamw(list(model.parameters()))
    rule = read_optimizer(optimizer)
    made = open_session(model, optimizer, find_blocks(model), rule, plan, device, owns_device=True)
    return *made, device
