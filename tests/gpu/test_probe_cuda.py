"""Measuring a real GPU, small: every figure is there and in the order of magnitude of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.profiler.effort import Effort, Layer
from forebay.profiler.probe import cached, nominal, probe

MiB = 2**20

SMALL = Effort(
    layers=(Layer(512, 1024, 1024), Layer(2048, 2048, 8192)),
    rounds=3,
    bound=0.3,
    copy_sizes=(64 * 1024, MiB, 64 * MiB),
    update_elements=MiB,
    update_dtype="bfloat16",
    chain=100,
    pinned_bound=256 * MiB,
)


@pytest.mark.real
@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    machine = probe("cuda", folder=tmp_path, effort=SMALL)
    assert (machine.device_kind, machine.shared_cores, machine.watch_seconds) == ("cuda", 0.0, 0.0)
    # Not one page: this driver page-locks at least the first try of 64 MiB.
    assert machine.pinned_capacity >= 64 * MiB
    # Tensor cores; a copy engine that does not need the CPU; memory of a GPU.
    assert machine.compute["float16"] > machine.compute["float32"] > 1e12
    assert machine.h2d.curve.rate(64 * MiB) > 2e9 and machine.d2h.curve.rate(64 * MiB) > 2e9
    assert machine.device_bandwidth > machine.h2d.curve.rate(64 * MiB)
    again = cached("cuda", folder=tmp_path)
    assert again is not None and again.compute == machine.compute
    assert nominal("cuda").device_kind == "cuda"
