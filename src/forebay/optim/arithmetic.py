"""Who computes an update: forebay's kernels on the host, torch's fused ones on any other device.

Both do the same operations in the same order. On x86-64 with AVX2 or AVX-512 the kernels give the bits of torch 2.13's
fused CPU ones; wherever they run, everything that one session updates in host memory (on the host, through a staging
buffer, on the device ``cpu``) is updated by the same code, so that the place changes no bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from forebay.optim.rules import AdamRule, SgdRule, UpdateRule

if TYPE_CHECKING:
    from forebay.kernels.native import Form
    from forebay.kernels.team import Team

__all__ = ["Arithmetic", "KernelArithmetic", "Part", "TorchArithmetic", "host_arithmetic"]

_WIDE: Final = torch.float32


@dataclass(frozen=True)
class Part:
    """Some elements of one parameter: 1-D dense tensors of one length.

    ``parameter`` is fp32, or in 16 bits with its fp32 ``master`` beside it; ``gradient`` may have another dtype.
    ``states`` are fp32, in the order of the rule's ``state_names``.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor | None
    states: tuple[torch.Tensor, ...]


class Arithmetic(ABC):
    """One optimizer's update of parts, in place."""

    @abstractmethod
    def update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        """Updates parameters, masters and states. ``step`` counts from 1; ``group`` are the hyperparameters."""


@final
class TorchArithmetic(Arithmetic):
    """Cast, torch's fused update, cast. Gradients of masters become fp32 in ``workspace`` (1-D uint8, 4 bytes for every
    element of a call); without one in new memory."""

    def __init__(self, rule: UpdateRule, workspace: torch.Tensor | None = None) -> None:
        self._rule = rule
        self._workspace = None if workspace is None else workspace.view(_WIDE)

    def update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        gradients, taken = [], 0
        for part in parts:
            gradient = part.gradient
            if gradient.dtype is not _WIDE:
                if self._workspace is None:
                    gradient = gradient.float()
                else:
                    gradient = self._workspace[taken : taken + gradient.numel()].copy_(gradient)
                    taken += gradient.numel()
            gradients.append(gradient)
        targets = [part.parameter if part.master is None else part.master for part in parts]
        states = {name: [part.states[i] for part in parts] for i, name in enumerate(self._rule.state_names)}
        self._rule.update(targets, gradients, states, step, group)
        for part in parts:
            if part.master is not None:
                part.parameter.copy_(part.master)


Launch = Callable[[Any, int, int], float]
"""A kernel for given hyperparameters: called with rows, share and shares."""

Choose = Callable[["Form", "Form", int, Mapping[str, Any]], Launch]
"""The kernel for a parameter's form, a gradient's form, a step and a group."""


@final
class KernelArithmetic(Arithmetic):
    """One pass over memory, on the threads of ``team``; tensors must be in host memory."""

    def __init__(self, rule: AdamRule | SgdRule, team: Team) -> None:
        # numba takes a third of a second to import: not before there is something to update.
        from forebay.kernels import adam, sgd
        from forebay.kernels.native import Form

        self._team = team
        self._choose: Choose
        if isinstance(rule, AdamRule):
            self._choose, self._width = _adam_chooser(rule), len(adam.COLUMNS)
        else:
            self._choose, self._width = _choose_sgd, len(sgd.COLUMNS)
        self._forms = {torch.float32: Form.FP32, torch.bfloat16: Form.BF16, torch.float16: Form.FP16}

    def update(self, parts: Sequence[Part], step: int, group: Mapping[str, Any]) -> None:
        alike: dict[tuple[Form, Form], list[Part]] = defaultdict(list)
        for part in parts:
            alike[self._forms[part.parameter.dtype], self._forms[part.gradient.dtype]].append(part)
        for (parameter, gradient), members in alike.items():
            launch = self._choose(parameter, gradient, step, group)
            rows = np.zeros((len(members), self._width), dtype=np.int64)
            for row, part in zip(rows, members, strict=True):
                addresses = _addresses(part)
                row[: len(addresses)] = addresses
            self._team.run(
                lambda share, shares, launch=launch, rows=rows: launch(rows, share, shares),  # type: ignore[misc]
                int(rows[:, 0].sum()),
            )


def _addresses(part: Part) -> list[int]:
    """A row of a kernel's table: how many elements, then where each stream begins; 0 for a stream that is not there."""
    count = part.parameter.numel()
    row = [count]
    for tensor in (part.gradient, part.parameter, part.master, *part.states):
        # A kernel looks at nothing but addresses: whatever does not lie as it thinks would be someone else's memory.
        if tensor is not None and not (tensor.numel() == count and tensor.is_contiguous() and tensor.is_cpu):
            raise ValueError(f"an update of {count} elements in host memory was given {tensor.numel()} elsewhere")
        row.append(0 if tensor is None else tensor.data_ptr())
    return row


def _adam_chooser(rule: AdamRule) -> Choose:
    from forebay.kernels.adam import adam_kernel, adam_scalars

    def choose(parameter: Form, gradient: Form, step: int, group: Mapping[str, Any]) -> Launch:
        decay = float(group["weight_decay"])
        coupled = not rule.decoupled and decay != 0
        kernel = adam_kernel(parameter, gradient, coupled=coupled, amsgrad=bool(group["amsgrad"]))
        beta1, beta2 = group["betas"]
        scalars = adam_scalars(
            step,
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            decay,
            coupled=coupled,
            maximize=bool(group["maximize"]),
        )
        # No seed: states in fp32 are rounded to nearest.
        return lambda rows, share, shares: kernel(rows, share, shares, scalars, 0)

    return choose


def _choose_sgd(parameter: Form, gradient: Form, step: int, group: Mapping[str, Any]) -> Launch:
    from forebay.kernels.sgd import sgd_kernel, sgd_scalars

    decay, momentum = float(group["weight_decay"]), float(group["momentum"])
    kernel = sgd_kernel(parameter, gradient, decay=decay != 0, momentum=momentum != 0, nesterov=bool(group["nesterov"]))
    scalars = sgd_scalars(
        float(group["lr"]),
        momentum,
        float(group["dampening"]),
        decay,
        first=step == 1,
        maximize=bool(group["maximize"]),
    )
    return lambda rows, share, shares: kernel(rows, share, shares, scalars)


def host_arithmetic(rule: UpdateRule, team: Team, workspace: torch.Tensor | None) -> Arithmetic:
    """Who updates what is in host memory: the kernels, or torch where numba is not installed."""
    if find_spec("numba") is None or not isinstance(rule, AdamRule | SgdRule):
        return TorchArithmetic(rule, workspace)
    return KernelArithmetic(rule, team)
