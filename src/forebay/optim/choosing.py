"""Who computes an update: forebay's kernels on the host, torch's ops on any other device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from forebay.errors import OptimizerError
from forebay.optim.adafactor_parts import AdafactorKernels, AdafactorParts
from forebay.optim.arithmetic import KernelArithmetic, TorchArithmetic
from forebay.optim.factored import AdafactorRule
from forebay.optim.rules import AdamRule, ElementRule, LionRule, SgdRule, UpdateRule, WholeRule
from forebay.optim.wholes import AtOnceArithmetic

if TYPE_CHECKING:
    import torch

    from forebay.kernels.team import Team
    from forebay.optim.parts import Arithmetic

__all__ = ["host_arithmetic", "torch_arithmetic"]


def host_arithmetic(rule: UpdateRule, team: Team, workspace: torch.Tensor | None) -> Arithmetic:
    """Who updates what is in host memory: the kernels, or torch where numba is not installed.

    That goes for parameters, gradients and states all in fp32 too, where torch's fused op gives the same bits and reads
    and writes no more. With everything in the cache the kernel is faster (0.44 for 0.56 ns an element on one core), and
    torch's op comes with threads of its own for each thread that calls it, which wait for each other spinning: beside
    other work, in chunks of 4M elements, it took three times as long (docs/log.md).
    """
    if find_spec("numba") is not None:
        if isinstance(rule, AdamRule | LionRule | SgdRule):
            return KernelArithmetic(rule, team)
        if isinstance(rule, AdafactorRule):
            return AdafactorKernels(rule, team, workspace)
    return torch_arithmetic(rule, workspace)


def torch_arithmetic(rule: UpdateRule, workspace: torch.Tensor | None = None) -> Arithmetic:
    """torch's ops, on any device, in ``workspace`` or in new memory."""
    if isinstance(rule, ElementRule):
        return TorchArithmetic(rule, workspace)
    if isinstance(rule, AdafactorRule):
        return AdafactorParts(rule, workspace)
    if isinstance(rule, WholeRule):
        return AtOnceArithmetic(rule, workspace)
    raise OptimizerError(f"{type(rule).__name__} updates neither elements nor parameters")
