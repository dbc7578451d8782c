"""What the capture tests share: the real step's own account of its bytes, to compare a trace's with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from forebay.device.ledger import StorageLedger
from forebay.memory import Ledger, Tier
from forebay.trace import Phase, Trace
from tests.parity.replay import live_bytes


def real_peak(model: nn.Module, batch: dict[str, Any], *, keep: bool = False, autocast: bool = False) -> int:
    """Bytes at the peak of a real step on the cpu: every storage counted when made and when freed."""

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad and not keep]
    ledger = Ledger(Tier.DEVICE)
    watch = StorageLedger(ledger)
    watch.install()
    watch.activate(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            output = model(**batch)
            loss = next(t for t in output.values() if isinstance(t, torch.Tensor) and t.numel() == 1)
        loss.backward()
    finally:
        watch.uninstall()
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return ledger.usage().peak


def traced_peak(trace: Trace, *, keep: bool = False) -> int:
    """The same figure, from the births, drops and unsaves of a trace."""
    return max(nbytes for _, nbytes in live_bytes(trace, keep_gradients=keep))


def saved_nbytes(trace: Trace, block: str) -> int:
    """Bytes that a forward visit of ``block`` makes and autograd keeps for backward."""
    return sum(
        tensor.nbytes
        for visit in trace.visits
        if (visit.block, visit.phase) == (block, Phase.FORWARD)
        for place, tensor in enumerate(trace.segments[visit.segment].tensors)
        if tensor.saved and tensor.root == place
    )


def gradients(trace: Trace) -> Iterator[tuple[str, int]]:
    """The name of each parameter whose gradient a step completes, and the bytes of the gradient."""
    tensors = dict(trace.tensors())
    for _, visit, op in trace.ops():
        for made in op.gradients:
            yield trace.sources[visit.resolve(made.parameter)].name, tensors[visit.resolve(made.tensor)].nbytes
