"""Updates of whole parameters, one after the other, by torch's ops on any device: here at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, final

import torch

from forebay.optim.coding import Take
from forebay.optim.parts import Arithmetic, Part, Prepared, Room, brought
from forebay.optim.rules import UpdateRule, WholeRule
from forebay.states import Shape, form_of, plain_name

__all__ = ["AtOnceArithmetic", "WholeArithmetic", "as_parameter", "expect_whole", "states_of"]


class WholeArithmetic(Arithmetic):
    """One parameter after the other, each in the same ``workspace`` (1-D uint8, ``workspaces.workspace_nbytes``), or
    without one in new memory.

    What goes into another copy is copied there first, which moves its bytes twice more."""

    def __init__(self, workspace: torch.Tensor | None = None) -> None:
        self._workspace = workspace

    @final
    def prepared(self, parts: Sequence[Part]) -> Prepared:
        return partial(self._update, tuple(map(expect_whole, parts)))

    @final
    def _update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        for given in parts:
            part = brought(given)
            self._step(part, step, group, partial(Room(self._workspace).take, device=part.parameter.device))

    @abstractmethod
    def _step(self, part: Part, step: int, group: Mapping[str, Any], take: Take) -> None:
        """Updates all of a parameter in place; ``take`` gives memory."""


@final
class AtOnceArithmetic(WholeArithmetic):
    """All of a parameter at once, as its ``rule`` says, which is fp32 or has a master; a gradient of 16 bits becomes
    fp32 first."""

    def __init__(self, rule: WholeRule, workspace: torch.Tensor | None = None) -> None:
        super().__init__(workspace)
        self._rule = rule

    def _step(self, part: Part, step: int, group: Mapping[str, Any], take: Take) -> None:
        wide, gradient = part.parameter if part.master is None else part.master, part.gradient
        if gradient.dtype is not wide.dtype:
            gradient = take(gradient.numel()).copy_(gradient)
        states = states_of(self._rule, part)
        self._rule.update(as_parameter(wide, part), as_parameter(gradient, part), states, step, group, take)
        if part.master is not None:
            part.parameter.copy_(part.master)


def states_of(rule: UpdateRule, part: Part) -> dict[str, torch.Tensor]:
    """The states that a parameter has, in their shapes, by plain name."""
    found = {}
    for name, state in zip(rule.state_names, part.states, strict=True):
        form = form_of(name)
        if not state.numel():
            continue
        shape = None if form.is_elementwise else form.shape_for(Shape(part.shape))
        found[plain_name(name)] = as_parameter(state, part) if shape is None else state.view(shape)
    return found


def as_parameter(values: torch.Tensor, part: Part) -> torch.Tensor:
    """``values`` of all of a parameter (1-D) in its shape and strides."""
    return values.as_strided(part.shape, part.stride, values.storage_offset())


def expect_whole(part: Part) -> Part:
    """``part``. Raises ``ValueError`` for one that is not all of a parameter."""
    if part.parameter.numel() != prod(part.shape):
        raise ValueError(f"an update of whole parameters was given {part.parameter.numel()} elements of {part.shape}")
    return part
