"""Stand-ins for compiled blocks in a capture: one op in forward, one in backward, that make what the block made when it
was run (``compiled.measure``).

The ops are torch operators of our own, which exist for fake tensors only. What they make is written in an argument, so
that equal blocks have equal ops, and a table of seconds by signature holds for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import register_flop_formula

from forebay.profiler.compiled import Made, Measured, inputs_of

__all__ = ["standing_in"]

BYTE = "uint8"


@torch.library.custom_op("forebay::compiled_forward", mutates_args=())
def compiled_forward(inputs: Sequence[torch.Tensor], makes: str, flops: int) -> list[torch.Tensor]:
    """The forward of a compiled block of ``inputs``; ``makes`` lists what it makes."""
    return _made(makes, inputs[0].device)


@torch.library.custom_op("forebay::compiled_backward", mutates_args=())
def compiled_backward(inputs: Sequence[torch.Tensor], makes: str, flops: int) -> list[torch.Tensor]:
    """The backward of the same, of what was saved and the gradients of its outputs."""
    return _made(makes, inputs[0].device)


@compiled_forward.register_fake
def _fake_forward(inputs: Sequence[torch.Tensor], makes: str, flops: int) -> list[torch.Tensor]:
    return _made(makes, inputs[0].device)


@compiled_backward.register_fake
def _fake_backward(inputs: Sequence[torch.Tensor], makes: str, flops: int) -> list[torch.Tensor]:
    return _made(makes, inputs[0].device)


@register_flop_formula([torch.ops.forebay.compiled_forward, torch.ops.forebay.compiled_backward], get_raw=True)
def _flops(inputs: Any, makes: str, flops: int, **_: Any) -> int:
    return flops


def _made(makes: str, device: torch.device) -> list[torch.Tensor]:
    return [Made(tuple(one["shape"]), tuple(one["stride"]), one["dtype"]).empty(device) for one in json.loads(makes)]


def _listed(made: Sequence[Made]) -> str:
    return json.dumps([asdict(one) for one in made])


def _workspace(nbytes: int) -> list[Made]:
    """What is there only while the op runs: a result that nobody keeps."""
    return [Made((nbytes,), (1,), BYTE)] if nbytes else []


@contextmanager
def standing_in(modules: Mapping[str, tuple[nn.Module, Measured]]) -> Iterator[None]:
    """A context in which ``modules``, by name, compute nothing and make what was measured of each."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for module, measured in modules.values():
            replaced.append((module, module.__dict__.get("forward")))
            module.forward = _StandIn(module, measured)
        yield
    finally:
        for module, before in replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before


@final
class _StandIn:
    """Called in the place of a module's forward."""

    def __init__(self, module: nn.Module, measured: Measured) -> None:
        self._module = module
        self._measured = measured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        outputs = _Whole.apply(self._measured, *inputs_of(self._module, leaves))  # type: ignore[no-untyped-call]
        return tree_unflatten(list(outputs), self._measured.structure)


@final
class _Whole(torch.autograd.Function):
    """A compiled block as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, measured: Measured, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        makes = [*measured.outputs, *measured.kept, *_workspace(measured.forward_bytes)]
        made = compiled_forward(inputs, _listed(makes), measured.forward_flops)
        there = [*inputs, *made[: len(measured.outputs) + len(measured.kept)]]
        ctx.save_for_backward(*(there[place] for place in measured.saved))
        ctx.measured = measured
        ctx.like = [Made.like(inputs[place]) for place in measured.trained]
        outputs = tuple(made[: len(measured.outputs)])
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        measured: Measured = ctx.measured
        read = [*ctx.saved_tensors, *(one for one in gradients if one is not None)]
        makes = [*ctx.like, *_workspace(measured.backward_bytes)]
        made = compiled_backward(read, _listed(makes), measured.backward_flops)
        found: list[torch.Tensor | None] = [None] * measured.inputs
        for place, gradient in zip(measured.trained, made, strict=False):
            found[place] = gradient
        return None, *found
