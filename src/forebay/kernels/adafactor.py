"""Adafactor: Shazeer and Stern (2018), "Adafactor: adaptive learning rates with sublinear memory cost", algorithms 4
and 5, as ``torch.optim.Adafactor`` has them.

One pass cannot do it: the step is scaled by the root mean square of the whole update, which needs the factors of the
second moment of the whole matrix. So a matrix's gradient is read three times (sums, size of the update, update) and a
vector's twice; the update itself is never stored. Sums are kept in fp64 over blocks in fp32, which is where the
results differ from torch's, by the rounding of its sums. They are made for ``GROUPS`` parts of the rows, whoever makes
them: how many threads there are changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.adafactor_step import AdafactorStep
from forebay.kernels.chance_numbers import salt_of
from forebay.kernels.jit import compiled
from forebay.kernels.native import Form, Kept, load, loose_add, store, store_master
from forebay.kernels.shares import BLOCK
from forebay.kernels.stamp import STAMP
from forebay.kernels.team import Team

__all__ = ["Matrix", "update_matrix", "update_vector"]

Floats = npt.NDArray[np.float32]
_FP32: Final = int(Form.FP32)

GROUPS: Final = 32
"""Parts of the rows of a matrix that are summed up by themselves, at the most. Each takes 4 bytes a column meanwhile,
and more threads than that do nothing."""

WIDE: Final = 12 << 20
"""Columns of all parts together, at the most, if there is more than one."""


@dataclass(frozen=True)
class Matrix:
    """A dense parameter of ``rows`` times ``columns`` and its gradient, by address; a vector has one row.

    ``wide`` is the fp32 master where the parameter has 16 bits and ``kept`` says that it has one, else the address of
    the parameter itself. ``place`` is that of its first element: what chance decides hangs on it and on the step.
    """

    rows: int
    columns: int
    gradient: int
    gradient_form: Form
    parameter: int
    parameter_form: Form
    wide: int
    kept: Kept = Kept.WIDE
    place: int = 0

    @property
    def groups(self) -> int:
        """Parts of the rows that are summed up by themselves: they follow from the shape alone, and so do the bits."""
        return max(1, min(GROUPS, self.rows, WIDE // self.columns))

    @property
    def count(self) -> int:
        """Elements."""
        return self.rows * self.columns


@cache
def _sums(gradient: Form, kept: Kept) -> Callable[..., float]:
    """Squares of the gradient by row and, for each group of rows by itself, by column, and those of the parameter."""
    given, held, stamp = int(gradient), int(kept.form), STAMP

    @compiled
    def kernel(
        g_at: Any, p_at: Any, columns: Any, by_row: Any, by_column: Any, squares: Any, share: Any, shares: Any
    ) -> Any:
        rows, groups = by_row.shape[0], squares.shape[0] + stamp - stamp
        for group in range(groups * share // shares, groups * (share + 1) // shares):
            mine_at = by_column[group].ctypes.data
            for row in range(rows * group // groups, rows * (group + 1) // groups):
                whole = np.float64(0)
                for block in range(0, columns, BLOCK):
                    part, own = np.float32(0), np.float32(0)
                    for column in range(block, min(block + BLOCK, columns)):
                        at = row * columns + column
                        g, p = load(g_at, at, given, 0), load(p_at, at, held, 1)
                        part, own = loose_add(part, g * g), loose_add(own, p * p)
                        store(mine_at, column, load(mine_at, column, _FP32, 2) + g * g, _FP32, 2)
                    whole += part
                    squares[group] += own
                by_row[row] = whole
        return np.float64(0)

    return kernel


@cache
def _vector_sums(gradient: Form, kept: Kept) -> Callable[..., float]:
    """Moves the second moment of a vector on; writes the sums of its parameter's and its update's squares."""
    given, held, stamp = int(gradient), int(kept.form), STAMP

    @compiled
    def kernel(g_at: Any, p_at: Any, v_at: Any, count: Any, fresh: Any, least: Any, sums: Any) -> Any:
        squares, updates = np.float64(stamp - stamp), np.float64(0)
        for block in range(0, count, BLOCK):
            own, moved = np.float32(0), np.float32(0)
            for i in range(block, min(block + BLOCK, count)):
                g, p, v = load(g_at, i, given, 0), load(p_at, i, held, 1), load(v_at, i, _FP32, 2)
                v = v + fresh * (g * g - v)
                store(v_at, i, v, _FP32, 2)
                u = g / np.sqrt(least if v < least else v)
                own, moved = loose_add(own, p * p), loose_add(moved, u * u)
            squares += own
            updates += moved
        sums[0], sums[1] = squares, updates
        return squares

    return kernel


@cache
def _moves(parameter: Form, gradient: Form, kept: Kept, *, apply: bool) -> Callable[..., float]:
    """The update from the factors: the sum of its squares for each group of rows, or the parameter moved by it."""
    own, given, stamp = int(parameter), int(gradient), STAMP
    narrow, how, held = parameter is not Form.FP32 and kept is not Kept.DRAWN, int(kept), int(kept.form)

    @compiled
    def kernel(
        g_at: Any,
        p_at: Any,
        own_at: Any,
        columns: Any,
        by_row: Any,
        column_at: Any,
        scalars: Any,
        updates: Any,
        salt: Any,
        share: Any,
        shares: Any,
    ) -> Any:
        least, decay, pace = scalars[0], scalars[1], scalars[2]
        rows, groups = by_row.shape[0], updates.shape[0] + stamp - stamp
        for group in range(groups * share // shares, groups * (share + 1) // shares):
            for row in range(rows * group // groups, rows * (group + 1) // groups):
                factor = by_row[row]
                for block in range(0, columns, BLOCK):
                    moved = np.float32(0)
                    for column in range(block, min(block + BLOCK, columns)):
                        at = row * columns + column
                        v = factor * load(column_at, column, _FP32, 2)
                        u = load(g_at, at, given, 0) / np.sqrt(least if v < least else v)
                        if apply:
                            p = load(p_at, at, held, 1) * decay + pace * u
                            store_master(p_at, at, p, salt, how, 1)
                            if narrow:
                                store(own_at, at, p, own, 5)
                        else:
                            moved = loose_add(moved, u * u)
                    updates[group] += moved
        return np.float64(0)

    return kernel


def _apply(
    team: Team, matrix: Matrix, factors: tuple[Floats, int], scalars: Floats, salt: int, *, apply: bool
) -> float:
    kernel = _moves(matrix.parameter_form, matrix.gradient_form, matrix.kept, apply=apply)
    by_row, column_at = factors
    updates = np.zeros(matrix.groups)

    def work(share: int, shares: int) -> float:
        return kernel(
            matrix.gradient,
            matrix.wide,
            matrix.parameter,
            matrix.columns,
            by_row,
            column_at,
            scalars,
            updates,
            salt,
            share,
            shares,
        )

    team.run(work, matrix.count)
    return float(updates.sum())


def update_matrix(
    team: Team, matrix: Matrix, row_var: Floats, col_var: Floats, step: AdafactorStep, scratch: Floats | None = None
) -> None:
    """One step of a matrix, in place; ``row_var`` [rows] and ``col_var`` [columns] are its second moment's factors.
    ``scratch`` (``matrix.groups`` times the columns, or more) is where columns are summed up; None: in new memory."""
    sums = _sums(matrix.gradient_form, matrix.kept)
    by_row = np.zeros(matrix.rows, dtype=np.float64)
    squares = np.zeros(matrix.groups)
    needed = matrix.groups * matrix.columns
    by_column = (np.empty(needed, np.float32) if scratch is None else scratch[:needed]).reshape(matrix.groups, -1)
    by_column[:] = 0

    def work(share: int, shares: int) -> float:
        return sums(matrix.gradient, matrix.wide, matrix.columns, by_row, by_column, squares, share, shares)

    team.run(work, matrix.count)
    fresh = np.float32(step.fresh)
    row_var += fresh * ((by_row / matrix.columns).astype(np.float32) - row_var)
    col_var += fresh * ((by_column.sum(0, dtype=np.float64) / matrix.rows).astype(np.float32) - col_var)
    factors = (row_var / np.maximum(row_var.mean(dtype=np.float64), step.eps1)).astype(np.float32)
    _finish(team, matrix, (factors, col_var.ctypes.data), float(squares.sum()), None, step)


def update_vector(team: Team, matrix: Matrix, variance: Floats, step: AdafactorStep) -> None:
    """One step of a vector, in place; ``variance`` [columns] is its second moment."""
    sums = np.zeros(2)
    _vector_sums(matrix.gradient_form, matrix.kept)(
        matrix.gradient,
        matrix.wide,
        variance.ctypes.data,
        matrix.count,
        np.float32(step.fresh),
        np.float32(step.eps1**2),
        sums,
    )
    one = np.ones(1, dtype=np.float32)
    _finish(team, matrix, (one, variance.ctypes.data), float(sums[0]), float(sums[1]), step)


def _finish(
    team: Team,
    matrix: Matrix,
    factors: tuple[Floats, int],
    squares: float,
    updates: float | None,
    step: AdafactorStep,
) -> None:
    scalars = np.array([step.eps1**2, 1 - step.lr * step.weight_decay, 0.0], dtype=np.float32)
    salt = salt_of(step.step, matrix.place)
    if updates is None:
        updates = _apply(team, matrix, factors, scalars, salt, apply=False)
    scalars[2] = step.pace(sqrt(squares), sqrt(updates), matrix.count)
    _apply(team, matrix, factors, scalars, salt, apply=True)
