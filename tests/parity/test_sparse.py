"""The largest elements of a gradient: which they are, that nothing is lost, and what the other side makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forebay.cells import cell_of
from forebay.kernels.top_k import largest
from forebay.layout import Chunk, gradient_offsets, residual_offsets, state_layout
from forebay.runtime.sparse import SERIAL, gather_sent, residuals_in, send_largest
from forebay.runtime.tensors import elements
from forebay.states import Masters
from tests.null.synthetic import block

ADAM = ("exp_avg", "exp_avg_sq")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def chosen(values: torch.Tensor, count: int) -> list[int]:
    places = np.full(count, -1, np.int32)
    largest(values.numpy().view(np.uint32), places)
    found: list[int] = places.tolist()
    return found


def expected(values: torch.Tensor, count: int) -> list[int]:
    """By sorting: NaN before all, then by magnitude, the first of equals first."""
    keys = torch.where(values.isnan(), torch.tensor(INF), values.abs().double())
    order = torch.argsort(keys + 0.0, descending=True, stable=True)
    nan_first = torch.cat([order[values[order].isnan()], order[~values[order].isnan()]])
    return sorted(nan_first[:count].tolist())


@pytest.mark.parametrize("count", [1, 7, 100, 999, 1000])
@pytest.mark.parametrize("kind", ["normal", "narrow", "few", "same", "zeros", "tiny"])
def test_the_largest_magnitudes_are_found(kind: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    normal = torch.randn(1000, generator=generator)
    made = {
        "normal": normal,
        "narrow": 1 + normal * 1e-6,  # all bits but the last are the same
        "few": (normal * 2).round(),  # ties everywhere, and -0.0
        "same": torch.where(normal > 0, 0.5, -0.5),
        "zeros": torch.where(normal > 0, 0.0, -0.0),
        "tiny": normal * 1e-41,  # subnormal
    }[kind]
    assert chosen(made, count) == expected(made, count)


def test_what_is_not_a_number_is_larger_than_all() -> None:
    values = torch.tensor([1.0, NAN, -3.0, -INF, 2.0, INF, -NAN])
    assert [chosen(values, count) for count in (1, 2, 3, 4, 5)] == [
        [1],
        [1, 6],
        [1, 3, 6],
        [1, 3, 5, 6],
        [1, 2, 3, 5, 6],
    ]
    assert chosen(values, 0) == [] and chosen(values, 7) == list(range(7))


class Side:
    """A block of two parameters cut into chunks, with gradients and residuals, and a cell for each chunk."""

    def __init__(self, dtype: torch.dtype, density: float, numel: int = 3000, chunk: int = 2048) -> None:
        name = str(dtype).removeprefix("torch.")
        self.block = block("b", ((numel,), name, True), ((50, 3), name, True))
        self.layout, self.density = state_layout(self.block, ADAM, chunk, Masters.WHOLE), density
        offsets, nbytes = gradient_offsets(self.block)
        memory = torch.empty(residual_offsets(self.block)[1], dtype=torch.uint8)
        self.residuals = residuals_in(memory, self.block)
        landed = torch.zeros(nbytes, dtype=torch.uint8)
        self.gradients = {p.name: elements(landed, p, offsets[p.name]) for p in self.block.parameters}

    def step(self, made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the other side makes of gradients."""
        found = {n: torch.full_like(g, NAN) for n, g in self.gradients.items()}
        for name, gradient in made.items():
            self.gradients[name].copy_(gradient)
        given = {name: self.gradients[name] for name in made}
        for chunk in self.layout.chunks:
            cell = cell_of(chunk, self.density)
            buffer = torch.full((cell.nbytes,), 0xFF, dtype=torch.uint8)
            send_largest(chunk, cell, buffer, given, self.residuals)
            gather_sent(chunk, cell, buffer, given.keys())
            for piece, values in self._gradients_in(chunk, cell, buffer):
                if piece.parameter.name in made:
                    found[piece.parameter.name][piece.start : piece.stop] = values
        return {name: found[name] for name in made}

    def _gradients_in(self, chunk: Chunk, cell: Any, buffer: torch.Tensor) -> Any:
        for piece, offset in zip(chunk.pieces, cell.offsets, strict=True):
            start = cell.gradients + offset
            yield piece, buffer[start : start + piece.nbytes].view(self.gradients[piece.parameter.name].dtype)

    def random(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.randn(g.numel(), generator=generator).to(g.dtype) for n, g in sorted(self.gradients.items())}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sent_and_left_are_all_that_there_was(dtype: torch.dtype) -> None:
    """Element by element, and without an error: what a step sends and what it leaves add up to what was left before and
    the gradient. What is sent is the gradient's share of the largest of these, in each piece."""
    side = Side(dtype, density=0.05)
    for seed in range(4):
        made = side.random(seed)
        before = {n: r + made[n] for n, r in side.residuals.items()}
        found = side.step(made)
        for name, whole in before.items():
            sent = found[name] != 0
            assert torch.equal(found[name].float() + side.residuals[name], whole)
            assert torch.equal(found[name][sent], whole[sent].to(dtype))
            for part in (slice(0, 2048), slice(2048, 3000)) if name == "b.0" else (slice(0, 150),):
                assert whole[part][sent[part]].abs().min() >= whole[part][~sent[part]].abs().max()
        assert [int((found[f"b.{i}"] != 0).sum()) for i in (0, 1)] == [103 + 48, 8]
        assert all(torch.equal(side.gradients[n], g) for n, g in made.items()), "the landed gradient stays"


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_them_are_the_gradient_bit_for_bit(dtype: torch.dtype) -> None:
    """Zeros keep their signs, and nothing is ever left."""
    side = Side(dtype, density=1.0)
    for seed in range(3):
        made = side.random(seed)
        for gradient in made.values():
            gradient[::7], gradient[1::7] = 0.0, -0.0
        for name, found in side.step(made).items():
            assert torch.equal(found.view(torch.uint8), made[name].view(torch.uint8))
        assert all(r.eq(0).all() and r.signbit().all() for r in side.residuals.values())


def test_what_is_not_finite_is_sent_once_and_leaves_nothing() -> None:
    side = Side(torch.float16, density=0.01)
    made = {n: torch.full_like(g, 0.5) for n, g in side.gradients.items()}
    made["b.0"][[3, 5]] = torch.tensor([INF, NAN], dtype=torch.float16)
    found = side.step(made)
    assert found["b.0"][3] == INF and found["b.0"][5].isnan()
    assert all(r.isfinite().all() for r in side.residuals.values())
    # A sum that the dtype of the gradient does not hold goes as infinity, as a gradient that is added up would.
    side.residuals["b.0"][9] = 1e6
    assert side.step({n: torch.zeros_like(g) for n, g in made.items()})["b.0"][9] == INF
    assert side.residuals["b.0"].isfinite().all()


def test_what_has_no_gradient_is_left_alone() -> None:
    side = Side(torch.float32, density=0.1)
    side.step(side.random(0))
    kept = side.residuals["b.0"].clone()
    only = {"b.1": side.random(1)["b.1"]}
    assert side.step(only).keys() == only.keys() and torch.equal(side.residuals["b.0"], kept)


def test_more_than_one_piece_of_work() -> None:
    """Longer than what is done at a time, in both directions."""
    side = Side(torch.bfloat16, density=0.7, numel=3 * SERIAL + 5, chunk=4 * SERIAL)
    made = side.random(0)
    before = {n: r + made[n] for n, r in side.residuals.items()}
    found = side.step(made)
    assert all(torch.equal(found[n].float() + side.residuals[n], whole) for n, whole in before.items())
    assert int((found["b.0"] != 0).sum()) == -(-7 * (3 * SERIAL + 5) // 10)
