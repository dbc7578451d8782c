"""Who updates: each contender takes whole AdamW steps over parameters of its own form, in memory shared with others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.case import BenchmarkError
from benchmarks.updates.record import BASELINE, MEMORY
from benchmarks.updates.turns import Contender
from forebay.kernels.adam import COLUMNS, adam_kernel, adam_scalars
from forebay.kernels.adam_low import adam_low_kernel, codebook, state_nbytes
from forebay.kernels.lion import COLUMNS as LION
from forebay.kernels.lion import lion_kernel, lion_scalars
from forebay.kernels.native import Apart, Form, Kept
from forebay.kernels.team import Team

__all__ = ["KERNELS", "MAKERS", "Buffers"]

GROUP = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
STEP = 10
CHUNK = 1 << 22
"""Elements of the chunks in which a prepared model is updated if its plan does not say otherwise."""


@final
class Buffers:
    """The memory that contenders share: fp32 master, moments and wide gradient, bf16 parameter and gradient, codes, and
    a ``second`` copy of parameter, master and moments."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.master = torch.randn(elements, generator=torch.Generator().manual_seed(0))
        self.exp_avg, self.exp_avg_sq = torch.full((elements,), 1e-4), torch.full((elements,), 1e-8)
        self.wide = torch.full((elements,), 1e-3)
        self.parameter, self.gradient = self.master.bfloat16(), self.wide.bfloat16()
        codes, scales = state_nbytes(elements, 8)
        self.codes = [torch.full((codes,), 150, dtype=torch.uint8) for _ in range(2)]
        self.scales = [torch.full((scales // 4,), 1e-3), torch.full((scales // 4,), 1e-6)]
        self.second = [held.clone() for held in (self.parameter, self.master, self.exp_avg, self.exp_avg_sq)]
        self.halves = [torch.full((elements,), value, dtype=torch.bfloat16) for value in (1e-4, 1e-8)]


@final
class Work(Contender):
    """A step that is a function."""

    def __init__(self, name: str, bytes_per_parameter: float, work: Callable[[], object]) -> None:
        self.name = name
        self.bytes_per_parameter = bytes_per_parameter
        self._work = work

    def step(self) -> None:
        self._work()


def _fused(parameter: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    torch._fused_adamw_(
        [parameter],
        [gradient],
        [first],
        [second],
        [],
        [torch.full((), float(STEP))],
        amsgrad=False,
        maximize=False,
        **GROUP,
    )


def _memory(held: Buffers, team: Team) -> Contender:
    # Nothing is computed: 4 bytes read and 4 written of every element.
    return Work(MEMORY, 8, lambda: held.wide.mul_(1.0))


def _cast(held: Buffers, team: Team) -> Contender:
    def work() -> None:
        held.wide.copy_(held.gradient)
        _fused(held.master, held.wide, held.exp_avg, held.exp_avg_sq)
        held.parameter.copy_(held.master)

    return Work(BASELINE, 28, work)


def _cast_in_chunks(held: Buffers, team: Team) -> Contender:
    def work() -> None:
        for start in range(0, held.elements, CHUNK):
            span = slice(start, start + CHUNK)
            wide = held.wide[: min(CHUNK, held.elements - start)].copy_(held.gradient[span])
            _fused(held.master[span], wide, held.exp_avg[span], held.exp_avg_sq[span])
            held.parameter[span].copy_(held.master[span])

    return Work("torch, the same in chunks of 4M", 28, work)


def _torch_wide(held: Buffers, team: Team) -> Contender:
    return Work("torch fused, all fp32", 28, lambda: _fused(held.master, held.wide, held.exp_avg, held.exp_avg_sq))


def _torch_wide_in_chunks(held: Buffers, team: Team) -> Contender:
    def work() -> None:
        for start in range(0, held.elements, CHUNK):
            span = slice(start, start + CHUNK)
            _fused(held.master[span], held.wide[span], held.exp_avg[span], held.exp_avg_sq[span])

    return Work("torch fused, all fp32, in chunks of 4M", 28, work)


def _launch(
    kernel: Callable[..., float], rows: npt.NDArray[np.int64], numbers: tuple[Any, ...], counter: int, shares: int
) -> float:
    """A thread's part of a step: the shares that it takes (``Team.take_turns``)."""
    return kernel(rows, 0, shares, counter, *numbers)


def _kernel(
    name: str,
    nbytes: float,
    held: Buffers,
    team: Team,
    form: Form,
    states: list[torch.Tensor],
    state: Form,
    chunk: int | None = None,
    kept: Kept = Kept.WIDE,
) -> Contender:
    kernel = adam_kernel(form, form, coupled=False, amsgrad=False, state=state, kept=kept)
    scalars = adam_scalars(STEP, **GROUP, coupled=False, maximize=False)
    tensors = [held.wide, held.master] if form is Form.FP32 else [held.gradient, held.parameter]
    sizes = [t.element_size() for t in (*tensors, held.master, *states)]
    bases = [t.data_ptr() for t in (*tensors, held.master, *states)]

    size = chunk or held.elements

    def work() -> None:
        for start in range(0, held.elements, size):
            count = min(size, held.elements - start)
            row = [count, *(base + start * size for base, size in zip(bases, sizes, strict=True))]
            rows = np.array([row + [0] * (len(COLUMNS) - len(row) - 1) + [start]], dtype=np.int64)
            team.take_turns(partial(_launch, kernel, rows, (scalars, STEP)), count)

    return Work(name, nbytes, work)


def _forebay(held: Buffers, team: Team, chunk: int | None = None) -> Contender:
    name = "forebay, bf16 with fp32 master and states"
    states = [held.exp_avg, held.exp_avg_sq]
    if chunk is not None:
        name = "forebay, the same in chunks of 4M"
    return _kernel(name, 28, held, team, Form.BF16, states, Form.FP32, chunk)


def _forebay_wide(held: Buffers, team: Team, chunk: int | None = None) -> Contender:
    name = "forebay, all fp32" if chunk is None else "forebay, all fp32, in chunks of 4M"
    states = [held.exp_avg, held.exp_avg_sq]
    return _kernel(name, 28, held, team, Form.FP32, states, Form.FP32, chunk)


def _forebay_apart(held: Buffers, team: Team) -> Contender:
    both = Apart.WIDE | Apart.MOMENTS
    kernel = adam_kernel(Form.BF16, Form.BF16, coupled=False, amsgrad=False, apart=both)
    scalars = adam_scalars(STEP, **GROUP, coupled=False, maximize=False)
    first = [held.parameter, held.master, held.exp_avg, held.exp_avg_sq]
    rows = np.zeros((1, 2 * len(COLUMNS)), dtype=np.int64)
    for start, tensors in zip((0, len(COLUMNS)), (first, held.second), strict=True):
        row = [held.elements, held.gradient.data_ptr(), *(t.data_ptr() for t in tensors)]
        rows[0, start : start + len(row)] = row

    def work() -> None:
        team.take_turns(partial(_launch, kernel, rows, (scalars, STEP)), held.elements)

    return Work("forebay, the same into a second copy", 28, work)


def _forebay_half(held: Buffers, team: Team) -> Contender:
    return _kernel("forebay, bf16 states", 20, held, team, Form.BF16, held.halves, Form.BF16)


def _forebay_drawn(held: Buffers, team: Team) -> Contender:
    name = "forebay, bf16 states, no master"
    return _kernel(name, 14, held, team, Form.BF16, held.halves, Form.BF16, kept=Kept.DRAWN)


def _lion(held: Buffers, team: Team) -> Contender:
    kernel, scalars = lion_kernel(Form.BF16, Form.BF16), lion_scalars(1e-4, 0.9, 0.99, 0.01)
    tensors = [held.gradient, held.parameter, held.master, held.exp_avg]
    rows = np.array([[held.elements, *(t.data_ptr() for t in tensors), 0]], dtype=np.int64)
    if rows.shape[1] != len(LION):
        raise BenchmarkError(f"Lion's kernel reads {len(LION)} columns, this has {rows.shape[1]}")
    return Work(
        "forebay, Lion",
        20,
        lambda: team.take_turns(partial(_launch, kernel, rows, (scalars, STEP)), held.elements),
    )


def _low(held: Buffers, team: Team, bits: int, kept: Kept = Kept.WIDE) -> Contender:
    kernel = adam_low_kernel(Form.BF16, Form.BF16, bits, coupled=False, kept=kept)
    scalars, book = adam_scalars(STEP, **GROUP, coupled=False, maximize=False), codebook(bits)
    tensors = [held.gradient, held.parameter, held.master]
    for codes, scales in zip(held.codes, held.scales, strict=True):
        tensors += [codes, scales]
    rows = np.array([[held.elements, *(t.data_ptr() for t in tensors), 0]], dtype=np.int64)
    codes, scales = state_nbytes(held.elements, bits)
    drawn = kept is Kept.DRAWN
    nbytes = (6 if drawn else 12) + 4 * (codes + scales) / held.elements

    def work() -> None:
        team.take_turns(partial(_launch, kernel, rows, (scalars, book, STEP)), held.elements)

    return Work(f"forebay, {bits}-bit states{', no master' if drawn else ''}", nbytes, work)


def _deepspeed(held: Buffers, team: Team, *, wide: bool) -> Contender:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise BenchmarkError(f"DeepSpeedCPUAdam: {error}") from error
    master = held.master if wide else held.parameter
    parameter: Any = torch.nn.Parameter(master, requires_grad=True)
    parameter.grad = held.wide if wide else held.gradient
    options = {"lr": GROUP["lr"], "eps": GROUP["eps"], "weight_decay": GROUP["weight_decay"]}
    optimizer = DeepSpeedCPUAdam([parameter], **options, adamw_mode=True, fp32_optimizer_states=True)
    name = "DeepSpeedCPUAdam, all fp32" if wide else "DeepSpeedCPUAdam, bf16 with fp32 states, no master"
    return Work(name, 28 if wide else 22, optimizer.step)


KERNELS: tuple[Callable[[Buffers, Team], Contender], ...] = (
    _forebay,
    _forebay_apart,
    _forebay_wide,
    _forebay_half,
    lambda held, team: _low(held, team, 8),
    lambda held, team: _low(held, team, 4),
    _lion,
)
"""Each kernel of forebay once."""

MAKERS: tuple[Callable[[Buffers, Team], Contender], ...] = (
    _memory,
    _cast,
    _cast_in_chunks,
    _forebay,
    lambda held, team: _forebay(held, team, CHUNK),
    _forebay_apart,
    _torch_wide,
    _torch_wide_in_chunks,
    _forebay_wide,
    lambda held, team: _forebay_wide(held, team, CHUNK),
    _forebay_half,
    lambda held, team: _low(held, team, 8),
    lambda held, team: _low(held, team, 4),
    _lion,
    _forebay_drawn,
    lambda held, team: _low(held, team, 8, Kept.DRAWN),
    lambda held, team: _deepspeed(held, team, wide=True),
    lambda held, team: _deepspeed(held, team, wide=False),
)
"""Everyone, the baseline among them. A maker raises ``BenchmarkError`` where its library is not installed."""
