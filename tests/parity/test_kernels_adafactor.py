"""Adafactor's kernels beside ``torch.optim.Adafactor``, up to the rounding of sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forebay.kernels.adafactor import Matrix, update_matrix, update_vector
from forebay.kernels.adafactor_step import AdafactorStep
from forebay.kernels.native import Form
from forebay.kernels.team import Team
from tests.parity.kernel_rig import DTYPES, Memory, memory

NUMBERS = {"lr": 1e-2, "beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.1}
EPS1, EPS2 = torch.finfo(torch.float32).eps, 1e-3

SUMS = 1e-5
"""How far an update may be from torch's, relative to itself: torch sums thousands of squares in fp32."""


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def matrix(held: Memory, rows: int, columns: int, parameter: Form, gradient: Form) -> Matrix:
    return Matrix(
        rows,
        columns,
        held.gradient.data_ptr(),
        gradient,
        held.parameter.data_ptr(),
        parameter,
        held.master.data_ptr(),
    )


@pytest.mark.parametrize("forms", [(Form.FP32, Form.FP32), (Form.BF16, Form.BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (37, 1), (1, 300), (37, 41), (300, 257), (13,), (1369,)])
def test_a_step_is_torchs(shape: tuple[int, ...], forms: tuple[Form, Form], team: Team) -> None:
    rows, columns = (1, *shape)[-2:]
    held = memory(rows * columns, *forms, states=0)
    plain = torch.nn.Parameter(held.master.clone().view(shape))
    optimizer = torch.optim.Adafactor([plain], eps=(EPS1, EPS2), **NUMBERS)
    row_var, col_var = torch.zeros(rows), torch.zeros(columns)
    for step in (1, 2, 3):
        held.gradient.mul_(1.5)
        plain.grad = held.gradient.float().view(shape)
        with torch.no_grad():
            plain.copy_(held.master.view(shape))
        before = held.master.clone()
        optimizer.step()
        numbers = AdafactorStep(step, eps1=EPS1, eps2=EPS2, **NUMBERS)
        made = matrix(held, rows, columns, *forms)
        if len(shape) == 1:
            update_vector(team, made, col_var.numpy(), numbers)
            torch.testing.assert_close(col_var, optimizer.state[plain]["variance"], rtol=SUMS, atol=0)
        else:
            update_matrix(team, made, row_var.numpy(), col_var.numpy(), numbers)
            for ours, name in ((row_var, "row_var"), (col_var, "col_var")):
                torch.testing.assert_close(ours, optimizer.state[plain][name].flatten(), rtol=SUMS, atol=0)
        wanted = plain.detach().flatten()
        moved = (wanted - before).abs()
        assert moved.max() > 0
        bound = SUMS * moved + 2 * torch.finfo(torch.float32).eps * torch.maximum(before.abs(), wanted.abs())
        assert ((held.master - wanted).abs() <= bound).all()
        assert torch.equal(held.parameter, held.master.to(DTYPES[forms[0]]))


def test_threads_share_a_matrix(team: Team) -> None:
    """Beyond what one thread does alone: the same up to the order of the sums."""
    shape = (301, 257)
    alone = memory(shape[0] * shape[1], Form.FP32, Form.FP32, states=0)
    shared = alone.copy()
    numbers = AdafactorStep(1, eps1=EPS1, eps2=EPS2, **NUMBERS)
    for held, threads in ((alone, Team(1)), (shared, team)):
        row_var, col_var = torch.zeros(shape[0]), torch.zeros(shape[1])
        update_matrix(threads, matrix(held, *shape, Form.FP32, Form.FP32), row_var.numpy(), col_var.numpy(), numbers)
    torch.testing.assert_close(shared.master, alone.master, rtol=1e-6, atol=1e-7)
