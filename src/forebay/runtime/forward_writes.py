"""What a forward writes to a parameter that streams is lost, for it is in a slot, and goes when the slot does.

A write may change nothing: layers that clamp a weight in each forward mostly find it within its bounds. So parameters
that a plan knows to be written to (``Plan.written``; they are small) are copied when their block is exposed, and
compared when its forward is over. Of others torch's count of changes says that there was one, and that ``data`` is
another tensor; of ``weight.data.clamp_()`` it says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from forebay.errors import ModelError
from forebay.model import Block
from forebay.runtime.access import BlockAccess

__all__ = ["ForwardWrites", "lost"]


@final
class ForwardWrites:
    """Those to the ``parameters`` of one model; ``written`` are the ones that a plan knows of."""

    def __init__(self, access: BlockAccess, parameters: Mapping[str, nn.Parameter], written: Collection[str]) -> None:
        self._access = access
        self._parameters = parameters
        self._written = frozenset(written)
        self._versions: dict[str, int] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._stale: set[str] = set()

    def expose(self, block: Block) -> None:
        """Exposes ``block``, whose forward begins."""
        if block.name in self._stale:
            self._access.renew(block.name)
            self._stale.discard(block.name)
        self._access.expose(block, self._parameters)
        for spec in block.parameters:
            parameter = self._parameters[spec.name]
            self._versions[spec.name] = parameter._version
            if spec.name in self._written:
                with _disable_current_modes():  # gone with the forward: no plan knows of it
                    self._before[spec.name] = parameter.detach().clone()

    def changed(self, block: Block) -> list[str]:
        """The names of the parameters of ``block``, which is exposed since, that are something else by now."""
        found = [spec.name for spec in block.parameters if self._is_changed(spec.name)]
        if found:
            self._stale.add(block.name)  # or the next forward would compute with the change
        return found

    def _is_changed(self, name: str) -> bool:
        parameter, before = self._parameters[name], self._before.pop(name, None)
        if before is None:
            return parameter._version != self._versions[name] or self._access.slot_at(parameter) is None
        with _disable_current_modes():
            return not torch.equal(_bits(before), _bits(parameter))


def lost(name: str) -> ModelError:
    """The error for a change to the parameter ``name``."""
    return ModelError(
        f"the forward changes parameter {name}, which is on the device for it alone: the change would be lost. Keep "
        f"its block there (policy='resident', or more device_memory), or make the change between steps, with "
        f"model.load_state_dict({{{name!r}: values}}, strict=False)"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
