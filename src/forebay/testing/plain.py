"""The plain side: a model as PyTorch trains it, with nothing of forebay in forward, backward or update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from forebay.device import open_device
from forebay.device.base import Device
from forebay.layout import MASTER, RESIDUAL
from forebay.optim.lean import LeanOptimizer, needs_copy

__all__ = ["PlainOptimizer", "beside_plain", "place_of", "with_memory"]

WIDE = torch.float32


@contextmanager
def beside_plain(asked: str | torch.device | Device | None) -> Iterator[str | torch.device | Device | None]:
    """The device to prepare a model on that a plain one is trained beside: ``asked``, or the card that it names without
    a limit. A limit there is one of the process, and the plain model is in it, too; the plan keeps its budget anyway.
    """
    if isinstance(asked, Device) or place_of(asked).type != "cuda":
        yield asked
        return
    device = open_device(asked)
    try:
        yield device
    finally:
        device.close()


def place_of(asked: str | torch.device | Device | None) -> torch.device:
    """Where ``forebay.prepare`` trains that is asked for this device."""
    if isinstance(asked, Device):
        return torch.device(asked.name)
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


@final
class PlainOptimizer:
    """An optimizer over a plain model, as forebay promises its update.

    ``torch.optim`` has several implementations that round differently: forebay's is that of the fused kernels, so these
    are used. Parameters of 16 bits are updated by way of an fp32 copy, which ``torch.optim`` does not keep by itself.
    Others have one implementation. An optimizer of ``forebay.optim`` does both, and steps as it is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._given = optimizer
        self._masters: dict[nn.Parameter, torch.Tensor] = {}
        self._stepped = optimizer if isinstance(optimizer, LeanOptimizer) else self._over_masters(optimizer)

    def step(self) -> None:
        """One step for the parameters that have a gradient."""
        for parameter, master in self._masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.to(WIDE)
        self._stepped.step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                if master.grad is not None:
                    parameter.copy_(master)
                    master.grad = None

    def zero_grad(self) -> None:
        """No parameter has a gradient any more."""
        self._given.zero_grad(set_to_none=True)

    def value(self, parameter: nn.Parameter) -> torch.Tensor:
        """``parameter`` in full precision: its fp32 copy where there is one."""
        master = self._masters.get(parameter, self.states(parameter).get(MASTER))
        if master is not None:
            return master.detach()
        # An optimizer of forebay's makes the copy in its first step: until then the parameter is all there is.
        stepped = self._stepped
        wide = (
            isinstance(stepped, LeanOptimizer)
            and parameter.requires_grad
            and needs_copy(parameter, masters=stepped.rule.keeping.masters)
        )
        return parameter.detach().to(WIDE) if wide else parameter.detach()

    def states(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """The states of ``parameter`` by torch's names; none before its first step."""
        held: Mapping[str, Any] = self._stepped.state.get(self._masters.get(parameter, parameter), {})
        return held

    @torch.no_grad()
    def take_over(self, parameter: nn.Parameter, value: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Sets ``parameter`` to ``value`` (its shape; fp32 where it has 16 bits), and its states, by torch's names."""
        parameter.copy_(value)
        stood = self._masters.get(parameter)
        if stood is not None:
            stood.copy_(value)
        held = {
            name: state.to(parameter.device, copy=True)
            for name, state in states.items()
            if name not in (MASTER, RESIDUAL)
        }
        if isinstance(self._stepped, LeanOptimizer):
            if not states and value.dtype is parameter.dtype:
                return
            # Makes what a first step would make.
            kept = self._stepped._state_of(parameter, masters=self._stepped.rule.keeping.masters)
            kept.update(held)
            if MASTER in kept:
                kept[MASTER].copy_(value)
        elif states:
            self._stepped.state[parameter if stood is None else stood] = held

    def _over_masters(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """One of the kind of ``optimizer``, fused where there is that."""
        fused = {"foreach": None, "fused": True} if "fused" in optimizer.defaults else {}
        groups = [
            {**group, **fused, "params": [self._updated(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        kind: Any = type(optimizer)
        made: torch.optim.Optimizer = kind(groups, **({"fused": True} if fused else {}))
        return made

    def _updated(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._masters.setdefault(parameter, parameter.detach().to(WIDE)) if _needs_copy(parameter) else parameter


def _needs_copy(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.element_size() < WIDE.itemsize


def with_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` on ``device``, its parameters that were on the meta device with memory and no values yet.

    What is one parameter under several names stays one.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    return model.to(device)
