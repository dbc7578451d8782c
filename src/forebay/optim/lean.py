"""Optimizers of forebay's own: they step by themselves, in plain PyTorch, and behind ``forebay.prepare``.

Parameters of 16 bits have an fp32 master copy among their states (``master``), as in a prepared model; what a step
makes is written to both. Saved states are those of a prepared optimizer of the same kind, and the other way round.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, final

import torch

from forebay.errors import OptimizerError
from forebay.kernels.team import Team, cores
from forebay.layout import MASTER, is_dense
from forebay.optim.choosing import host_arithmetic, torch_arithmetic
from forebay.optim.flat import laid_flat
from forebay.optim.parts import Arithmetic, Part, place_of
from forebay.optim.reading import RuledOptimizer
from forebay.optim.rules import UpdateRule
from forebay.optim.streamed import check_states, frozen_group, shape_of
from forebay.states import form_of, plain_name

__all__ = ["LeanOptimizer", "check_numbers", "in_order", "needs_copy"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_NOTHING: Final = torch.empty(0)
"""Of a state that a parameter has not."""


def check_numbers(group: Mapping[str, Any]) -> None:
    """Raises ``OptimizerError`` for hyperparameters that no step has: below 0, or betas of 1 and more."""
    for name in ("lr", "weight_decay", *(("eps",) if isinstance(group.get("eps"), float) else ())):
        if not float(group[name]) >= 0:
            raise OptimizerError(f"{name} must be 0 or more, got {group[name]}")
    for beta in group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise OptimizerError(f"betas must be 0 or more and below 1, got {group['betas']}")


class LeanOptimizer(RuledOptimizer):
    """Steps by its ``rule`` over parameters where they are."""

    _arithmetics: _Arithmetics | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Threads are no state; they start anew with the next step.
        return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def _same_in_all(self, name: str) -> Any:
        """What all parameter groups have under ``name``. Raises ``OptimizerError`` where they differ."""
        found = {group[name] for group in self.param_groups}
        if len(found) > 1:
            raise OptimizerError(f"{name} differs between parameter groups; give each an optimizer of its own")
        return found.pop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. Raises ``OptimizerError`` for hyperparameters out of range."""
        check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Returns the closure's loss if there is one.

        Raises ``OptimizerError`` for a sparse gradient, for parameters that are not floating point or not dense, and
        for an option by which states were made that is another one now.
        """
        loss, rule = None, self.rule
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for parameter in chain.from_iterable(stepped):
            self._expect_as_made(parameter, rule)
        for group, parameters in zip(self.param_groups, stepped, strict=True):
            for parameter in parameters:
                if parameter.grad.layout is not torch.strided:
                    raise OptimizerError("a gradient is sparse; make the embedding with sparse=False")
                self._state_of(parameter, masters=rule.keeping.masters)["step"] += 1
            self._step_group(parameters, frozen_group(group))
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` gave, of this optimizer, of one that was prepared or of torch's of the same kind,
        whose groups do without some options: those stay as they are.

        Raises ``OptimizerError`` for states of another kind, shape or form.
        """
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        rule = self.rule
        for group in state_dict["param_groups"]:
            if missing := rule.missing(group, group):
                raise OptimizerError(f"the saved optimizer's {missing}; load one without")
        options = [group for group in state_dict["param_groups"] for _ in group["params"]]
        for key, parameter, group in zip(keys, parameters, options, strict=False):
            saved = state_dict["state"].get(key)
            if saved:
                check_states(f"parameter {key}", shape_of(parameter, rule.keeping.orthogonal), saved, rule, group)
        before = self.param_groups
        super().load_state_dict(state_dict)
        for group, as_before in zip(self.param_groups, before, strict=True):
            group.update(rule.loaded({**as_before, "params": group["params"]}, group))
        # torch casts states to their parameter's dtype: codes, scales and masters stay what they are.
        for key, parameter in zip(keys, parameters, strict=True):
            saved = state_dict["state"].get(key)
            if saved:
                self.state[parameter] = _copied(saved, rule.state_names, parameter.device)
                if not needs_copy(parameter, masters=rule.keeping.masters):
                    self.state[parameter].pop(MASTER, None)

    def _step_group(self, parameters: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Updates parameters that have a gradient, and whose states have counted the step."""
        rule = self.rule
        if self._arithmetics is None or self._arithmetics.settled != rule.settled:
            self._arithmetics = _Arithmetics(rule)
        together: dict[tuple[torch.device, int], list[Part]] = defaultdict(list)
        for parameter in parameters:
            state = self.state[parameter]
            if parameter.numel():
                together[parameter.device, int(state["step"])].append(_part(parameter, state, rule.state_names))
        for (device, step), parts in together.items():
            self._arithmetics.of(device).update(parts, step, numbers)

    def _new_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states before the first step, without ``step`` and master."""
        made, rule = {}, self.rule
        shaped = shape_of(parameter, rule.keeping.orthogonal)
        for name in rule.state_names:
            form = form_of(name)
            dtype: torch.dtype = getattr(torch, form.dtype)
            shape = form.shape_for(shaped)
            if shape is None:
                continue
            if form.is_elementwise:
                made[plain_name(name)] = torch.zeros_like(parameter, dtype=dtype)
            else:
                made[plain_name(name)] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        return made

    def _expect_as_made(self, parameter: torch.Tensor, rule: UpdateRule) -> None:
        """Raises ``OptimizerError`` where the states that there are were made for other options."""
        state, shaped = self.state.get(parameter), shape_of(parameter, rule.keeping.orthogonal)
        if not state:
            return
        forms = [(plain_name(name), form_of(name)) for name in rule.state_names]
        wanted = {name: getattr(torch, form.dtype) for name, form in forms if form.shape_for(shaped) is not None}
        kept = not needs_copy(parameter, masters=rule.keeping.masters) and MASTER in state
        if kept or {name: value.dtype for name, value in state.items() if name not in ("step", MASTER)} != wanted:
            options = ", ".join(filter(None, (*rule.settled, rule.chooses)))
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} has states that were made for other options than those "
                f"of its group now ({options}); set them back, or have all states start anew (optimizer.state.clear())"
            )

    def _state_of(self, parameter: torch.Tensor, *, masters: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            _expect_dense(parameter)
            state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), **self._new_states(parameter))
        if needs_copy(parameter, masters=masters) and MASTER not in state:
            state[MASTER] = parameter.detach().float()
        return state


@final
class _Arithmetics:
    """Who computes a rule: one for host memory, with threads of its own, and one for any other device."""

    def __init__(self, rule: UpdateRule) -> None:
        team = Team(cores())
        self.settled = rule.settled
        self._host = host_arithmetic(rule, team, None)
        self._elsewhere = torch_arithmetic(rule)
        weakref.finalize(self, team.close)

    def of(self, device: torch.device) -> Arithmetic:
        """For tensors on ``device``."""
        return self._host if device.type == "cpu" else self._elsewhere


def _copied(saved: Mapping[str, Any], names: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
    """The ``saved`` states of a parameter on ``device``, those in ``names`` as they are to lie: plain PyTorch keeps
    states in the parameter's dtype."""
    dtypes: dict[str, torch.dtype] = {plain_name(n): getattr(torch, form_of(n).dtype) for n in (*names, MASTER)}
    # torch's Muon counts no steps; that it has a momentum at all says that it has taken one.
    made = {"step": torch.tensor(1.0, dtype=torch.float32, device="cpu")}
    for name, value in saved.items():
        made[name] = value.to("cpu" if name == "step" else device, dtypes.get(name, value.dtype), copy=True)
    return made


def _part(parameter: torch.Tensor, state_of: Mapping[str, Any], names: Sequence[str]) -> Part:
    if parameter.grad is None:
        raise OptimizerError("a parameter without a gradient has no step")
    flat = partial(in_order, like=parameter)

    def values(name: str) -> torch.Tensor:
        state = state_of.get(plain_name(name))
        if state is None:
            return _NOTHING
        return flat(state) if form_of(name).is_elementwise else state.view(-1)

    return Part(
        flat(parameter),
        flat(parameter.grad),
        flat(state_of[MASTER]) if MASTER in state_of else None,
        tuple(map(values, names)),
        place_of(parameter.numel(), 0),
        shape=tuple(parameter.shape),
        stride=parameter.stride(),
    )


def needs_copy(parameter: torch.Tensor, *, masters: bool) -> bool:
    """Whether an fp32 copy of ``parameter`` is kept: it has 16 bits, and is not rounded by chance
    (``Keeping.masters``)."""
    return parameter.dtype is torch.float16 or (parameter.dtype is torch.bfloat16 and masters)


def in_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` in one dimension, in the order in which those of ``like`` lie; a copy where they lie
    in another."""
    return laid_flat(tensor, like.shape, like.stride())


def _expect_dense(parameter: torch.Tensor) -> None:
    if parameter.dtype not in _DTYPES:
        raise OptimizerError(f"a parameter is {parameter.dtype}; use float32, bfloat16 or float16")
    if not is_dense(parameter.shape, parameter.stride()):
        raise OptimizerError("a parameter overlaps itself or has gaps; make it dense (parameter.contiguous())")
