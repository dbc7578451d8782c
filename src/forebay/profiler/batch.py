"""What a model is called with, and what its output is trained by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from forebay.errors import CaptureFailed, UsageError
from forebay.runtime.passes import argument_name
from forebay.tiers.host import available_host_memory
from forebay.units import format_bytes

__all__ = [
    "NothingToTrain",
    "call_arguments",
    "count_tokens",
    "integers_for",
    "moved_to",
    "named_inputs",
    "scalar_loss",
    "with_values",
]

UNSEEN_LOSS_COPIES = 3
"""Copies of the outputs that a loss outside the model may make: log-probabilities, their gradient, the logits'."""


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``batch`` as arguments of the model's forward: a mapping gives keywords, a tuple positions, else one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def named_inputs(batch: Any) -> list[tuple[str, str, int]]:
    """Name, dtype and bytes of every tensor in ``batch``, as a trace of it has them among its sources."""
    found = []
    for path, leaf in tree_flatten_with_path(call_arguments(batch))[0]:
        if isinstance(leaf, torch.Tensor):
            name = argument_name(path)
            reach = 1 + sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
            elements = reach if leaf.numel() else 0
            found.append((name, str(leaf.dtype).removeprefix("torch."), elements * leaf.element_size()))
    return found


def count_tokens(arguments: Any) -> int:
    """What a user counts in a batch: token ids, or samples where there are none."""
    if isinstance(arguments, Mapping) and isinstance(arguments.get("input_ids"), torch.Tensor):
        return int(arguments["input_ids"].numel())
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    ids = next((t for t in tensors if not t.is_floating_point() and t.dim() >= 2), None)
    if ids is not None:
        return int(ids.numel())
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1


def integers_for(name: str, tensor: torch.Tensor, model: nn.Module, seed: int = 0) -> torch.Tensor:
    """The values of an integer or boolean input: its own, or made-up ones if it is on meta.

    Made up are ones for masks, zeros for token types, 0, 1, 2 ... for positions, and for everything else random
    numbers below the smallest vocabulary of the model, from ``seed``.
    """
    last = name.rpartition(".")[2]
    with _disable_current_modes():
        if not tensor.is_meta:
            return tensor.detach()
        if tensor.dtype is torch.bool or "mask" in last:
            return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")
        if "type" in last:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if "position" in last and tensor.dim():
            return torch.arange(tensor.shape[-1], dtype=tensor.dtype, device="cpu").expand(tensor.shape).clone()
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        high = max(min([*tables, torch.iinfo(tensor.dtype).max]), 2) if tables else 2
        generator = torch.Generator().manual_seed(seed)
        nbytes, free = 8 * tensor.numel(), available_host_memory().available
        if nbytes > free:
            raise UsageError(
                f"{name} alone, of shape {tuple(tensor.shape)}, takes {format_bytes(nbytes)}, and this machine has "
                f"{format_bytes(free)} of memory free; ask for a smaller batch or a shorter sequence"
            )
        return torch.randint(0, high, tensor.shape, generator=generator, device="cpu").to(tensor.dtype)


def moved_to(batch: Any, device: torch.device | str) -> Any:
    """``batch`` with every tensor on ``device``."""
    whole = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), whole)


def with_values(batch: Any, model: nn.Module, device: torch.device | str, seed: int = 0) -> Any:
    """``batch`` on ``device``, with made-up values from ``seed`` for what is on the meta device (``integers_for``)."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = tree_flatten_with_path(batch)
    made = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point() and leaf.is_meta:
                leaf = torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf.dtype)
            elif leaf.is_meta:
                leaf = integers_for(str(getattr(path[-1], "key", "")) if path else "", leaf, model, seed)
            leaf = leaf.to(device)
        made.append(leaf)
    return tree_unflatten(made, spec)


@final
class NothingToTrain(CaptureFailed):
    """A forward has made nothing that requires a gradient: there is no backward."""

    def __init__(self) -> None:
        super().__init__("the model's forward returned nothing that requires a gradient")


def scalar_loss(output: Any) -> tuple[torch.Tensor, int]:
    """What to call backward on, and the bytes that the user's own loss may take where it is not in the model. Raises
    ``NothingToTrain``."""
    trained = torch.is_grad_enabled()  # in an evaluation nothing requires a gradient
    floats = [t for t in _leaves(output) if t.is_floating_point() and (t.requires_grad or not trained)]
    if not floats:
        raise NothingToTrain
    scalar = next((t for t in floats if t.numel() == 1), None)
    if scalar is not None:
        return scalar if scalar.dim() == 0 else scalar.sum(), 0
    total = floats[0].sum()
    for tensor in floats[1:]:
        total = total + tensor.sum()
    return total, UNSEEN_LOSS_COPIES * sum(t.nbytes for t in floats)


def _leaves(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in a model's output; transformers' outputs are mappings."""
    if isinstance(output, Mapping):
        output = list(output.values())
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
