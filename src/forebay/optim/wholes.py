"""Updates of whole parameters at once, one after the other, by torch's ops on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, final

import torch

from forebay.optim.coding import draw_parameter
from forebay.optim.parts import Arithmetic, Part, Prepared, Room, brought
from forebay.optim.rules import UpdateRule, WholeRule
from forebay.states import form_of, plain_name

__all__ = ["WholeArithmetic", "as_parameter", "expect_whole", "states_of"]


@final
class WholeArithmetic(Arithmetic):
    """torch's ops. Gradients of masters become fp32 in ``workspace`` (1-D uint8, ``workspaces.workspace_nbytes``),
    where the rule has its room, too; without one in new memory.

    What goes into another copy is copied there first, which moves its bytes twice more."""

    def __init__(self, rule: WholeRule, workspace: torch.Tensor | None = None) -> None:
        self._rule = rule
        self._workspace = workspace

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        return partial(self._update, tuple(map(expect_whole, parts)))

    def _update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        for given in parts:
            part, room = brought(given), Room(self._workspace)
            wide, gradient = part.parameter if part.master is None else part.master, part.gradient
            if part.drawn:
                wide = room.take(wide.numel(), wide.device).copy_(wide)
            if gradient.dtype is not wide.dtype:
                gradient = room.take(gradient.numel(), gradient.device).copy_(gradient)
            states = states_of(self._rule, part)
            new = partial(room.take, device=wide.device)
            self._rule.update(as_parameter(wide, part), as_parameter(gradient, part), states, step, group, new)
            if part.master is not None:
                part.parameter.copy_(part.master)
            elif part.drawn:
                draw_parameter(part.parameter, wide, step, part.place)


def states_of(rule: UpdateRule, part: Part) -> dict[str, torch.Tensor]:
    """The states that a parameter has, in their shapes, by plain name."""
    found = {}
    for name, state in zip(rule.state_names, part.states, strict=True):
        form = form_of(name)
        shape = form.shape_for(part.shape)
        if form.is_elementwise:
            found[plain_name(name)] = as_parameter(state, part)
        elif shape is not None:
            found[plain_name(name)] = state.view(shape)
    return found


def as_parameter(values: torch.Tensor, part: Part) -> torch.Tensor:
    """``values`` of all of a parameter (1-D) in its shape and strides."""
    return values.as_strided(part.shape, part.stride, values.storage_offset())


def expect_whole(part: Part) -> Part:
    """``part``. Raises ``ValueError`` for one that is not all of a parameter."""
    if part.parameter.numel() != prod(part.shape):
        raise ValueError(f"an update of whole parameters was given {part.parameter.numel()} elements of {part.shape}")
    return part
