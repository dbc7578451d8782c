"""On a card: is the step hidden, and what do activations cost that are not there?"""

from __future__ import annotations

from benchmarks.case import Case, DeviceKind, Facts, Limit
from benchmarks.cases.bounds import matrix_seconds
from benchmarks.contenders import Forebay, Plain
from benchmarks.models import LLAMA_270M

__all__ = ["CASES"]


def _again(facts: Facts) -> float:
    """Every block's forward runs twice: four thirds of the matrix products."""
    return matrix_seconds(facts) * 4 / 3


_TWICE = Limit("matrix products at the rate of a large one, those of forward twice", _again)
_ONCE = Limit("matrix products at the rate of a large one", matrix_seconds)

CASES = (
    Case(
        name="hidden-cuda",
        question="What does a step cost beside its forward and backward, with clipping and states on the host?",
        model=LLAMA_270M,
        # By the rates of an H200 beside 16 cores (docs/log.md), and not measured, forward and backward of so many
        # tokens take some twice as long as the update of everything there.
        batch=28,
        seq=2048,
        device=DeviceKind.CUDA,
        contenders=(
            Plain(
                name="plain", what="forward and backward alone, blocks checkpointed", checkpointed=True, updates=False
            ),
            Plain(name="plain-again", what="the same once more", checkpointed=True, updates=False),
            Forebay(device_memory="14GiB", clip=1.0, what="forebay, auto, clipping; not all states fit"),
            Forebay(
                name="forebay-streamed",
                device_memory="24GiB",
                policy="stream-recompute",
                clip=1.0,
                what="forebay, clipping, everything streamed, blocks recomputed",
            ),
        ),
        limit=_TWICE,
        target=1.05,
        rounds=5,
        warmup=1,
        steps=4,
        tolerance=5e-2,  # the baseline is never updated
    ),
    Case(
        name="activations-cuda",
        question="What does a step cost within the memory of PyTorch's own means against large activations?",
        model=LLAMA_270M,
        batch=8,
        seq=2048,
        device=DeviceKind.CUDA,
        contenders=(
            Plain(name="plain", what="PyTorch, forebay.optim.AdamW", wide=True),
            Plain(name="plain-again", what="the same once more", wide=True),
            Plain(name="checkpoint", what="every block under torch.utils.checkpoint", wide=True, checkpointed=True),
            Plain(name="save_on_cpu", what="save_on_cpu(pin_memory=True)", wide=True, saved_on_host=True),
            Forebay(device_memory="9GiB", what="forebay, auto"),
            Forebay(name="forebay-7", device_memory="7GiB", what="forebay, auto"),
            Forebay(name="forebay-resident", device_memory="64GiB", what="forebay, auto, room for everything"),
        ),
        limit=_ONCE,
        rounds=5,
        warmup=1,
        steps=4,
        tolerance=5e-2,
    ),
)
