"""``state_dict`` of a prepared model, and its load: plain names and plain values, wherever they live."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from forebay.errors import UsageError
from forebay.runtime.session import Session

__all__ = ["PlainNames"]


@final
class PlainNames:
    """The hooks of modules that own parameters. ``streamed`` are the names of those that may be away; the others are
    ordinary tensors, and written home after a load."""

    def __init__(self, session: Session, streamed: Collection[str]) -> None:
        self._session = session
        self._streamed = streamed
        # Of parameters with several names: the tensor that the last state_dict() was given.
        self._exports: dict[str, weakref.ref[torch.Tensor]] = {}

    def attach(self, modules: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Puts the hooks on; returns the handles that take them off."""
        handles: list[RemovableHandle] = []
        early = {n for s in self._session.store.blocks.values() if s.early is not None for n in s.early.names}
        for name, module in modules.items():
            prefix = f"{name}." if name else ""
            own = {n: f for n, p in module._parameters.items() if p is not None for f in (self._name(p, prefix + n),)}
            # In backward parameters change that are there, too, and halfway is no state of the model.
            if any(full in self._streamed or full in early for full in own.values()):
                handles.append(module.register_state_dict_post_hook(partial(self._after_state_dict, own)))
            if own:
                handles.append(module.register_load_state_dict_pre_hook(partial(self._before_load, own)))
                handles.append(module.register_load_state_dict_post_hook(partial(self._after_load, own)))
        return handles

    def _name(self, parameter: nn.Parameter, name: str) -> str:
        """The block's name for a parameter: a tied one goes by the name of its first owner."""
        if name in self._session.parameters:
            return name
        return next(n for n, p in self._session.parameters.items() if p is parameter)

    def _after_state_dict(
        self, own: Mapping[str, str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        self._session.stepping.in_backward.expect_whole()
        for local, full in own.items():
            # Else another parameter was put in its place since: that is an ordinary tensor, with a value of its own.
            is_ours = module._parameters.get(local) is self._session.parameters[full]
            if is_ours and full in self._streamed and prefix + local in state:
                state[prefix + local] = self._exported(full, state)

    def _exported(self, name: str, state: Mapping[str, Any]) -> torch.Tensor:
        """The value of a parameter for ``state``; under a second name the tensor that is there already, since tied
        names must stay tied in what is saved. The next step sees every update that is in it (``delay``): one that
        begins with what was saved is the same step."""
        self._session.stepping.show()
        reference = self._exports.get(name)
        made = reference() if reference is not None else None
        if made is None or not any(value is made for value in state.values()):
            made = self._session.contents.value(name)
        if self._session.contents.spec_of[name].aliases:
            self._exports[name] = weakref.ref(made)
        return made

    def _before_load(
        self,
        own: Mapping[str, str],
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        *errors: Any,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace the prepared parameters; use assign=False")
        self._session.stepping.in_backward.expect_whole()
        self._session.synchronize()
        self._session.stepping.show()
        # torch copies the loaded value into param.data: for the time of the load that is a tensor of its own, with
        # the present value, because torch copies nothing when the shapes differ.
        for local, full in own.items():
            if full in self._streamed and prefix + local in state:
                self._session.parameters[full].data = self._session.contents.value(full).clone()

    def _after_load(self, own: Mapping[str, str], module: nn.Module, incompatible: Any) -> None:
        written: dict[str, torch.Tensor] = {}
        for full in own.values():
            parameter = self._session.parameters[full]
            if full not in self._streamed:
                written[full] = parameter.data
            elif not self._session.is_hidden(full):
                written[full] = parameter.data
                self._session.hide(full)
        if written:
            self._session.contents.write(written)
