"""Masters of which the lower half is kept beside parameters in bf16: put together, and taken apart again, by torch.

``forebay.states.Masters`` says why no bit is lost. All tensors are 1-D and of one length, on any device; lists run in
parallel. *Ties* are the tensors whose sign tells the one master from the other where two have the same halves: 0 or
more whenever they are read as what they are. ``kernels.native`` has the same for one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["halve", "join", "joined"]

_LEAST: Final = -(1 << 15)
"""The least int16: half of the last place of a parameter, taken off; and the sign of fp32."""


def join(
    masters: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lower: Sequence[torch.Tensor],
    ties: Sequence[torch.Tensor],
    spare: Sequence[torch.Tensor],
) -> None:
    """Makes ``masters`` (fp32) of ``parameters`` (bf16) and the ``lower`` halves (int16). ``ties`` (fp32) lose their
    signs, and ``spare`` (fp32) its values."""
    for master, parameter, half, tie, free in zip(masters, parameters, lower, ties, spare, strict=True):
        (below, above), (_, sign), count = _halves_of(master), _halves_of(tie), half.numel()
        upper, beside = (free.view(torch.int16)[at : at + count] for at in (0, count))
        # The upper half is one less where the lower one, as a number, is taken off, and one more where there is a sign.
        torch.bitwise_right_shift(half, 15, out=upper)
        upper.add_(parameter.view(torch.int16))
        torch.bitwise_right_shift(sign, 15, out=beside)
        above.copy_(upper.sub_(beside))
        below.copy_(half)
        tie.abs_()


def halve(
    masters: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lower: Sequence[torch.Tensor],
    ties: Sequence[torch.Tensor],
    spare: Sequence[torch.Tensor],
) -> None:
    """Writes ``masters`` to ``parameters``, rounded to nearest, and the ``lower`` halves. ``ties`` are given the signs
    that these leave unsaid; ``spare`` (fp32) loses its values."""
    for master, parameter, half, tie, free in zip(masters, parameters, lower, ties, spare, strict=True):
        (below, above), (_, sign), count = _halves_of(master), _halves_of(tie), half.numel()
        parameter.copy_(master)
        half.copy_(below)
        # Half of the last place is rounded to the even one. Where that is below, the lower half says that it was above.
        wrong, same = (free.view(torch.bool)[at : at + count] for at in (0, count))
        torch.eq(half, _LEAST, out=wrong)
        wrong.logical_and_(torch.eq(parameter.view(torch.int16), above, out=same))
        sign.bitwise_or_(free.view(torch.int16)[count : 2 * count].copy_(wrong).mul_(_LEAST))


def joined(parameter: torch.Tensor, lower: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """The master of ``parameter``; nothing else is changed."""
    master, spare = (torch.empty_like(ties, dtype=torch.float32) for _ in range(2))
    join([master], [parameter], [lower], [ties.clone()], [spare])
    return master


def _halves_of(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper halves of fp32 values, as they lie in memory, which begins with the lower one."""
    both = wide.view(torch.int16).view(-1, 2)
    return both[:, 0], both[:, 1]
