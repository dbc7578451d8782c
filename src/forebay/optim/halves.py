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

_HALF: Final = 1 << 16
_SIGN: Final = 1 << 31


def join(
    masters: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lower: Sequence[torch.Tensor],
    ties: Sequence[torch.Tensor],
    spare: Sequence[torch.Tensor],
) -> None:
    """Makes ``masters`` (fp32) of ``parameters`` (bf16) and the ``lower`` halves (int16). ``ties`` (fp32) lose their
    signs, and ``spare`` (fp32) its values."""
    whole, beside, signs = _integers(masters), _integers(spare), _integers(ties)
    torch._foreach_copy_(whole, [parameter.view(torch.int16) for parameter in parameters])
    # -1 where there is a sign.
    torch._foreach_copy_(beside, signs)
    torch._foreach_clamp_max_(beside, 0)
    torch._foreach_clamp_min_(beside, -1)
    torch._foreach_sub_(whole, beside)
    torch._foreach_mul_(whole, _HALF)
    torch._foreach_copy_(beside, list(lower))
    torch._foreach_add_(whole, beside)
    torch._foreach_abs_(list(ties))


def halve(
    masters: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lower: Sequence[torch.Tensor],
    ties: Sequence[torch.Tensor],
    spare: Sequence[torch.Tensor],
) -> None:
    """Writes ``masters`` to ``parameters``, rounded to nearest, and the ``lower`` halves. ``ties`` are given the signs
    that these leave unsaid; ``masters`` and ``spare`` (fp32) lose their values."""
    whole, beside, signs = _integers(masters), _integers(spare), _integers(ties)
    torch._foreach_copy_(list(parameters), list(masters))
    torch._foreach_copy_(list(lower), whole)  # what does not go in is left out
    torch._foreach_copy_(beside, [parameter.view(torch.int16) for parameter in parameters])
    torch._foreach_mul_(beside, -_HALF)
    torch._foreach_add_(beside, whole)
    # What was rounded off, at most half of the last place. 1 where it is that, and was taken off: the lower half says
    # that as much was added. 2 where a master is no number, which is rounded to any other one.
    torch._foreach_sub_(beside, _HALF // 2 - 1)
    torch._foreach_clamp_min_(beside, 0)
    torch._foreach_clamp_max_(beside, 2)
    torch._foreach_copy_(whole, beside)
    torch._foreach_sub_(whole, 2)
    torch._foreach_mul_(beside, whole)  # 1 becomes -1, and 2 becomes 0
    torch._foreach_mul_(beside, _SIGN // 2)
    torch._foreach_mul_(beside, 2)
    torch._foreach_add_(signs, beside)


def joined(parameter: torch.Tensor, lower: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """The master of ``parameter``; nothing else is changed."""
    master, spare = (torch.empty_like(ties, dtype=torch.float32) for _ in range(2))
    join([master], [parameter], [lower], [ties.clone()], [spare])
    return master


def _integers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.int32) for tensor in tensors]
