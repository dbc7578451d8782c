"""How fast this machine is, measured in the same run as a case: what its physical limit is computed from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.case import DeviceKind, Facts, Job

if TYPE_CHECKING:
    import torch

__all__ = ["facts", "fastest"]

_COPY_BYTES = 256 * 1024 * 1024
_MATRIX = {DeviceKind.CPU: 1024, DeviceKind.CUDA: 8192}
_REPETITIONS = 12


def facts(job: Job) -> Facts:
    """Measures the rates that bound a step of ``job``; each is the best of a few repetitions."""
    import torch

    device = job.device.value
    size = _MATRIX[job.device]
    matrix = torch.randn(size, size, device=device, dtype=getattr(torch, job.model.dtype))
    product = torch.empty_like(matrix)
    multiply = _best(job.device, lambda: torch.mm(matrix, matrix, out=product))

    host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=job.device is DeviceKind.CUDA)
    on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    state = torch.zeros(_COPY_BYTES // 4)
    return Facts(
        parameters=job.model.parameters,
        parameter_bytes=job.model.parameter_bytes,
        flops=job.model.flops(job.batch, job.seq),
        flops_per_second=2.0 * size**3 / multiply,
        update_bytes_per_second=2.0 * _COPY_BYTES / _best(DeviceKind.CPU, lambda: state.mul_(1.0)),
        h2d_bytes_per_second=_COPY_BYTES / _best(job.device, lambda: on_device.copy_(host, non_blocking=True)),
        d2h_bytes_per_second=_COPY_BYTES / _best(job.device, lambda: host.copy_(on_device, non_blocking=True)),
    )


def fastest(first: Facts, second: Facts) -> Facts:
    """The higher of each rate of two measurements of one job: a neighbour must not pass for physics."""
    return replace(
        first,
        flops_per_second=max(first.flops_per_second, second.flops_per_second),
        update_bytes_per_second=max(first.update_bytes_per_second, second.update_bytes_per_second),
        h2d_bytes_per_second=max(first.h2d_bytes_per_second, second.h2d_bytes_per_second),
        d2h_bytes_per_second=max(first.d2h_bytes_per_second, second.d2h_bytes_per_second),
    )


def _best(device: DeviceKind, work: Callable[[], torch.Tensor]) -> float:
    """Seconds of the fastest of a few repetitions of ``work``."""
    import torch

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device is DeviceKind.CUDA:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed()  # the first one pays for pages and kernels
    return min(timed() for _ in range(_REPETITIONS))
