"""The optimizer that ``prepare`` returns: a real ``torch.optim.Optimizer`` in front of states that live anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, Final, NoReturn, Protocol, SupportsIndex, final

import numpy as np
import torch

from forebay.errors import OptimizerError, UsageError
from forebay.layout import MASTER
from forebay.optim.rules import UpdateRule
from forebay.states import Shape, Shaped, form_of, plain_name

__all__ = ["StateHost", "StreamedOptimizer", "check_states", "frozen_group", "groups_with", "refuse_steps", "shape_of"]

_HOOKS: Final = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)
"""Where torch's optimizers have the user's hooks."""


class StateHost(Protocol):
    """Whoever holds the states and runs the updates (``runtime.session``)."""

    @property
    def rule(self) -> UpdateRule:
        """What a step does, and the states that there are for it."""

    def parameter(self, name: str) -> Shaped:
        """The parameter called ``name``."""

    def follow(self, hyperparameters: Callable[[Collection[str]], Mapping[str, Mapping[str, object]]]) -> None:
        """Told once by whom the hyperparameters of parameters, by name, can be asked for at any time."""

    def step(self, groups: Mapping[str, Mapping[str, object]]) -> None:
        """One step for the parameters named in ``groups`` that have a gradient."""

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """Copies of one parameter's states, with ``step``; empty before its first step."""

    def write_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replaces the states of the parameters named; those with an empty mapping start anew."""


@final
class StreamedOptimizer(torch.optim.Optimizer):
    """Steps through a ``StateHost``. Shares the parameter groups and the hooks of the optimizer that the user made, so
    that a scheduler over either of them works, and a hook whenever it was registered or is removed."""

    def __init__(self, source: torch.optim.Optimizer, host: StateHost, names: Mapping[int, str]) -> None:
        self._host = host
        self._names = names
        self._group_of: dict[str, Mapping[str, Any]] = {}
        # The hyperparameters with which a group got its states, by ``id``.
        self._began: dict[int, Mapping[str, object]] = {}
        self._states = _StatesAway(host, names, self._group_of)
        super().__init__(source.param_groups, source.defaults)
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(source, hooks))
        host.follow(self.hyperparameters)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OptimizerError("a prepared optimizer cannot be copied or pickled; save its state_dict()")

    @property
    def state(self) -> Any:
        """Empty, whatever states there are: they are elsewhere, and ``state_dict()`` reads them. To ``clear()`` it has
        all start anew; whoever asks for those of one parameter is told."""
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        if states:
            raise _states_are_away()
        if self._group_of:  # not while torch makes the optimizer, which begins with none
            self._states.clear()

    def is_of(self, host: StateHost) -> bool:
        """Whether ``host`` has the states, and takes the steps."""
        return self._host is host

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Raises ``OptimizerError`` for parameters that were not there when the model was prepared, and
        for an option whose state was not."""
        super().add_param_group(param_group)  # first: what is given may be named, or an iterator
        try:
            if any(id(p) not in self._names for p in param_group["params"]):
                raise OptimizerError(
                    "add_param_group: a parameter is not one of the prepared model's; add all groups before prepare()"
                )
            began = self._frozen(param_group)
        except OptimizerError:
            self.param_groups.pop()
            raise
        self._began[id(param_group)] = began
        self._group_of.update((self._names[id(p)], param_group) for p in param_group["params"])

    def hyperparameters(self, names: Collection[str]) -> dict[str, Mapping[str, object]]:
        """What a step would take now for the parameters in ``names`` that are in a group: one copy for each group.
        Raises ``OptimizerError`` as that step would."""
        groups = {name: self._group_of[name] for name in names if name in self._group_of}
        frozen = {id(group): self._frozen(group) for group in groups.values()}
        return {name: frozen[id(group)] for name, group in groups.items()}

    def _frozen(self, group: Mapping[str, Any]) -> dict[str, object]:
        """A copy of the hyperparameters in ``group``, for a step. Raises ``OptimizerError`` where an option is on whose
        state there is not, no room was planned for it, or states are made otherwise than one says."""
        if unlike := self._host.rule.unlike(group):
            raise OptimizerError(
                f"{unlike}; forebay.prepare makes states for the options as they are then. Set it before that, or set "
                f"it back"
            )
        if missing := self._host.rule.missing(group, self._began.get(id(group), group)):
            raise OptimizerError(
                f"{missing}; forebay.prepare makes states for the options as they are then. Turn it on before that, or "
                f"leave it off (OneCycleLR and CyclicLR turn momentum on; give them cycle_momentum=False)"
            )
        return frozen_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step. Returns the closure's loss if there is one.

        Updates on the host may still be running when this returns; whatever reads the parameters through forebay or
        through the model's forward waits for them. Raises ``OptimizerError`` for an option that was turned on since the
        model was prepared, and needs a state that there is not, and for one by which states were made that was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups: dict[str, Mapping[str, object]] = {}
        for group in self.param_groups:
            frozen = self._frozen(group)
            groups.update(dict.fromkeys(map(self._names.__getitem__, map(id, group["params"])), frozen))
        self._host.step(groups)
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips all gradients to a global norm, as ``torch.nn.utils.clip_grad_norm_`` does; returns the norm."""
        return torch.nn.utils.clip_grad_norm_(self._parameters(), max_norm, norm_type)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """The states in ``torch.optim``'s own form; fp32 master copies, where there are any, as ``master``. The user's
        hooks before and after run as in ``torch.optim``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        index = {id(p): i for i, p in enumerate(self._parameters())}
        states = {index[key]: self._host.read_states(self._names[key]) for key in index}
        groups = groups_with(index, self.param_groups)
        found: dict[str, Any] = {"state": {i: s for i, s in states.items() if s}, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            instead = after(self, found)
            found = found if instead is None else instead
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict``, or the ``torch.optim`` optimizer of the same kind, gave. The user's hooks before
        and after run as in ``torch.optim``.

        Raises ``OptimizerError`` when groups or shapes are those of other parameters, or an option of a group is on
        whose state there is not.
        """
        state_dict = state_dict.copy()  # a hook may change it, and what was given is the caller's
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            instead = before(self, state_dict)
            state_dict = state_dict if instead is None else instead
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        saved = deepcopy(state_dict["param_groups"])  # a scheduler changes a learning rate that is a tensor in place
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in self.param_groups]:
            raise OptimizerError(
                f"the saved optimizer has groups of {[len(g['params']) for g in saved]} parameters, this one has "
                f"{[len(g['params']) for g in self.param_groups]}"
            )
        states: dict[str, Mapping[str, torch.Tensor]] = {}
        wanted, began = [], []
        for group, loaded in zip(self.param_groups, saved, strict=True):
            options = self._host.rule.loaded(group, loaded)
            wanted.append(options)
            began.append(self._frozen(options))
            for key, parameter in zip(loaded["params"], group["params"], strict=True):
                entry = state_dict["state"].get(key, {})
                name = self._names[id(parameter)]
                check_states(name, self._host.parameter(name), entry, self._host.rule, options)
                states[name] = entry
        self._host.write_states(states)
        for group, options, frozen in zip(self.param_groups, wanted, began, strict=True):
            group.update(options)
            self._began[id(group)] = frozen


def refuse_steps(source: torch.optim.Optimizer) -> Callable[[], None]:
    """Has ``source`` raise ``UsageError`` in place of a step: a ``StreamedOptimizer`` steps for it, and shares its
    hooks. Returns what ends that."""

    def refuse(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not isinstance(optimizer, StreamedOptimizer):
            raise UsageError(
                "this is the optimizer that forebay.prepare was given, which has no states of the prepared model: step "
                "the one that it returned (model, optimizer = forebay.prepare(model, optimizer, ...))"
            )

    return source.register_step_pre_hook(refuse).remove


@final
class _StatesAway(MutableMapping[torch.Tensor, Any]):
    """Stands where ``torch.optim`` has its states, by parameter. Nothing is found in here, and what would be lost is
    refused. ``stepped``: the names of parameters that are in a group."""

    def __init__(self, host: StateHost, names: Mapping[int, str], stepped: Collection[str]) -> None:
        self._host = host
        self._names = names
        self._stepped = stepped

    def __getitem__(self, parameter: torch.Tensor) -> NoReturn:
        raise _states_are_away()

    def __setitem__(self, parameter: torch.Tensor, states: Any) -> NoReturn:
        raise _states_are_away()

    def __delitem__(self, parameter: torch.Tensor) -> None:
        """The parameter starts anew."""
        self._host.write_states({self._names[id(parameter)]: {}})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def clear(self) -> None:
        """All parameters start anew."""
        self._host.write_states({name: {} for name in self._stepped})


def _states_are_away() -> OptimizerError:
    return OptimizerError(
        "optimizer.state is empty: the states are elsewhere. Read them with optimizer.state_dict(), write them with "
        "optimizer.load_state_dict(), and have them start anew with optimizer.state.clear()"
    )


def groups_with(names: Mapping[int, Any], groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as in a state dict: ``names``, by ``id``, in the place of the parameters."""
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
        for group in groups
    ]


def frozen_group(group: Mapping[str, Any]) -> dict[str, object]:
    """A copy of a group's hyperparameters: a scheduler may change the group while the update is still queued, and a
    learning rate that is a tensor is changed in place. One in fp32 still rounds what it is multiplied by to fp32."""

    def plain(value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return np.float32(value.item()) if value.dtype is torch.float32 else value.item()
        return tuple(map(plain, value)) if isinstance(value, tuple | list) else value

    return {key: plain(value) for key, value in group.items() if key != "params"}


def shape_of(parameter: torch.Tensor, orthogonal: Collection[int]) -> Shape:
    """What there is to know of ``parameter`` for whoever asks which states it has. ``orthogonal``: those whose updates
    are made so, by ``id``."""
    return Shape(tuple(parameter.shape), orthogonal=id(parameter) in orthogonal)


def check_states(
    name: str, parameter: Shaped, entry: Mapping[str, Any], rule: UpdateRule, group: Mapping[str, Any]
) -> None:
    """Raises ``OptimizerError`` where the saved states in ``entry`` are not those that ``rule`` keeps of the parameter
    ``name`` in a group with the hyperparameters ``group``."""
    for state in (*rule.state_names, MASTER) if entry else ():
        key, form = plain_name(state), form_of(state)
        wanted, value = form.shape_for(parameter), entry.get(key)
        needed = state != MASTER and rule.asks(state, group)
        if wanted is None or (value is None and not needed):
            continue
        if not isinstance(value, torch.Tensor):
            raise OptimizerError(f"the saved state of {name} has no {key}; it is another optimizer's")
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        fits = dtype == form.dtype if form.is_coded else value.is_floating_point()
        if shape != wanted or not fits:
            raise OptimizerError(
                f"the saved {key} of {name} has shape {shape} in {dtype}, and this optimizer keeps {wanted} as "
                f"{form.name}"
            )
