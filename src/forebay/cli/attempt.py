"""One step of the loop, until its update: what spoils it there takes nothing along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from forebay.errors import DeviceOutOfMemory, NotFinite

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["attempt", "give_up"]


@contextmanager
def attempt(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Iterator[None]:
    """The body is step ``number`` up to its update. Where it raises ``NotFinite``, or ``DeviceOutOfMemory`` (which
    torch's own error becomes), everything that a checkpoint keeps is as the step before has left it."""
    from forebay.checkpoint.randomness import capture, restore
    from forebay.runtime.hooks import session_of

    attachment = session_of(model)
    session = None if attachment is None else attachment.session
    drawn = None if session is None else capture(session)
    try:
        with nullcontext() if session is None else session.device.translate_oom(f"step {number}"):
            yield
    except (NotFinite, DeviceOutOfMemory):
        give_up(model, optimizer)
        if session is not None and drawn is not None:
            # The step that comes in its place draws what this one has drawn (dropout).
            restore(session, drawn)
        raise


def give_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The update of the step under way will not come."""
    from forebay.runtime.hooks import session_of

    optimizer.zero_grad(set_to_none=True)
    attachment = session_of(model)
    if attachment is not None:
        attachment.session.give_up_step()
