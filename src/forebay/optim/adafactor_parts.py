"""forebay's own Adafactor: part by part by torch's ops on any device, or by kernels on the host.

A step goes over a parameter three times: sums of its gradient's squares, the size of the update, the update. Of each
part there are the gradient, the update and the parameter in fp32 at a time (``workspaces.part_elements``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, final

import torch

from forebay.optim.coding import Take, draw_parameter
from forebay.optim.factored import AdafactorRule, adafactor_step
from forebay.optim.parts import Arithmetic, Part, Prepared, brought, copied
from forebay.optim.wholes import WholeArithmetic, as_parameter, expect_whole, states_of
from forebay.workspaces import PART

if TYPE_CHECKING:
    from forebay.kernels.adafactor_step import AdafactorStep
    from forebay.kernels.team import Team

__all__ = ["AdafactorKernels", "AdafactorParts"]


@final
class AdafactorParts(WholeArithmetic):
    """A part of a parameter at a time, by torch's ops."""

    def __init__(self, rule: AdafactorRule, workspace: torch.Tensor | None) -> None:
        super().__init__(workspace)
        self._rule = rule

    def _step(self, part: Part, step: int, group: Mapping[str, Any], take: Take) -> None:
        _InParts(part, states_of(self._rule, part), adafactor_step(step, group), take).step()


@final
class AdafactorKernels(Arithmetic):
    """forebay's kernels, on the threads of ``team``, for vectors and matrices whose elements lie in their order; others
    by torch's ops in ``workspace``. Tensors must be in host memory."""

    def __init__(self, rule: AdafactorRule, team: Team, workspace: torch.Tensor | None) -> None:
        self._rule = rule
        self._team = team
        self._others = AdafactorParts(rule, workspace)
        self._workspace = workspace

    def prepared(self, parts: Sequence[Part]) -> Prepared:
        fast = [expect_whole(part) for part in parts if _has_kernel(part)]
        others = self._others.prepared([part for part in parts if not _has_kernel(part)])
        return partial(self._update, fast, others)

    def _update(self, parts: Sequence[Part], others: Prepared, step: int, group: Mapping[str, Any]) -> None:
        # numba takes a third of a second to import: not before there is something to update.
        from forebay.kernels.adafactor import Matrix, update_matrix, update_vector
        from forebay.kernels.native import Kept
        from forebay.optim.launching import FORMS

        numbers = adafactor_step(step, group)
        # Not kept: who gives the workspace's memory back empties the tensor, and a view would hold it.
        scratch = None if self._workspace is None else self._workspace.view(torch.float32).numpy()
        for given in parts:
            part = brought(given, partial(copied, self._team))
            states = {name: state.numpy().reshape(-1) for name, state in states_of(self._rule, part).items()}
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
                update_matrix(self._team, matrix, states["row_var"], states["col_var"], numbers, scratch)
            else:
                update_vector(self._team, matrix, states["variance"], numbers)
        others(step, group)


def _has_kernel(part: Part) -> bool:
    return len(part.shape) in (1, 2) and as_parameter(part.parameter, part).is_contiguous()


@dataclass(frozen=True)
class _Block:
    """Elements ``start`` to ``stop`` of a parameter, of ``shape``: of so many matrices (``matrices``) these ``rows``.
    ``stride`` is None where they lie in their order."""

    start: int
    stop: int
    shape: tuple[int, ...]
    matrices: slice
    rows: slice
    stride: tuple[int, ...] | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """These elements of all ``values`` (1-D), in their shape."""
        return self.shaped(values[self.start : self.stop])

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` (1-D, so many as it has elements) in their shape."""
        if self.stride is None:
            return values.view(self.shape)
        return values.as_strided(self.shape, self.stride, values.storage_offset())


def _cut(part: Part) -> Iterator[_Block]:
    """The blocks of a parameter: several matrices, or rows of one; all of it where it does not lie in its order."""
    count = part.parameter.numel()
    if not as_parameter(part.parameter, part).is_contiguous():
        yield _Block(0, count, part.shape, slice(None), slice(None), part.stride)
        return
    if len(part.shape) < 2:
        for start in range(0, count, PART):
            stop = min(start + PART, count)
            yield _Block(start, stop, (stop - start,), slice(None), slice(None))
        return
    rows, columns = part.shape[-2:]
    matrices = prod(part.shape[:-2])
    together, most = max(1, PART // (rows * columns)), max(1, PART // columns)
    for first in range(0, matrices, together):
        last = min(first + together, matrices)
        for top in range(0, rows, most):
            bottom = min(top + most, rows)
            start = (first * rows + top) * columns
            shape = (last - first, bottom - top, columns)
            yield _Block(start, start + prod(shape), shape, slice(first, last), slice(top, bottom))


@final
class _InParts:
    """One step of one parameter with its ``states``, in place."""

    def __init__(self, part: Part, states: Mapping[str, torch.Tensor], numbers: AdafactorStep, take: Take) -> None:
        self._part = part
        self._numbers = numbers
        self._wide = part.parameter if part.master is None else part.master
        self._blocks = tuple(_cut(part))
        most = max(block.stop - block.start for block in self._blocks)
        # For the gradient and the update; once that has been taken over, to draw in.
        self._spare = take(2 * most)
        self._scratch = [self._spare[:most], self._spare[most:], *([take(most)] if part.drawn else [])]
        self._variance = states.get("variance")
        if self._variance is None:
            row, column = states["row_var"], states["col_var"]
            flat = self._blocks[0].stride is None
            self._row = row.view(-1, *row.shape[-2:]) if flat else row
            self._column = column.view(-1, *column.shape[-2:]) if flat else column
            # Of each matrix one mean, for all of a step, and behind them what is summed up of a block.
            matrices = prod(self._row.shape[:-2])
            sums = take(row.numel() + column.numel())
            self._mean, self._sums = sums[:matrices].view(*self._row.shape[:-2], 1, 1), sums[matrices:]

    def step(self) -> None:
        """Updates states and parameter."""
        numbers, part = self._numbers, self._part
        count = part.parameter.numel()
        norm, squares = self._moved_on(), []
        for block in self._blocks:
            made = self._update(block)
            squares.append(self._square(made))
        pace = numbers.pace(norm, sqrt(sum(squares)), count)
        for block in self._blocks:
            if len(self._blocks) > 1:  # else it is still there
                made = self._update(block)
            value = self._value(block)
            value.mul_(1 - numbers.lr * numbers.weight_decay).add_(made, alpha=pace)
            own = part.parameter[block.start : block.stop]
            if part.drawn:
                place, value = part.place + block.start, self._scratch[2][: block.stop - block.start]
                draw_parameter(own, value, numbers.step, place, self._spare)
            elif part.master is not None:
                own.copy_(part.master[block.start : block.stop])

    def _moved_on(self) -> float:
        """Moves the second moment on; returns the norm of the parameter."""
        fresh, squares = self._numbers.fresh, []
        if self._variance is None:
            self._column.mul_(1 - fresh)
        for block in self._blocks:
            squares.append(self._square(self._value(block)))
            gradient = self._gradient(block)
            square = torch.mul(gradient, gradient, out=block.shaped(self._scratch[1][: block.stop - block.start]))
            if self._variance is not None:
                block.of(self._variance.view(-1)).lerp_(square, fresh)
                continue
            rows = self._part.shape[-2]
            row, column = self._row[self._place(block)], self._column[block.matrices]
            row.lerp_(torch.mean(square, -1, keepdim=True, out=self._like(row)), fresh)
            column.add_(torch.sum(square, -2, keepdim=True, out=self._like(column)), alpha=fresh / rows)
        if self._variance is None:
            torch.mean(self._row, -2, keepdim=True, out=self._mean).clamp_(min=self._numbers.eps1)
        return sqrt(sum(squares))

    def _update(self, block: _Block) -> torch.Tensor:
        """The gradient over the root of the second moment."""
        gradient = self._gradient(block)
        made = block.shaped(self._scratch[1][: block.stop - block.start])
        if self._variance is not None:
            made.copy_(block.of(self._variance.view(-1)))
        else:
            row = self._row[self._place(block)]
            factor = torch.div(row, self._mean[block.matrices], out=self._like(row))
            torch.mul(factor, self._column[block.matrices], out=made)
        return torch.div(gradient, made.clamp_(min=self._numbers.eps1**2).sqrt_(), out=made)

    def _place(self, block: _Block) -> tuple[slice, ...] | slice:
        return (block.matrices, block.rows) if block.stride is None else block.matrices

    def _gradient(self, block: _Block) -> torch.Tensor:
        own = self._part.gradient[block.start : block.stop]
        return block.shaped(self._scratch[0][: block.stop - block.start].copy_(own))

    def _value(self, block: _Block) -> torch.Tensor:
        own = self._wide[block.start : block.stop]
        return block.shaped(self._scratch[2][: own.numel()].copy_(own) if self._part.drawn else own)

    def _like(self, sums: torch.Tensor) -> torch.Tensor:
        """Where something of the shape of ``sums`` is made for a moment."""
        return self._sums[: sums.numel()].view(sums.shape)

    @staticmethod
    def _square(values: torch.Tensor) -> float:
        """The sum of squares."""
        return float(torch.linalg.vector_norm(values).double().square())
