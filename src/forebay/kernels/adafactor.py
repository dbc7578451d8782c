"""Adafactor: Shazeer and Stern (2018), "Adafactor: adaptive learning rates with sublinear memory cost", algorithms 4
and 5, as ``torch.optim.Adafactor`` has them.

One pass cannot do it: the step is scaled by the root mean square of the whole update, which needs the factors of the
second moment of the whole matrix. So a matrix's gradient is read three times (sums, size of the update, update) and a
vector's twice; the update itself is never stored. Sums are kept in fp64 over blocks in fp32, which is where the
results differ from torch's, by the rounding of its sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kernels.jit import compiled
from forebay.kernels.native import Form, load, loose_add, store
from forebay.kernels.shares import BLOCK
from forebay.kernels.stamp import STAMP
from forebay.kernels.team import Team

__all__ = ["AdafactorStep", "Matrix", "update_matrix", "update_vector"]

Floats = npt.NDArray[np.float32]
_FP32: Final = int(Form.FP32)


@dataclass(frozen=True)
class AdafactorStep:
    """The hyperparameters of a step, counted from 1, in the names of ``torch.optim.Adafactor``."""

    step: int
    lr: float
    beta2_decay: float
    eps1: float
    eps2: float
    d: float
    weight_decay: float

    @property
    def fresh(self) -> float:
        """The share of the new squares in the second moment."""
        return float(self.step**self.beta2_decay)

    def pace(self, squares: float, updates: float, count: int) -> float:
        """What the update is multiplied by: ``squares`` of the parameter, ``updates`` squared, both summed up."""
        scale = max(self.eps2, math.sqrt(squares / count)) * min(self.lr, 1 / math.sqrt(self.step))
        return -scale / max(1.0, math.sqrt(updates / count) / self.d)


@dataclass(frozen=True)
class Matrix:
    """A dense parameter of ``rows`` times ``columns`` and its gradient, by address; a vector has one row.

    ``wide`` is the fp32 master where the parameter has 16 bits, else the address of the parameter itself.
    """

    rows: int
    columns: int
    gradient: int
    gradient_form: Form
    parameter: int
    parameter_form: Form
    wide: int

    @property
    def count(self) -> int:
        """Elements."""
        return self.rows * self.columns


@cache
def _sums(gradient: Form) -> Callable[..., float]:
    """Squares of the gradient by row and, for each share by itself, by column; returns those of the parameter."""
    given, stamp = int(gradient), STAMP

    @compiled
    def kernel(g_at: Any, p_at: Any, columns: Any, by_row: Any, by_column: Any, share: Any, shares: Any) -> Any:
        squares = np.float64(stamp - stamp)
        rows = by_row.shape[0]
        mine_at = by_column[share].ctypes.data
        for row in range(rows * share // shares, rows * (share + 1) // shares):
            whole = np.float64(0)
            for block in range(0, columns, BLOCK):
                part, own = np.float32(0), np.float32(0)
                for column in range(block, min(block + BLOCK, columns)):
                    g, p = load(g_at, row * columns + column, given, 0), load(p_at, row * columns + column, _FP32, 1)
                    part, own = loose_add(part, g * g), loose_add(own, p * p)
                    store(mine_at, column, load(mine_at, column, _FP32, 2) + g * g, _FP32, 2)
                whole += part
                squares += own
            by_row[row] = whole
        return squares

    return kernel


@cache
def _vector_sums(gradient: Form) -> Callable[..., float]:
    """Moves the second moment of a vector on; writes the sums of its parameter's and its update's squares."""
    given, stamp = int(gradient), STAMP

    @compiled
    def kernel(g_at: Any, p_at: Any, v_at: Any, count: Any, fresh: Any, least: Any, sums: Any) -> Any:
        squares, updates = np.float64(stamp - stamp), np.float64(0)
        for block in range(0, count, BLOCK):
            own, moved = np.float32(0), np.float32(0)
            for i in range(block, min(block + BLOCK, count)):
                g, p, v = load(g_at, i, given, 0), load(p_at, i, _FP32, 1), load(v_at, i, _FP32, 2)
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
def _moves(parameter: Form, gradient: Form, *, apply: bool) -> Callable[..., float]:
    """The update from the factors: the sum of its squares, or the parameter moved by it."""
    own, given, stamp = int(parameter), int(gradient), STAMP
    narrow = parameter is not Form.FP32

    @compiled
    def kernel(
        g_at: Any,
        p_at: Any,
        own_at: Any,
        columns: Any,
        by_row: Any,
        column_at: Any,
        scalars: Any,
        share: Any,
        shares: Any,
    ) -> Any:
        least, decay, pace = scalars[0], scalars[1], scalars[2]
        updates = np.float64(stamp - stamp)
        rows = by_row.shape[0]
        for row in range(rows * share // shares, rows * (share + 1) // shares):
            factor = by_row[row]
            for block in range(0, columns, BLOCK):
                moved = np.float32(0)
                for column in range(block, min(block + BLOCK, columns)):
                    at = row * columns + column
                    v = factor * load(column_at, column, _FP32, 2)
                    u = load(g_at, at, given, 0) / np.sqrt(least if v < least else v)
                    if apply:
                        p = load(p_at, at, _FP32, 1) * decay + pace * u
                        store(p_at, at, p, _FP32, 1)
                        if narrow:
                            store(own_at, at, p, own, 5)
                    else:
                        moved = loose_add(moved, u * u)
                updates += moved
        return updates

    return kernel


def _apply(team: Team, matrix: Matrix, factors: tuple[Floats, int], scalars: Floats, *, apply: bool) -> float:
    kernel = _moves(matrix.parameter_form, matrix.gradient_form, apply=apply)
    by_row, column_at = factors

    def work(share: int, shares: int) -> float:
        return kernel(
            matrix.gradient,
            matrix.wide,
            matrix.parameter,
            matrix.columns,
            by_row,
            column_at,
            scalars,
            share,
            shares,
        )

    return team.run(work, matrix.count)


def update_matrix(team: Team, matrix: Matrix, row_var: Floats, col_var: Floats, step: AdafactorStep) -> None:
    """One step of a matrix, in place; ``row_var`` [rows] and ``col_var`` [columns] are its second moment's factors."""
    sums = _sums(matrix.gradient_form)
    by_row = np.zeros(matrix.rows, dtype=np.float64)
    by_column = np.zeros((team.size, matrix.columns), dtype=np.float32)
    squares = team.run(
        lambda share, shares: sums(matrix.gradient, matrix.wide, matrix.columns, by_row, by_column, share, shares),
        matrix.count,
    )
    fresh = np.float32(step.fresh)
    row_var += fresh * ((by_row / matrix.columns).astype(np.float32) - row_var)
    col_var += fresh * ((by_column.sum(0, dtype=np.float64) / matrix.rows).astype(np.float32) - col_var)
    factors = (row_var / np.maximum(row_var.mean(dtype=np.float64), step.eps1)).astype(np.float32)
    _finish(team, matrix, (factors, col_var.ctypes.data), squares, None, step)


def update_vector(team: Team, matrix: Matrix, variance: Floats, step: AdafactorStep) -> None:
    """One step of a vector, in place; ``variance`` [columns] is its second moment."""
    sums = np.zeros(2)
    _vector_sums(matrix.gradient_form)(
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
    if updates is None:
        updates = _apply(team, matrix, factors, scalars, apply=False)
    scalars[2] = step.pace(squares, updates, matrix.count)
    _apply(team, matrix, factors, scalars, apply=True)
