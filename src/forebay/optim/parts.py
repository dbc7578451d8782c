"""What an update is given: some elements of parameters, their gradients and states, in place or from copy to copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from forebay.kernels.team import Team

__all__ = ["HALF", "Arithmetic", "Held", "Part", "Prepared", "Room", "brought", "copied", "master_of", "place_of"]

HALF: Final = torch.int16
"""Of the lower half of a master."""

_WIDE: Final = torch.float32

_GOLDEN: Final = 0x9E3779B1


@dataclass(frozen=True)
class Held:
    """One copy of some elements of a parameter: what an update reads, or what it writes; see ``Part``."""

    parameter: torch.Tensor
    master: torch.Tensor | None
    states: tuple[torch.Tensor, ...]

    @property
    def halves(self) -> bool:
        """Whether half of the master is kept, and the parameter is the other half."""
        return self.master is not None and self.master.dtype is HALF


@dataclass(frozen=True)
class Part:
    """Some elements of one parameter: 1-D dense tensors of one length.

    ``parameter`` is fp32, or in 16 bits with its fp32 ``master`` beside it, or in bf16 with the lower half of one
    (int16; ``forebay.states.Masters``), or in bf16 without: then it is rounded up or down by chance. ``gradient`` may
    have another dtype.
    ``states`` lie as the rule's ``state_names`` say, in their order; one that is not fp32 has the values of elements
    from the first of a block on (``forebay.states``). ``place`` is that of the first element (``place_of``).

    ``shape`` and ``stride`` are those of the parameter where the part is all of it and an update asks for them, which
    is where states are factored.

    ``into``: the copy that is written, all of it, and the other one stands; None: in place. Each of its tensors is that
    of the part or shares no byte with it; either all states are apart or none is.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor | None
    states: tuple[torch.Tensor, ...]
    place: int = 0
    into: Held | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether the parameter is rounded by chance."""
        return self.written.master is None and self.parameter.dtype is torch.bfloat16

    @property
    def written(self) -> Held:
        """The copy that is written."""
        return Held(self.parameter, self.master, self.states) if self.into is None else self.into


def place_of(numel: int, start: int) -> int:
    """What rounding by chance at element ``start`` of a parameter of ``numel`` elements hangs on, beside the step.

    The same wherever the states are and however they are cut. Parameters of other sizes draw other numbers.
    """
    return (numel * _GOLDEN + start) & 0xFFFFFFFF


def copied(team: Team, target: torch.Tensor, source: torch.Tensor) -> None:
    """``target = source`` (1-D, dense, host, of one dtype), copied by ``team``; nothing for one and the same."""
    if target.data_ptr() == source.data_ptr():
        return
    there, here = (tensor.view(torch.uint8).numpy() for tensor in (target, source))

    def copy(share: int, shares: int) -> float:
        start, stop = (there.size * at // shares for at in (share, share + 1))
        # numpy and not copy_: torch would start a team of its own for this lane.
        np.copyto(there[start:stop], here[start:stop])
        return 0.0

    team.run(copy, there.size // _WIDE.itemsize)


class Arithmetic(ABC):
    """One optimizer's update of parts, in place or into another copy."""

    @abstractmethod
    def prepared(self, parts: Sequence[Part]) -> Prepared:
        """What updates ``parts``, each time it is called. Raises ``ValueError`` where they do not lie as an update
        needs them."""

    @final
    def update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        """Updates parameters, masters and states. ``step`` counts from 1; ``group`` are the hyperparameters."""
        self.prepared(parts)(step, group)


Prepared = Callable[[int, Mapping[str, Any]], None]
"""An update of certain parts: called with the step, counted from 1, and the hyperparameters."""


@final
class Room:
    """Where fp32 is made: one part of ``workspace`` (1-D uint8) after the other, or new memory where there is none."""

    def __init__(self, workspace: torch.Tensor | None) -> None:
        self._workspace = None if workspace is None else workspace.view(_WIDE)
        self._taken = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """For as many values as ``tensor`` (1-D) has, where it is."""
        return self.take(tensor.numel(), tensor.device)

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """For ``count`` values; new memory is on ``device``. Raises ``ForebayError`` for more than there is."""
        if self._workspace is None:
            return torch.empty(count, dtype=_WIDE, device=device)
        start, self._taken = self._taken, self._taken + count
        if self._taken > self._workspace.numel():
            there = self._workspace.nbytes
            raise ForebayError(f"an update takes more than the {there} bytes of workspace that were planned for it")
        return self._workspace[start : self._taken]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def brought(part: Part, copy: Callable[[torch.Tensor, torch.Tensor], None] = _copy) -> Part:
    """``part`` for an update in place, where it is to be written; ``copy`` writes the second of two to the first."""
    into = part.into
    if into is None:
        return part
    # A parameter with a whole master is written and not read.
    pairs = [*zip(into.states, part.states, strict=True)]
    if into.master is None or into.halves:
        pairs.append((into.parameter, part.parameter))
    if into.master is not None:
        pairs.append((into.master, master_of(part)))
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr():
            copy(target, source)
    return replace(part, parameter=into.parameter, master=into.master, states=into.states, into=None)


def master_of(part: Part) -> torch.Tensor:
    """What the master is read from. Raises ``ValueError`` where there is none."""
    if part.master is None:
        raise ValueError("an update into a copy with a master was given none to start from")
    return part.master
