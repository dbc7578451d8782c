"""Masters of which the lower half is kept beside parameters in bf16: no bit is lost, and updates make the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forebay.kernels.adam import adam_kernel
from forebay.kernels.native import Form, Kept
from forebay.kernels.team import Team
from forebay.optim.arithmetic import KernelArithmetic, TorchArithmetic
from forebay.optim.halves import halve, joined
from forebay.optim.parts import Arithmetic, Held, Part
from forebay.optim.rules import AdamRule

COUNTS = (1, 7, 255, 1369, 70_013)
"""Elements: one, less than a vector, around a block, odd, and enough for two threads."""

STILL = {"lr": 0.0, "weight_decay": 0.0}


def group(**changes: Any) -> dict[str, Any]:
    usual = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
    return usual | changes


def halved(master: torch.Tensor, ties: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves; ``ties`` are given signs."""
    parameter, lower = (torch.empty(master.numel(), dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    halve([master.clone()], [parameter], [lower], [ties], [torch.empty_like(master)])
    return parameter, lower


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


def awkward() -> torch.Tensor:
    """Every number of bf16, what is half-way to the next one, their neighbours, and anything else."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) * (1 << 16)
    lower = [upper + offset for offset in (0, 1, -1, 0x7FFF, 0x8000, 0x8001)]
    anything = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([*lower, anything.to(torch.int32)]).view(torch.float32)
    return values[~values.isnan()].clone()


def test_two_halves_are_the_master_to_the_last_bit() -> None:
    master = awkward()
    ties = torch.rand(master.numel(), generator=torch.Generator().manual_seed(1))
    ties[::5] = 0.0
    said = ties.clone()
    parameter, lower = halved(master, ties)
    assert torch.equal(parameter, master.bfloat16())
    assert torch.equal(bits(joined(parameter, lower, ties)), bits(master))
    assert torch.equal(bits(ties.abs()), bits(said))
    # Half of all ties go down to the even number, among them 0 and what is next to infinity: signs are for these.
    below = (bits(master) & 0x1FFFF) == 0x8000
    assert below.sum() > 30_000
    assert torch.equal(bits(ties) < 0, below)


def test_what_is_no_number_stays_none() -> None:
    master = torch.tensor([0x7F800001, -1, 0x7FC08000, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    ties = torch.zeros(master.numel())
    parameter, lower = halved(master, ties)
    assert parameter.isnan().all()
    assert joined(parameter, lower, ties).isnan().all()


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


Make = Callable[[AdamRule, Team, int], Arithmetic]
ARITHMETICS: dict[str, Make] = {
    "kernel": lambda rule, team, count: KernelArithmetic(rule, team),
    "torch": lambda rule, team, count: TorchArithmetic(rule),
    "torch, in a workspace": lambda rule, team, count: TorchArithmetic(rule, torch.empty(8 * count, dtype=torch.uint8)),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("apart", ["nothing", "all", "the parameter", "the lower half"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ARITHMETICS)
def test_updates_make_the_bits_that_they_make_of_whole_masters(
    team: Team, how: str, gradient: torch.dtype, amsgrad: bool, apart: str
) -> None:
    """In place, and from one copy into another, of which all, or only one of the halves, is somewhere else."""
    rule = AdamRule(decoupled=True, amsgrad=amsgrad)
    for count in COUNTS:
        generator = torch.Generator().manual_seed(count)
        arithmetic = ARITHMETICS[how](rule, team, count)
        master = 3 * torch.randn(count, generator=generator)
        # Half-way between two numbers, half of them above the even one.
        master[::5] = ((bits(master[::5]) & ~0xFFFF) | 0x8000).view(torch.float32)
        states = [0.1 * torch.randn(count, generator=generator)]
        states += [torch.rand(count, generator=generator) for _ in range(2 if amsgrad else 1)]
        whole = master.bfloat16(), [state.clone() for state in states]
        parameter, lower = halved(master, states[1])
        for step, changes in ((1, STILL), (2, {}), (3, {})):
            given = (0.1 * torch.randn(count, generator=generator)).to(gradient)
            numbers = group(amsgrad=amsgrad, **changes)
            into = elsewhere(parameter, lower, states, apart)
            arithmetic.update([Part(whole[0], given, master, tuple(whole[1]))], step, numbers)
            arithmetic.update([Part(parameter, given, lower, tuple(states), 0, into)], step, numbers)
            if into is not None and into.master is not None:
                parameter, lower, states = into.parameter, into.master, list(into.states)
            assert torch.equal(parameter, whole[0])
            assert torch.equal(bits(joined(parameter, lower, states[1])), bits(master))
            for number, (mine, theirs) in enumerate(zip(states, whole[1], strict=True)):
                assert torch.equal(mine.abs() if number == 1 else mine, theirs)


def elsewhere(parameter: torch.Tensor, lower: torch.Tensor, states: list[torch.Tensor], apart: str) -> Held | None:
    if apart == "nothing":
        return None
    return Held(
        parameter if apart == "the lower half" else torch.empty_like(parameter),
        lower if apart == "the parameter" else torch.empty_like(lower),
        tuple(torch.empty_like(state) if apart == "all" else state for state in states),
    )


def test_other_forms_have_no_halves() -> None:
    for parameter, state in ((Form.FP16, Form.FP32), (Form.FP32, Form.FP32), (Form.BF16, Form.BF16)):
        with pytest.raises(ValueError, match=r"only parameters in bf16 have masters as halves|only beside moments"):
            adam_kernel(parameter, Form.BF16, coupled=False, amsgrad=False, state=state, kept=Kept.LOWER)
