"""How the modules of a prepared model run that the user has compiled (``device.compiling`` says why)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, final

import torch
from torch import nn

from forebay.device.compiling import as_written, compiled_modules, outside_of_graphs, refuse_compiled_since
from forebay.plans import Plan

__all__ = ["CompiledModules"]

Before = TypeVar("Before", bound=Callable[..., Any])
After = TypeVar("After", bound=Callable[..., Any])


@final
class CompiledModules:
    """The compiled modules of ``root`` under ``plan``. They run as they are written where the plan was not made for
    them, and ops are ``watched``, or some run again or are treated by themselves."""

    def __init__(self, root: nn.Module, plan: Plan, *, watched: bool) -> None:
        self._plan = plan
        self._names = compiled_modules(root)
        self._as_written = not plan.compiled and (watched or bool(plan.activations or plan.recompute))
        self._hooked: list[nn.Module] = []

    def beside(self, module: nn.Module, before: Before, after: After) -> tuple[Before, After]:
        """The hooks before and after forward as they are to be set on ``module``: outside of graphs, if there are
        any."""
        self._hooked.append(module)
        return (outside_of_graphs(before), outside_of_graphs(after)) if self._names else (before, after)

    def standing_back(self) -> AbstractContextManager[Any]:
        """Has compiled modules run as they are written, where they have to. Also in passes that the watch does not look
        at: else one step would have other numbers than the next."""
        if self._as_written:
            return as_written()
        if not self._names:
            refuse_compiled_since(self._hooked)
        return nullcontext()

    def remark(self, device: torch.device) -> str:
        """What a user is told whose compiled modules run as they are written; "" where none do."""
        if not self._names or not self._as_written:
            return ""
        names, recomputes = self._names, f"the plan of policy {self._plan.planner} recomputes"
        why = "bytes are counted op by op" if device.type == "cpu" else recomputes
        which = f"{names[0]!r}" + (f" and {len(names) - 1} other compiled modules" if len(names) > 1 else "")
        return (
            f"{which} will run as written, not compiled: on {device.type} {why}, which compiled code does not allow; "
            f"the numbers are those of the model without torch.compile"
        )
