"""What compiled blocks do, found out by running each once for real: shapes, bytes and seconds, as the compiler made it.

Fake tensors show a step op by op, and compiled code has no ops: what it saves, what it takes meanwhile and for how long
is the compiler's doing. So each compiled block is called with made-up values, forward and backward, by itself, and a
stand-in takes its place in the capture (``stand_ins``): one op in forward, one in backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from forebay.runtime.generators import drawn_from
from forebay.runtime.inside import own_generators

__all__ = ["Made", "Measured", "Measuring", "allocations", "inputs_of", "peak_of"]

_MEMORY = "[memory]"
_TURN = "forebay: forward turns into backward"

RUNS = 3
"""Timed runs of a block, after one that compiles; the median counts."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that owns its storage: shape and stride in elements, dtype without ``torch.``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Made:
        """What ``tensor`` looks like."""
        return cls(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))

    def empty(self, device: torch.device) -> torch.Tensor:
        """Such a tensor, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device=device)


@final
@dataclass(frozen=True)
class Measured:
    """A compiled block that was run. ``inputs`` of it are its tensor arguments in order, then its parameters and
    buffers.

    ``outputs`` are the tensors that it returned, in ``structure``; ``kept`` those that it made beside them and saved,
    by their storage; ``saved`` what it saved, in order: a place among the inputs, or (from ``len(inputs)`` on) among
    outputs and kept together. ``trained`` are the places of the inputs that have a gradient. ``forward_bytes`` and
    ``backward_bytes`` are what each took at its peak beside what it returned and kept; seconds are those of each alone.
    FLOPs are not measured: they are those of the ops as written.
    """

    inputs: int
    outputs: tuple[Made, ...]
    structure: TreeSpec
    kept: tuple[Made, ...]
    saved: tuple[int, ...]
    trained: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_flops: int = 0
    backward_flops: int = 0


@final
class Measuring:
    """Runs compiled blocks, on ``cpu``. Of blocks that are alike the bytes are counted once."""

    def __init__(self) -> None:
        self._bytes: dict[Any, tuple[int, int]] = {}

    def measure(self, module: nn.Module, args: Any, kwargs: Any) -> Measured | None:
        """Calls ``module`` on values like ``args`` and ``kwargs`` (which may be fakes), forward and backward.

        Parameters, buffers, gradients and random number generators are left as they are; what is compiled stays so, so
        that the next call of that shape finds it. None for a module that returns its arguments, or views of larger
        tensors, or changes its buffers: no stand-in can tell that.

        Raises whatever the module and its compiler raise.
        """
        leaves, spec = tree_flatten((args, kwargs))
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        with drawn_from(0, own_generators(module.modules())):
            given = [_real(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            try:
                measured = _Runs(module, given, spec).measured(self._bytes)
                same = all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())
                return measured if same else None
            finally:
                with torch.no_grad():
                    for name, buffer in module.named_buffers():
                        buffer.copy_(buffers[name])


def _real(like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, FakeTensor):
        return like.detach().clone().requires_grad_(like.requires_grad)
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    made = made.normal_() if made.is_floating_point() else made.zero_()
    return made.requires_grad_(like.requires_grad)


@final
class _Runs:
    """Runs of one module on given values."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: TreeSpec) -> None:
        self._module = module
        self._leaves = leaves
        self._spec = spec
        self.inputs = inputs_of(module, leaves)
        self._trained = tuple(i for i, tensor in enumerate(self.inputs) if tensor.requires_grad)

    def measured(self, known: dict[Any, tuple[int, int]]) -> Measured | None:
        """What the runs show; bytes are those ``known`` of blocks that are alike, and noted there."""
        clocks = [_Clock() for _ in range(1 + RUNS)]
        for clock in clocks:
            self._once(clock)
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            leaves, structure = tree_flatten(self._forward())
        made, seeds = self._made(leaves, packed), _seeds(leaves)
        del leaves
        packed.clear()
        if made is None:
            return None
        inputs = tuple((Made.like(tensor), tensor.requires_grad) for tensor in self.inputs)
        alike = type(self._module), inputs, made
        forward, backward = known[alike] if alike in known else known.setdefault(alike, self._peaks(seeds))
        outs, kept, saved = made
        gradients = sum(_nbytes(Made.like(self.inputs[place])) for place in self._trained)
        return Measured(
            len(self.inputs),
            outs,
            structure,
            kept,
            saved,
            self._trained,
            max(0, forward - sum(map(_nbytes, (*outs, *kept)))),
            max(0, backward - gradients),
            median(clock.forward for clock in clocks[1:]),
            median(clock.backward for clock in clocks[1:]),
        )

    def _peaks(self, seeds: Sequence[torch.Tensor]) -> tuple[int, int]:
        """The most bytes that are live in forward, and in backward above what forward left."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            leaves, _ = tree_flatten(self._forward())
            with torch.profiler.record_function(_TURN):
                pass
            gradients = self._backward(leaves, seeds)
        del gradients
        changes = allocations(profile)
        return peak_of(changes[: changes.index(0)]), peak_of(changes[changes.index(0) :])

    def _made(
        self, leaves: Sequence[Any], packed: Sequence[torch.Tensor]
    ) -> tuple[tuple[Made, ...], tuple[Made, ...], tuple[int, ...]] | None:
        """What the outputs are, what was kept beside them, and where each saved tensor is; None: it cannot be told."""
        places = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(self.inputs)}
        outs: list[Made] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                return None
            storage = leaf.untyped_storage()
            if storage._cdata in places or storage.nbytes() != leaf.numel() * leaf.element_size():
                return None
            places[storage._cdata] = len(self.inputs) + len(outs)
            outs.append(Made.like(leaf))
        kept: list[Made] = []
        saved = []
        for tensor in packed:
            storage = tensor.untyped_storage()
            if storage._cdata not in places:
                places[storage._cdata] = len(self.inputs) + len(outs) + len(kept)
                elements = storage.nbytes() // tensor.element_size()
                kept.append(Made((elements,), (1,), str(tensor.dtype).removeprefix("torch.")))
            saved.append(places[storage._cdata])
        return tuple(outs), tuple(kept), tuple(saved)

    def _once(self, clock: _Clock) -> None:
        start = time.perf_counter()
        leaves, _ = tree_flatten(self._forward())
        clock.forward = time.perf_counter() - start
        seeds = _seeds(leaves)
        start = time.perf_counter()
        self._backward(leaves, seeds)
        clock.backward = time.perf_counter() - start

    def _forward(self) -> Any:
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        with torch.enable_grad():
            return self._module(*args, **kwargs)

    def _backward(self, leaves: Sequence[Any], seeds: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of all inputs that have one; the graph is gone then."""
        wanted = [self.inputs[place] for place in self._trained]
        if not seeds or not wanted:
            return ()
        with torch.autocast("cpu", enabled=False):
            return torch.autograd.grad(_differentiable(leaves), wanted, seeds, allow_unused=True)


def _differentiable(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _seeds(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Gradients of the outputs: what comes after the block makes them, so they are there before its backward."""
    return [torch.ones_like(leaf) for leaf in _differentiable(leaves)]


@final
class _Clock:
    """Seconds of both halves of a run."""

    forward = 0.0
    backward = 0.0


def inputs_of(module: nn.Module, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among ``leaves``, then the parameters and buffers of ``module``."""
    return [*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *module.parameters(), *module.buffers()]


def _nbytes(made: Made) -> int:
    elements = 1
    for size in made.shape:
        elements *= size
    dtype: torch.dtype = getattr(torch, made.dtype)
    return elements * dtype.itemsize


def allocations(profile: torch.profiler.profile) -> list[int]:
    """Bytes that PyTorch's allocator for the CPU handed out (above 0) or took back, in their order; 0 where forward
    turned into backward, if that was marked (``_TURN``)."""
    profiler: Any = profile.profiler
    events: list[Any] = [] if profiler is None else profiler.kineto_results.events()
    found = [event for event in events if event.name() in (_MEMORY, _TURN)]
    found.sort(key=lambda event: event.start_ns())
    return [event.nbytes() if event.name() == _MEMORY else 0 for event in found]


def peak_of(changes: Sequence[int]) -> int:
    """The most that is live at once, above what was before."""
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
