"""What a model is called with, and what its output is trained by."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeGuard, final

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from forebay.errors import CaptureFailed, UsageError
from forebay.runtime.passes import argument_name
from forebay.tiers.host import available_host_memory
from forebay.units import format_bytes

__all__ = [
    "NothingToTrain",
    "Scalar",
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
    """A forward has made nothing that requires a gradient, as far as is seen: there is no backward."""

    def __init__(self, output: Any) -> None:
        super().__init__(
            f"nothing that requires a gradient was found in what the model's forward returned "
            f"({type(output).__name__}); give loss_fn=, which makes the loss of the model and the batch"
        )


@final
class Scalar(NamedTuple):
    """What to call backward on, and the bytes that the user's own loss may take where it is not in the model.
    ``is_sum``: there are numbers among the outputs, and none of them is known to be the loss."""

    loss: torch.Tensor
    unseen_nbytes: int = 0
    is_sum: bool = False


def scalar_loss(output: Any) -> Scalar:
    """What a model's ``output`` is trained by: what it calls ``loss``; else its number, if that comes first, or one
    that trains all that the outputs do; else the sum of its numbers, if they do together, or of everything. Raises
    ``NothingToTrain``."""
    trained = torch.is_grad_enabled()  # in an evaluation nothing requires a gradient

    def trains(leaf: Any) -> TypeGuard[torch.Tensor]:
        return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (leaf.requires_grad or not trained)

    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if trains(named) and named.numel() == 1:
        return Scalar(_sum([named]))
    floats = list(filter(trains, _leaves(output)))
    if not floats:
        raise NothingToTrain(output)
    numbers = [t for t in floats if t.numel() == 1]
    if len(numbers) == 1 and numbers[0] is floats[0]:
        return Scalar(_sum(numbers))
    for number in numbers:
        if _train_all([number], floats):
            return Scalar(_sum([number]))
    summed = numbers if numbers and _train_all(numbers, floats) else floats
    return Scalar(_sum(summed), UNSEEN_LOSS_COPIES * sum(t.nbytes for t in summed), is_sum=bool(numbers))


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return reduce(operator.add, (t if t.dim() == 0 else t.sum() for t in tensors))


def _train_all(losses: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether ``outputs`` train nothing that ``losses`` do not: the numbers among them have gone into these, and
    backward from the others ends nowhere else."""
    reached = _nodes(losses)
    numbers = {get_gradient_edge(t).node for t in outputs if t.numel() == 1 and t.requires_grad}
    ends = {node for node in _nodes([t for t in outputs if t.numel() != 1]) if not node.next_functions}
    return numbers | ends <= reached


def _nodes(tensors: Sequence[torch.Tensor]) -> set[Node]:
    """What backward from ``tensors`` comes by."""
    found = set[Node]()
    coming = [get_gradient_edge(t).node for t in tensors if t.requires_grad]
    while coming:
        node = coming.pop()
        if node not in found:
            found.add(node)
            coming.extend(then for then, _ in node.next_functions if then is not None)
    return found


def _leaves(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in a model's output, also in mappings, as transformers' outputs are, and in fields of dataclasses."""
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, field.name, None) for field in fields(output)]
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping) or is_dataclass(leaf):
            yield from _leaves(leaf)
