"""The device bytes of one step beside parameters and states, from a step under fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from forebay.device.ledger import StorageLedger
from forebay.errors import ModelError
from forebay.memory import Ledger, Tier
from forebay.trace import Footprint

__all__ = ["call_arguments", "footprint"]

UNSEEN_LOSS_COPIES = 3
"""Copies of the outputs that a loss outside the model may make: log-probabilities, their gradient, the logits'."""


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``batch`` as arguments of the model's forward: a mapping gives keywords, a tuple positions, else one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def footprint(model: nn.Module, batch: Any, device: torch.device) -> Footprint:
    """Runs one training step of ``model`` on ``batch`` under fake tensors and counts.

    Gradients are dropped as soon as they are made: what keeps them is the plan's to count. The output of the forward
    before is counted as held while the next one runs, as in most loops. A model whose forward depends on values
    (routing, ``.item()``) cannot run so; then the answer is ``measured=False`` with the reason.
    """
    args, kwargs = call_arguments(batch)
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ModelError("batch holds no tensors; give what the model's forward is called with, as a dict or a tuple")
    nbytes = sum(t.nbytes for t in tensors)
    try:
        return Footprint(*_run(model, args, kwargs, device), input_nbytes=nbytes, measured=True)
    except Exception as error:
        # Whatever a model does with values it does not have ends here; the plan says that it does not know.
        return Footprint(0, nbytes, measured=False, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")


def _run(model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> tuple[int]:
    ledger = Ledger(Tier.DEVICE)
    watch = StorageLedger(ledger)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            return made.requires_grad_(tensor.requires_grad)

        state = {name: fake(p) for name, p in model.named_parameters()}
        for parameter in state.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop)
        state.update({name: fake(b.detach()) for name, b in model.named_buffers()})
        inputs, keywords = tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t.detach()).to(device), (args, kwargs)
        )
        watch.install()
        watch.activate(True)
        try:
            output = functional_call(model, state, inputs, keywords, tie_weights=True)
            forward = ledger.usage().peak
            loss, extra = _loss(output)
            loss.backward()
            # A loop that names the model's output (``output = model(...)``) holds it while the next forward runs.
            held = ledger.live
        finally:
            watch.uninstall()
        return (max(ledger.usage().peak, forward + held) + extra,)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _loss(output: Any) -> tuple[torch.Tensor, int]:
    """What to call backward on, and the bytes that the user's own loss may take where it is not in the model."""
    floats = [t for t in _leaves(output) if t.is_floating_point() and t.requires_grad]
    if not floats:
        raise ModelError("the model's forward returned nothing that requires a gradient")
    scalar = next((t for t in floats if t.numel() == 1), None)
    if scalar is not None:
        return scalar.sum(), 0
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
