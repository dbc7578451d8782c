"""What ``torch.compile`` was applied to, and where it has to stand back.

Dispatch modes see a step op by op; compiled code has no ops. While a dispatch mode is on that does not say otherwise,
PyTorch (2.13) compiles nothing: it goes through compiled modules as they are written, and compiles the Python of the
mode in their place, again and again. So where a plan was not made for compiled blocks (``Plan.compiled``), compiled
modules are told to run as they are written wherever a mode of forebay's is on: on ``cpu``, whose bytes a mode counts;
while a step is recorded; where a plan names ops. Also where blocks recompute. The numbers are those of the same model,
not compiled. Elsewhere compiled blocks stay compiled, and forebay's hooks run between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from forebay.errors import ModelError

__all__ = [
    "as_written",
    "compile_each",
    "compiled_modules",
    "outside_of_graphs",
    "refuse_compiled_root",
    "refuse_compiled_since",
]

BETWEEN = "forebay has to do its part between the blocks"
"""Why a model cannot be one piece of compiled code."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def compiled_modules(root: nn.Module) -> tuple[str, ...]:
    """Names of the modules that were compiled, in place (``module.compile()``) or as ``torch.compile(module)``."""
    if not _loaded():
        return ()
    from torch._dynamo import OptimizedModule

    found = ((n, m._compiled_call_impl is not None or isinstance(m, OptimizedModule)) for n, m in root.named_modules())
    return tuple(name for name, is_compiled in found if is_compiled)


def compile_each(modules: Iterable[nn.Module], how: Mapping[str, Any]) -> Callable[[], None]:
    """Compiles ``modules`` in place, each by itself, with what ``torch.compile`` takes (``how``); those that are
    compiled already stay as they are. Returns what takes that off again.

    Raises what ``torch.compile`` raises for ``how``; none is compiled then.
    """
    fresh = [module for module in modules if module._compiled_call_impl is None]

    def take_off() -> None:
        for module in fresh:
            module._compiled_call_impl = None

    try:
        for module in fresh:
            module.compile(**how)
    except BaseException:
        take_off()
        raise
    return take_off


def refuse_compiled_root(root: nn.Module) -> None:
    """Raises ``ModelError`` for a root that was compiled: its hooks would be part of what is compiled."""
    if "" in compiled_modules(root):
        raise ModelError(
            f"the model was compiled as a whole (model.compile() or torch.compile(model)); {BETWEEN}: compile the "
            f"blocks instead (for layer in model.layers: layer.compile()), before prepare()"
        )


def as_written() -> AbstractContextManager[Any]:
    """A context in which compiled modules run as they are written.

    Raises ``ModelError`` where the caller is itself called by compiled code.
    """
    if not _loaded():
        return nullcontext()
    try:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    except RuntimeError as error:
        raise ModelError(
            "the prepared model was compiled as a whole (torch.compile(model) or model.compile() after prepare); "
            f"{BETWEEN}: call what prepare() returned, or compile the blocks, before prepare()"
        ) from error


def outside_of_graphs(hook: Hook) -> Hook:
    """``hook`` such that no compiler looks into it. Loads the compiler."""
    outside: Hook = torch.compiler.disable(hook)
    return outside


def refuse_compiled_since(modules: Iterable[nn.Module]) -> None:
    """Raises ``ModelError`` if one of ``modules``, none of which was compiled when it was prepared, is by now: the
    hooks on it would be part of what is compiled."""
    if any(module._compiled_call_impl is not None for module in modules):
        raise ModelError(
            "a block was compiled after prepare(); compile it before: forebay.close(model), compile, prepare it anew"
        )


def _loaded() -> bool:
    """Whether torch's compiler is loaded: what has not been loaded has compiled nothing. Loading it takes seconds."""
    return "torch._dynamo" in sys.modules
