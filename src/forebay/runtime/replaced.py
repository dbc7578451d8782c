"""Parameters whose ``data`` was replaced or written between passes: ``param.data = ...``, ``vector_to_parameters``,
``half()``.

In plain PyTorch training goes on with what was put there. Here ``data`` is a view of the home, or a stand-in for it;
what is in its place would never be updated, or never be read. So before each pass and each step every parameter is
compared with where it is to point; values that fit its home are taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from forebay.errors import ModelError
from forebay.model import Parameter
from forebay.runtime.access import BlockAccess
from forebay.runtime.contents import Contents
from forebay.runtime.standins import StandIns
from forebay.runtime.tensors import dtype_of

__all__ = ["Replaced"]


@final
class Replaced:
    """What ``data`` of each parameter is between passes: ``stand_ins``, by name, and the home itself of all others."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        contents: Contents,
        access: BlockAccess,
        stand_ins: StandIns,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._contents = contents
        self._access = access
        self._stand_ins = stand_ins
        self._device = device
        self._addresses = {name: self._own(name).data_ptr() for name in parameters}
        self._compares = True

    def _own(self, name: str) -> torch.Tensor:
        made = self._stand_ins.get(name)
        return self._contents.value(name) if made is None else made

    @torch.no_grad()
    def take_over(self) -> None:
        """Writes the values of replaced parameters to their homes, and points the parameters there again. Raises
        ``ModelError`` naming the first whose shape, dtype or device is another, after all others were taken over, or
        the first whose stand-in was written to."""
        found = [name for name, address in self._addresses.items() if self._parameters[name].data_ptr() != address]
        # What an interrupted pass has left open shows its slot still.
        found = [name for name in found if self._access.slot_at(self._parameters[name]) is None]
        fitting = [name for name in found if self._fits(name)]
        if fitting:
            self._contents.write({name: self._parameters[name].data for name in fitting})
        for name in fitting:
            self._parameters[name].data = self._own(name)
        for name in found:
            if name not in fitting:
                raise _of_another_kind(self._contents.spec_of[name], self._parameters[name], self._device)
        if self._compares:
            # A GPU has to be waited for: there only once, for what was written between prepare and the first pass.
            self._compares = self._device.type == "cpu"
            self._stand_ins.expect_unwritten()

    def _fits(self, name: str) -> bool:
        spec, parameter = self._contents.spec_of[name], self._parameters[name]
        same = parameter.dtype is dtype_of(spec) and parameter.device == self._device
        return same and tuple(parameter.shape) == spec.shape


def _of_another_kind(spec: Parameter, now: nn.Parameter, device: torch.device) -> ModelError:
    return ModelError(
        f"the data of parameter {spec.name} was replaced (param.data = ..., or model.to(...)) by {now.dtype} of shape "
        f"{tuple(now.shape)} on {now.device}, and the plan has it as torch.{spec.dtype} of shape {spec.shape} on "
        f"{device}; keep to that, or forebay.close() the model, change it, and prepare it anew"
    )
