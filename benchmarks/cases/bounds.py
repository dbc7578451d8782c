"""Terms of physical limits, in seconds."""

from __future__ import annotations

from benchmarks.case import Facts

__all__ = ["fetch_seconds", "matrix_seconds", "return_seconds", "update_seconds"]

_UPDATE_BYTES = 28
"""AdamW per parameter: fp32 parameter and two moments read and written (24), gradient and working copy (4 at most:
a bf16 model reads 2 and writes 2, an fp32 model reads 4)."""


def matrix_seconds(facts: Facts) -> float:
    """The step's matrix products, at the rate of a large one."""
    return facts.flops / facts.flops_per_second


def update_seconds(facts: Facts) -> float:
    """The update in host memory, at the rate of a large in-place operation."""
    return facts.parameters * _UPDATE_BYTES / facts.update_bytes_per_second


def fetch_seconds(facts: Facts) -> float:
    """Every parameter to the device twice: for forward and for backward."""
    return 2 * facts.parameter_bytes / facts.h2d_bytes_per_second


def return_seconds(facts: Facts) -> float:
    """Every gradient to the host once."""
    return facts.parameter_bytes / facts.d2h_bytes_per_second
