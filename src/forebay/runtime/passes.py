"""What belongs to one pass, and not to the model: several passes may be under way and take turns (accumulate.py)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import nn
from torch.utils._pytree import KeyPath

from forebay.errors import UsageError
from forebay.runtime.saving_scope import SavingScope
from forebay.trace import Block

__all__ = ["Pass", "Running", "argument_name", "part_by_itself"]


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
    length of the forward, ``saving`` the hooks for what it saves, if there are any.
    """

    running: list[Running] = field(default_factory=list)
    scopes: ExitStack = field(default_factory=ExitStack)
    saving: SavingScope | None = None
    training: bool = False
