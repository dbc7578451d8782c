"""In which order micro-batches pass forward: together, block by block, or as in a loop, each to its end.

Together they come to things in another order than in the loop, which shows in two ways.

numbers     From the first random number on, each forward runs to its end before the next one goes on, so that each
            draws those that it draws in the loop.
modules     What one leaves in a module (the mask of its batch, the loss of a layer, a count of calls) another one would
            find that has not come so far in the loop, or has been there before. Whoever leaves something passes forward
            as in the loop. That shows when it is there, which may be too late for those that wait, since they may have
            looked already; so a plan knows it beforehand, from the step that was recorded (``trace.Leaves``).

A block's own buffers are nothing that others look at (running means): each micro-batch comes to them in the order of
the loop. Nor is it seen what forwards leave elsewhere, in a list that is nobody's attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, final

import torch
from torch import nn

from forebay.errors import ModelError
from forebay.plans import Accumulation
from forebay.runtime.attributes import version_of
from forebay.runtime.generators import HostNumbers, OwnGenerator
from forebay.runtime.inside import Content, attributes_of, look_inside, own_generators
from forebay.trace import Leaves

__all__ = ["ForwardOrder", "Passing"]


class Passing(Enum):
    """How micro-batches pass forward: together; one after the other, as long as they leave something; or always so,
    because each leaves something, or some have where nobody knew of it."""

    TOGETHER = "together"
    TRIED = "tried"
    IN_TURN = "in turn"

    @classmethod
    def planned(cls, needs: Accumulation | None) -> Passing:
        """The first ones of a plan. One that knows nothing (None) has them pass together, as nearly all models can:
        what is found then is an error, once, and no other numbers."""
        if needs is None or needs.leaves is Leaves.NOTHING:
            return cls.TOGETHER
        # What each leaves need not show behind it: torch counts no change by way of ``buffer.data``.
        return cls.TRIED if needs.leaves is Leaves.ONCE else cls.IN_TURN


@final
class ForwardOrder:
    """Of one accumulation, which begins as ``passing`` says. ``blocks`` are the names of the modules of the ``model``'s
    blocks."""

    def __init__(self, passing: Passing, model: nn.Module, blocks: Iterable[str], device: torch.device) -> None:
        self.passing = passing
        """How this one goes on; at its end, how the next one begins."""
        self._draws = _Draws(device, own_generators(model.modules()))
        self._left = _LeftBehind(model, blocks)
        self._others_began = False

    @property
    def in_turn(self) -> bool:
        """Whether the next micro-batch waits until the one before has come to its end."""
        return self._draws.seen or self.passing is not Passing.TOGETHER

    def look(self, number: int) -> bool:
        """Whether what micro-batch ``number`` has just done is the reason that they go on in turn. Raises
        ``ModelError`` where others may have missed it."""
        if self._draws.look(number):
            return True
        if self.in_turn:
            return False
        self._others_began |= number > 0
        if number == 0:  # what it leaves the others do; a look takes 1.2 milliseconds with 500 modules
            self._found(self._left.look())
        return self.in_turn

    def end(self) -> None:
        """All forwards are over. Raises as ``look``."""
        found = self._left.look()
        if self.passing is Passing.TRIED and not found:
            self.passing = Passing.TOGETHER
        elif not self.in_turn:
            self._found(found)

    def _found(self, left: str) -> None:
        if not left:
            return
        self.passing = Passing.IN_TURN if self._others_began else Passing.TRIED
        if self._others_began:
            raise ModelError(
                f"a forward leaves something in the modules of the model ({left}) that micro-batches which pass it "
                f"together may have looked for before it was there; from now on they pass one after the other: begin "
                f"this step anew (zero_grad(), accumulate)"
            )


@final
class _LeftBehind:
    """What is in the modules of ``model`` now."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        self._model = model
        inside = tuple(f"{name}." if name else "" for name in blocks)
        self._buffers = [buffer for name, buffer in model.named_buffers() if not name.startswith(inside)]
        self._note()

    def look(self) -> str:
        """Where something is else than at the last look, in words; "" where all is as it was."""
        written = any(now != then for now, then in zip(self._counted(), self._versions, strict=True))
        changed = ["a tensor or a buffer of the model that is changed in place"] if written else []
        changed += [place for place, content in self._contents if content.is_changed()]
        if changed:
            self._note()
        return changed[0] if changed else ""

    def _note(self) -> None:
        self._contents: list[tuple[str, Content]] = []
        values: list[Any] = []
        for name, module in self._model.named_modules():
            place = f"an attribute of {name or 'the model'}"
            self._contents += [(place, Content.of(one)) for one in (module.__dict__, module._buffers)]
            values += attributes_of(module)
        inside = look_inside(values)
        self._contents += [(f"a {type(one).__name__} that a module has", Content.of(one)) for one in inside.containers]
        self._tensors = [*self._buffers, *inside.tensors]
        self._versions = self._counted()

    def _counted(self) -> list[int]:
        """How often each tensor was changed in place."""
        return [version_of(tensor) for tensor in self._tensors]


@final
class _Draws:
    """Whether random numbers were drawn since the last look, from any generator that models use without naming it, or
    from one of the model's ``own``."""

    def __init__(self, device: torch.device, own: Sequence[OwnGenerator]) -> None:
        self._device = device
        self._own = own
        self.seen = False
        self._latest = -1
        self._state = self._now()

    def look(self, number: int) -> bool:
        """Whether micro-batch ``number`` has just drawn the first numbers. Raises ``ModelError`` where one draws after
        a later one has."""
        now = self._now()
        if now == self._state:
            return False
        self._state = now
        if number < self._latest:
            raise ModelError(
                f"micro-batch {number} draws random numbers in a block that micro-batch {self._latest} had passed and "
                f"drawn some in, so that they would not be those of the loop; train this model with the loop itself"
            )
        first, self.seen, self._latest = not self.seen, True, number
        return first

    def _now(self) -> tuple[Any, ...]:
        on_device = b""
        if self._device.type == "cuda":
            on_device = torch.cuda.get_rng_state(self._device).numpy().tobytes()
        mine = torch.get_rng_state().numpy().tobytes()
        return mine, on_device, HostNumbers(self._own)
