"""Models and problems on paper, for the tests of layouts and planners. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forebay.budgets import Budget, DiskBudget
from forebay.layout import align
from forebay.memory import ALIGNMENT
from forebay.model import Block, Model, Parameter
from forebay.planners import Problem
from forebay.trace import Footprint

__all__ = ["ADAM", "ITEMSIZE", "block", "problem"]

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ADAM = ("exp_avg", "exp_avg_sq")


def block(name: str, *parameters: tuple[tuple[int, ...], str, bool], held: bool = False) -> Block:
    """A block of parameters given as (shape, dtype, trainable), laid out as the runtime does."""
    specs, end = [], 0
    for i, (shape, dtype, trainable) in enumerate(parameters):
        stride = tuple(math.prod(shape[j + 1 :]) for j in range(len(shape)))
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        specs.append(Parameter(f"{name}.{i}", shape, stride, dtype, nbytes, end, trainable))
        end += align(nbytes)
    return Block(name, tuple(specs), (name,), max(end, ALIGNMENT), held)


def problem(
    blocks: Sequence[Block],
    *,
    device: int,
    host: int = 1 << 60,
    disk: int = 0,
    activations: int = 0,
    buffers: int = 0,
    measured: bool = True,
    states: tuple[str, ...] = ADAM,
) -> Problem:
    """A problem over ``blocks``; sizes in bytes, ``disk`` 0 for none."""
    footprint = Footprint(activations, 0, measured=True)
    if not measured:
        footprint = replace(footprint, peak=0, measured=False, note="its routing depends on values")
    budget = Budget(device, host, disk=DiskBudget("folder", disk) if disk else None)
    return Problem(Model(tuple(blocks), buffers), footprint, budget, host, disk, states, overlap_update=True)
