"""Updates of whole parameters, one after the other: by torch's ops on any device, by kernels on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, final

import torch

from forebay.optim.coding import draw_parameter
from forebay.optim.factored import AdafactorRule, adafactor_step
from forebay.optim.parts import Arithmetic, Part, Prepared, Room, brought, copied
from forebay.optim.rules import WholeRule
from forebay.states import form_of, plain_name

if TYPE_CHECKING:
    from forebay.kernels.team import Team

__all__ = ["AdafactorKernels", "WholeArithmetic"]


@final
class WholeArithmetic(Arithmetic):
    """torch's ops. Gradients of masters become fp32 in ``workspace`` (1-D uint8, ``layout.workspace_nbytes``), where
    the rule has its room, too; without one in new memory.

    What goes into another copy is copied there first, which moves its bytes twice more."""

    def __init__(self, rule: WholeRule, workspace: torch.Tensor | None = None) -> None:
        self._rule = rule
        self._workspace = workspace

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        return partial(self._update, tuple(map(_expect_whole, parts)))

    def _update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        for given in parts:
            part, room = brought(given), Room(self._workspace)
            wide, gradient = part.parameter if part.master is None else part.master, part.gradient
            if part.drawn:
                wide = room.take(wide.numel(), wide.device).copy_(wide)
            if gradient.dtype is not wide.dtype:
                gradient = room.take(gradient.numel(), gradient.device).copy_(gradient)
            states = _states_of(self._rule, part)
            new = partial(room.take, device=wide.device)
            self._rule.update(_as_parameter(wide, part), _as_parameter(gradient, part), states, step, group, new)
            if part.master is not None:
                part.parameter.copy_(part.master)
            elif part.drawn:
                draw_parameter(part.parameter, wide, step, part.place)


@final
class AdafactorKernels(Arithmetic):
    """forebay's kernels, on the threads of ``team``, for vectors and matrices whose elements lie in their order; others
    by torch's ops in ``workspace``. Tensors must be in host memory."""

    def __init__(self, rule: AdafactorRule, team: Team, workspace: torch.Tensor | None) -> None:
        self._rule = rule
        self._team = team
        self._others = WholeArithmetic(rule, workspace)

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        fast = [_expect_whole(part) for part in parts if _is_in_order(part)]
        others = self._others.prepared([part for part in parts if not _is_in_order(part)])
        return partial(self._update, fast, others)

    def _update(self, parts: Sequence[Part], others: Prepared, step: int, group: Mapping[str, Any]) -> None:
        # numba takes a third of a second to import: not before there is something to update.
        from forebay.kernels.adafactor import Matrix, update_matrix, update_vector
        from forebay.kernels.native import Kept
        from forebay.optim.launching import FORMS

        numbers = adafactor_step(step, group)
        for given in parts:
            part = brought(given, partial(copied, self._team))
            states = {name: state.numpy().reshape(-1) for name, state in _states_of(self._rule, part).items()}
            rows, columns = part.shape if len(part.shape) == 2 else (1, part.parameter.numel())
            matrix = Matrix(
                rows,
                columns,
                part.gradient.data_ptr(),
                FORMS[part.gradient.dtype],
                part.parameter.data_ptr(),
                FORMS[part.parameter.dtype],
                (part.parameter if part.master is None else part.master).data_ptr(),
                Kept.DRAWN if part.drawn else Kept.WIDE,
                part.place,
            )
            if len(part.shape) == 2:
                update_matrix(self._team, matrix, states["row_var"], states["col_var"], numbers)
            else:
                update_vector(self._team, matrix, states["variance"], numbers)
        others(step, group)


def _states_of(rule: WholeRule, part: Part) -> dict[str, torch.Tensor]:
    """The states that a parameter has, in their shapes, by plain name."""
    found = {}
    for name, state in zip(rule.state_names, part.states, strict=True):
        shape = form_of(name).shape_for(part.shape)
        if shape is not None:
            found[plain_name(name)] = state.view(shape)
    return found


def _as_parameter(values: torch.Tensor, part: Part) -> torch.Tensor:
    return values.as_strided(part.shape, part.stride, values.storage_offset())


def _is_in_order(part: Part) -> bool:
    """Whether it is a vector or a matrix that lies row by row."""
    return len(part.shape) in (1, 2) and _as_parameter(part.parameter, part).is_contiguous()


def _expect_whole(part: Part) -> Part:
    """``part``. Raises ``ValueError`` for one that is not all of a parameter."""
    if part.parameter.numel() != prod(part.shape):
        raise ValueError(f"an update of whole parameters was given {part.parameter.numel()} elements of {part.shape}")
    return part
