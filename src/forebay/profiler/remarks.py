"""What a plan's notes say of a model's step beside what was guessed (``guessing.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["CACHES", "KEEPS_CACHE", "NO_CARD", "SUMMED", "once_only"]

NO_CARD = "recorded with the cpu's ops: this torch sees no CUDA device, whose kernels may save less"

CACHES = ("past_key_values", "cache")
"""What transformers has called the keys and values of all layers in a model's output; the second since 5.24."""

KEEPS_CACHE = (
    "the model's output holds the keys and values of all layers, for generation; in training nothing reads them: give "
    "use_cache=False with the batch"
)

SUMMED = (
    "the model returns numbers, and none is known to be its loss: the plan is for the sum of what it returns; give "
    "loss_fn=, which makes the loss of the model and the batch"
)


def once_only(blocks: Iterable[str], differentiating: Collection[str]) -> Iterator[str]:
    """Why ``blocks`` are not recomputed (``Trace.unrepeatable``), of which those ``differentiating`` take gradients."""
    changing = [name for name in blocks if name not in differentiating]
    if changing:
        yield (
            f"{_which(changing)} not recomputed, whatever the room: the forward changes in place a tensor that is no "
            f"buffer, and nobody keeps what was in it; make it a buffer (register_buffer)"
        )
    taking = [name for name in blocks if name in differentiating]
    if taking:
        yield (
            f"{_which(taking)} not recomputed, whatever the room: the forward itself takes a gradient "
            f"(torch.autograd.grad), for which it reads what autograd has saved in it"
        )


def _which(blocks: Sequence[str]) -> str:
    return f"block {blocks[0]} and {len(blocks) - 1} more are" if len(blocks) > 1 else f"block {blocks[0]} is"
