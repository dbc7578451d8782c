"""Nothing fits: how much of the transfers is hidden?"""

from __future__ import annotations

from benchmarks.case import Case, DeviceKind, Facts, Limit
from benchmarks.cases.bounds import fetch_seconds, matrix_seconds, return_seconds, update_seconds
from benchmarks.contenders import AGAIN, FUSED, PLAIN, Forebay
from benchmarks.models import LLAMA_1B, LLAMA_16M

__all__ = ["CASES"]


def _cpu(facts: Facts) -> float:
    """On a CPU the same cores compute and copy: the parts add up."""
    return matrix_seconds(facts) + update_seconds(facts) + fetch_seconds(facts) + return_seconds(facts)


def _cuda(facts: Facts) -> float:
    """A card has engines of their own for each: the longest part binds."""
    return max(matrix_seconds(facts), update_seconds(facts), fetch_seconds(facts), return_seconds(facts))


CASES = (
    Case(
        name="streamed-cpu",
        question="What does a step cost when parameters, gradients and states all live on the host?",
        model=LLAMA_16M,
        batch=4,
        seq=512,
        device=DeviceKind.CPU,
        contenders=(
            PLAIN,
            FUSED,
            AGAIN,
            Forebay(device_memory="768MiB", policy="stream", what="forebay, everything streamed"),
        ),
        limit=Limit(
            "matrix products, 28 bytes per parameter of update, two fetches of each parameter and one return of each "
            "gradient, added up because the same cores do all",
            _cpu,
        ),
        target=1.15,
    ),
    Case(
        name="streamed-disk-cpu",
        question="What does a step cost when the optimizer's states live on disk?",
        model=LLAMA_16M,
        batch=4,
        seq=512,
        device=DeviceKind.CPU,
        contenders=(
            PLAIN,
            FUSED,
            AGAIN,
            Forebay(
                device_memory="768MiB",
                host_memory="140MiB",
                disk="1GiB",
                policy="stream",
                what="forebay, everything streamed, states on disk",
            ),
        ),
        limit=Limit("as streamed-cpu; reading and writing the states on disk is not counted", _cpu),
    ),
    Case(
        name="streamed-cuda",
        question="What does a step cost when parameters, gradients and states all live on the host?",
        model=LLAMA_1B,
        batch=2,
        seq=2048,
        device=DeviceKind.CUDA,
        contenders=(
            PLAIN,
            FUSED,
            AGAIN,
            Forebay(device_memory="24GiB", policy="stream", what="forebay, everything streamed"),
        ),
        limit=Limit(
            "the longest of: matrix products, 28 bytes per parameter of update in host memory, two fetches of each "
            "parameter, one return of each gradient",
            _cuda,
        ),
        tolerance=5e-2,  # plain keeps moments and parameters in bf16 only, forebay has fp32 ones
    ),
)
