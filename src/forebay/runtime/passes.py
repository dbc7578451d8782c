"""What belongs to one pass, and not to the model: several passes may be under way and take turns (accumulate.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple, final

import torch
from torch import nn
from torch.utils._pytree import KeyPath

from forebay.errors import UsageError
from forebay.model import Block
from forebay.runtime.saving_scope import SavingScope

__all__ = [
    "Pass",
    "Running",
    "argument_name",
    "calls_under_way",
    "expect_no_trace",
    "expect_no_transform",
    "part_by_itself",
]


def argument_name(path: KeyPath) -> str:
    """What an argument of a forward is called, or a part of one: ``path`` is where it is in positions and keywords."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])


def part_by_itself(module: nn.Module) -> UsageError:
    """The error for ``module``, a part of a model, that is called with gradients where no forward of the model is."""
    return UsageError(
        f"a module of a prepared model ({type(module).__name__}) is called outside of the model's forward, where no "
        f"budget holds; call the prepared model itself and have its forward do this (prepare a module around it, whose "
        f"forward makes the loss), or call parts of it under torch.no_grad()"
    )


def expect_no_transform(module: nn.Module | None = None) -> None:
    """Raises ``UsageError`` where a prepared model (or ``module``, a part of one) is called inside of a transform of
    ``torch.func``: tensors have no address there, by which they are known, and what is made of a parameter there would
    stay in its place."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return
    called = "a prepared model" if module is None else f"a module of a prepared model ({type(module).__name__})"
    raise UsageError(
        f"{called} is called inside of torch.func (vmap, grad, jvp, ...), which parameters that come and go do not "
        f"pass through; use torch.func inside the forward of one module, on functions that call no other, or "
        f"forebay.close() the model for this"
    )


def expect_no_trace() -> None:
    """Raises ``UsageError`` where a prepared model is called to be written down as a graph: that would have parameters
    in it as they are while they are on the device, and not as the next step makes them."""
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        raise UsageError(
            "a prepared model is traced (torch.export, torch.jit.trace, torch.onnx), and its parameters come and go; "
            "trace a model of its own that has load_state_dict(prepared.state_dict()), or forebay.close() this one "
            "first"
        )


def calls_under_way(module: nn.Module | None, frame: FrameType | None) -> int:
    """How many calls of ``module`` are on the stack whose innermost frame is ``frame``.

    The stack is asked because nothing else knows: an interrupt (KeyboardInterrupt, SystemExit) leaves a forward without
    any after-hook, always_call or not, and the session then still believes that it is inside.
    """
    calls = 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls


class Running(NamedTuple):
    """A module whose forward runs, and the blocks that it opened. ``again``: hooks for what it saves, on for it alone,
    where it runs in a backward."""

    module: nn.Module
    blocks: Sequence[Block]
    again: SavingScope | None


@final
@dataclass(slots=True, eq=False)
class Pass:
    """A forward of the root that runs or waits for its turn, in one thread from its beginning to its end.

    ``running`` are the modules whose forward runs, innermost last. ``scopes`` is what the thread has entered for the
    length of the forward, ``saving`` the hooks for what it saves, if there are any. ``thread`` is the one that it runs
    in, or ran in (0: it has not begun).
    """

    running: list[Running] = field(default_factory=list)
    scopes: ExitStack = field(default_factory=ExitStack)
    saving: SavingScope | None = None
    training: bool = False
    thread: int = 0

    def begin(self, root: nn.Module | None) -> None:
        """A forward of ``root`` begins in the calling thread. Raises ``UsageError`` where one runs in another."""
        thread = threading.get_ident()
        if self.thread not in (0, thread) and calls_under_way(root, sys._current_frames().get(self.thread)):
            raise UsageError(
                "a forward of this prepared model runs in another thread: the device has room for one at a time; wait "
                "for its end, or evaluate another copy of the model"
            )
        self.thread = thread
