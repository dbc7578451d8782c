"""A capture of the step as it will run here: blocks that torch.compile was applied to are what the compiler made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._functorch import config as partitioner

from forebay.device.compiling import compiled_modules
from forebay.device.modes import compiles_nothing
from forebay.model import Model
from forebay.profiler.capture import Captured
from forebay.profiler.compiled import Measured, Measuring
from forebay.profiler.stand_ins import standing_in
from forebay.trace import Phase, Trace

__all__ = ["as_compiled"]

Calls = dict[str, list[tuple[Any, Any]]]


def as_compiled(model: nn.Module, device: str | torch.device, take: Callable[[], Captured]) -> Captured:
    """What ``take`` captures of ``model`` on ``device``, with what compiled blocks do measured: each is compiled and
    run, forward and backward. ``take`` is called once, and again where blocks were measured.

    As written, which is how they run then, are all blocks where one of the compiled modules is no block as a whole, has
    no values yet, is not on ``cpu``, fails, does what no stand-in can tell, or would have gradients that are not those
    of its loss (``_redrawing``), and where a dispatch mode is on under which PyTorch compiles nothing; the trace has
    it in its notes.

    Raises what ``take`` raises.
    """
    seen: Calls = {}
    names = compiled_modules(model)
    with _noting(model, names, seen):
        written = take()
    if not names:
        return written
    whole = {block.module for block in written.trace.model.blocks}
    modules = {name: model.get_submodule(name) for name in names}
    tensors = [t for m in modules.values() for t in (*m.parameters(), *m.buffers())]
    here = torch.device(device).type == "cpu" and all(t.device.type == "cpu" for t in tensors)
    if not here or not whole.issuperset(names):
        return _as_written(written, "what is compiled are not blocks as a whole, with values, on the cpu")
    if compiles_nothing():
        return _as_written(written, "a dispatch mode is on, that of another prepared model perhaps: close it before")
    if redrawing := _redrawing(written.trace, names):
        why = (
            f"{redrawing} draws random numbers, and where an activation memory budget below 1 recomputes them PyTorch "
            "draws others (pytorch issue 190758): gradients would not be those of the loss"
        )
        warnings.warn(f"compiled blocks run as written: {why}", stacklevel=2)
        return _as_written(written, why)
    found: dict[str, tuple[nn.Module, Measured]] = {}
    measuring = Measuring()
    for name, module in modules.items():
        calls = seen.get(name, [])
        try:
            measured = measuring.measure(module, *calls[0]) if len(calls) == 1 else None
        except Exception as error:  # whatever a compiler, or a model on made-up values, may raise
            return _as_written(
                written, f"{name} alone, on made-up values, failed: {type(error).__name__}: {_line(error)}"
            )
        if measured is None:
            return _as_written(written, f"{name} returns what it is given, changes its buffers, or is not called once")
        found[name] = getattr(module, "_orig_mod", module), _with_flops(measured, written.trace, name)
    with standing_in(found):
        captured = take()
    return replace(
        captured,
        trace=replace(captured.trace, compiled=names),
        seconds=_seconds(captured.trace, {name: one for name, (_, one) in found.items()}),
    )


def _as_written(captured: Captured, why: str) -> Captured:
    note = f"compiled blocks are planned, and run, as written: {why}"
    return replace(captured, trace=replace(captured.trace, notes=(*captured.trace.notes, note)))


def _redrawing(trace: Trace, names: Sequence[str]) -> str:
    """The first of the compiled modules ``names`` in which something draws that its compiler may draw anew in backward;
    empty where there is none, and where the compiler recomputes only what it recomputes by itself: no such op."""
    if partitioner.activation_memory_budget >= 1:
        return ""
    drawing = {visit.block for _, visit, op in trace.ops() if trace.works[op.work].draws}
    return next((name for name in names if _block_of(trace.model, name) in drawing), "")


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


@contextmanager
def _noting(model: nn.Module, names: Sequence[str], seen: Calls) -> Iterator[None]:
    """Notes in ``seen`` what the modules called ``names`` are called with."""

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.setdefault(name, []).append((args, kwargs))

    handles = [
        model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _block_of(model: Model, module: str) -> str:
    return next(block.name for block in model.blocks if block.module == module)


def _with_flops(measured: Measured, trace: Trace, module: str) -> Measured:
    """``measured`` with the FLOPs that its block has in ``trace``, op by op."""
    block = _block_of(trace.model, module)
    flops = {
        phase: sum(
            trace.works[op.work].flops for _, visit, op in trace.ops() if (visit.block, visit.phase) == (block, phase)
        )
        for phase in Phase
    }
    return replace(measured, forward_flops=flops[Phase.FORWARD], backward_flops=flops[Phase.BACKWARD])


def _seconds(trace: Trace, measured: Mapping[str, Measured]) -> dict[str, float]:
    """Seconds of the stand-ins' ops by signature; of blocks that are alike, the median."""
    found: dict[str, list[float]] = {}
    by_block = {_block_of(trace.model, name): one for name, one in measured.items()}
    for _, visit, op in trace.ops():
        work = trace.works[op.work]
        if work.is_compiled:
            one = by_block[visit.block]
            taken = one.forward_seconds if visit.phase is Phase.FORWARD else one.backward_seconds
            found.setdefault(work.signature, []).append(taken)
    return {signature: median(taken) for signature, taken in found.items()}
