"""Seconds of the ops of a trace, measured on this machine: what goes before any roofline.

Every distinct op (``Work.signature``) runs for real on random values of the shapes, strides and dtypes that the trace
saw, its result thrown away, so that the time includes the memory that it takes anew each time. Ops that move nothing
are not timed, and the most expensive come first, so that a limit on the time cuts what matters least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any, final

import torch
from torch.utils._pytree import tree_map_only

from forebay.errors import ConfigError
from forebay.machine import Machine
from forebay.profiler.stopwatch import Stopwatch
from forebay.profiler.work import Call, TensorSpec
from forebay.trace import Trace, Work

__all__ = ["TimingPolicy", "time_ops"]


@final
@dataclass(frozen=True)
class TimingPolicy:
    """How long timing may take: ``total`` seconds, at most ``share`` of it for one op, ``runs`` of each at most.

    An op whose arguments and results take more than ``nbytes`` is left to the roofline.
    """

    total: float = 15.0
    share: float = 0.1
    runs: int = 9
    nbytes: int = 2 << 30

    def __post_init__(self) -> None:
        if self.total <= 0 or not 0 < self.share <= 1 or self.runs < 1 or self.nbytes < 1:
            raise ConfigError(f"total and nbytes are above 0, share in (0, 1], runs 1 or more; got {self}")


def time_ops(
    trace: Trace,
    calls: Mapping[str, Call],
    machine: Machine,
    device: torch.device,
    stopwatch: Stopwatch,
    policy: TimingPolicy | None = None,
) -> Machine:
    """``machine`` with the measured seconds of the ops of ``trace`` that it does not know yet.

    An op that cannot run alone (it needs values that random ones are not) is left to the roofline.
    """
    policy = policy or TimingPolicy()
    left = policy.total
    measured: dict[str, float] = {}
    for work, times in _by_weight(trace, machine):
        call = calls.get(work.signature)
        estimate = _estimate(work, machine)
        too_large = call is None or _nbytes(call) > policy.nbytes or 2 * estimate > policy.share * policy.total
        if left <= 0 or call is None or too_large or work.signature in machine.op_seconds:
            continue
        del times
        seconds = _time(call, device, stopwatch, policy)
        if seconds:
            measured[work.signature] = median(seconds[1:] or seconds)
            left -= sum(seconds)
    return replace(machine, op_seconds={**machine.op_seconds, **measured})


def _by_weight(trace: Trace, machine: Machine) -> list[tuple[Work, int]]:
    """The works of ``trace`` that move or compute anything with how often they run, the most expensive first."""
    per_segment = [Counter(op.work for op in segment.ops) for segment in trace.segments]
    times: Counter[int] = Counter()
    for visit in trace.visits:
        times.update(per_segment[visit.segment])
    works = [(trace.works[index], n) for index, n in times.items() if trace.works[index].nbytes]
    return sorted(works, key=lambda item: -item[1] * _estimate(item[0], machine))


def _estimate(work: Work, machine: Machine) -> float:
    rate = machine.compute.get(work.dtype) or max(machine.compute.values())
    return max(work.flops / rate, work.nbytes / machine.device_bandwidth)


def _time(call: Call, device: torch.device, stopwatch: Stopwatch, policy: TimingPolicy) -> list[float]:
    """Seconds of each run, the first one (which warms up) included; empty when the op cannot run alone."""
    bound = policy.share * policy.total
    seconds: list[float] = []
    try:
        args, kwargs = tree_map_only(TensorSpec, lambda spec: _random(spec, device), (call.args, dict(call.kwargs)))
        while len(seconds) <= policy.runs and sum(seconds) < bound:
            seconds.append(stopwatch.seconds(lambda: call.func(*args, **kwargs)))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return []  # an op may want more of its arguments than their shapes say
    return seconds


def _extent(spec: TensorSpec) -> int:
    """Elements of the storage under a tensor."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))


def _random(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    flat = torch.empty(_extent(spec), dtype=dtype, device=device)
    if dtype.is_floating_point:
        flat.uniform_(0.1, 1.0)  # no zeros, no denormals: arithmetic on those takes other paths
    elif dtype is torch.bool:
        flat.random_(0, 2)
    elif not dtype.is_complex:
        flat.random_(0, spec.high if spec.high else 2)
    return flat.as_strided(spec.shape, spec.stride)


def _nbytes(call: Call) -> int:
    total = 0

    def add(spec: TensorSpec) -> Any:
        nonlocal total
        total += prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        return spec

    tree_map_only(TensorSpec, add, (call.args, dict(call.kwargs)))
    return total
