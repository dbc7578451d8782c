"""Gradients of several micro-batches that come block by block, added up in the order of the loop.

A loop over micro-batches adds to a parameter's gradient first all that the first micro-batch contributes, then all of
the second, and so on; and what one micro-batch contributes is itself a sum over the uses of the parameter, in the order
in which backward comes to them. Sums of floating-point numbers depend on both orders.

*direct*     the usual case: all uses lie in one segment (cuts.py), and all micro-batches before are done. autograd
             adds to ``param.grad``, which stays on the device until the last micro-batch is in it.
*parked*     anything else, a tied parameter above all: what a micro-batch has contributed so far waits on the host.
             When backward comes to the next use in the same micro-batch it goes in first, as a root of that backward,
             so that the sum over uses is autograd's own. When it is complete, and those before it are, it is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import nn

from forebay.device.completions import dependency_failure
from forebay.device.cpu import as_bytes
from forebay.memory import Kind, Ledger
from forebay.runtime.landing import Landing
from forebay.timeline import Lane

__all__ = ["Gathering"]


@final
class Gathering:
    """The gradients of one accumulation over ``count`` micro-batches.

    What waits on the host is charged to ``ledger``, and goes there through the window of ``landing``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], count: int, landing: Landing, ledger: Ledger) -> None:
        self._begun = False
        self._parameters = parameters
        self._count = count
        self._landing = landing
        self._ledger = ledger
        # For each micro-batch whose forward is over: by parameter, the segments that will still contribute.
        self._due: list[dict[str, int] | None] = [None] * count
        # By parameter: the first micro-batch that is not in the sum yet.
        self._next: dict[str, int] = {}
        self._parked: dict[tuple[str, int], _Parked] = {}
        self._before: dict[str, torch.Tensor | None] = {}
        # Of the segment whose backward runs: its micro-batch, the parameters that it has not contributed to yet, and
        # the sums so far of those to which autograd must not add.
        self._micro = 0
        self._expected: set[str] = set()
        self._aside: dict[str, torch.Tensor | None] = {}

    def begins(self) -> bool:
        """A forward begins; returns whether it is the first."""
        first, self._begun = not self._begun, True
        return first

    def known(self, micro: int, uses: Mapping[str, int]) -> None:
        """The forward of a micro-batch is over; ``uses`` are the segments that contribute to each parameter."""
        self._due[micro] = dict(uses)

    def begin(self, micro: int, names: Iterable[str]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Backward of a segment of ``micro`` comes, which contributes to ``names``. Returns what goes in first."""
        self._micro, self._expected = micro, set(names)
        first = []
        for name in names:
            parameter = self._parameters[name]
            self._before.setdefault(name, parameter.grad)
            if self._is_direct(name, micro):
                continue
            self._aside[name], parameter.grad = parameter.grad, None
            parked = self._parked.pop((name, micro), None)
            if parked is not None:
                first.append((parameter, parked.take()))
        return first

    def _is_direct(self, name: str, micro: int) -> bool:
        due = self._due[micro]
        last = due is not None and due.get(name) == 1
        return last and (name, micro) not in self._parked and self._advance(name) == micro

    def complete(self, name: str) -> bool:
        """autograd has added to the gradient of ``name``. Returns whether all micro-batches are in it now."""
        if name not in self._expected:
            return False  # by a backward inside backward, of which nobody knew; see ``end`` of the accumulation
        self._expected.discard(name)
        micro, parameter, due = self._micro, self._parameters[name], self._due[self._micro] or {}
        due[name] -= 1
        if name in self._aside:
            part, parameter.grad = parameter.grad, self._aside.pop(name)
            if part is not None and (due[name] or self._advance(name) < micro):
                self._parked[name, micro] = _Parked(self._landing, self._ledger, part, name)
                return False
            if part is not None:
                _add(parameter, part)
        return self._follow(name) == self._count

    def _follow(self, name: str) -> int:
        """Adds what waits for nothing any more; returns the first micro-batch that is not in the sum."""
        while True:
            following = self._advance(name)
            due = self._due[following] if following < self._count else None
            if due is None or due.get(name) or (name, following) not in self._parked:
                return following
            _add(self._parameters[name], self._parked.pop((name, following)).take())

    def finish(self) -> None:
        """All backward is over: adds what still waits for segments that contributed nothing in the end."""
        for name in {name for name, _ in self._parked}:
            self._follow(name)

    def end(self) -> None:
        """Backward of the segment is over. What it did not contribute to in the end stays as it is."""
        due = self._due[self._micro] or {}
        for name in self._expected:
            due[name] -= 1
        for name, gradient in self._aside.items():
            self._parameters[name].grad = gradient
        self._expected.clear()
        self._aside.clear()

    def _advance(self, name: str) -> int:
        """The first micro-batch whose contribution is not in the sum, or may still come."""
        following = self._next.get(name, 0)
        while following < self._count and (name, following) not in self._parked:
            due = self._due[following]
            if due is None or due.get(name):
                break
            following += 1
        self._next[name] = following
        return following

    def undo(self) -> None:
        """Something failed: gradients that were on their way are dropped. Those that had landed before keep what was
        added to them."""
        self._expected.clear()
        self._aside.clear()
        for name, gradient in self._before.items():
            self._parameters[name].grad = gradient
        self.close()

    def close(self) -> None:
        """Gives back what waits on the host."""
        while self._parked:
            self._parked.popitem()[1].drop()


def _add(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Adds to the gradient as autograd does."""
    if parameter.grad is None:
        parameter.grad = part
    else:
        parameter.grad.add_(part)


@final
class _Parked:
    """A gradient on the host, charged to ``ledger``, until ``take`` or ``drop``. Its elements fill one stretch of
    memory, in the order of the parameter's: autograd sees to that."""

    def __init__(self, landing: Landing, ledger: Ledger, gradient: torch.Tensor, name: str) -> None:
        self._device, self._ledger, self._name = landing.device, ledger, name
        self._place = gradient.shape, gradient.stride(), gradient.dtype, gradient.device
        ledger.charge(Kind.GRADIENT, gradient.nbytes, f"what one of several micro-batches contributes to {name}")
        self._host = torch.empty(gradient.nbytes, dtype=torch.uint8, device="cpu")
        landing.window.admit(gradient.nbytes)
        # The mark: the copy must not start before the kernel that makes the gradient is done.
        after = (landing.device.mark(),)
        what = f"park gradient {name}"
        self._left = landing.device.copy(Lane.D2H, self._host, _in_order(gradient), after=after, what=what)
        landing.window.sent(self._left, gradient.nbytes)

    def take(self) -> torch.Tensor:
        """The gradient on the device again, for compute that is issued from here on."""
        shape, stride, dtype, where = self._place
        gradient = torch.empty_strided(shape, stride, dtype=dtype, device=where)
        after = (self._left, self._device.mark())
        back = self._device.copy(
            Lane.H2D, _in_order(gradient), self._host, after=after, what=f"unpark gradient {self._name}"
        )
        self._device.hold_compute(back)
        back.wait()  # its bytes on the host are given back
        self._ledger.discharge(Kind.GRADIENT, self._host.nbytes)
        return gradient

    def drop(self) -> None:
        """Gives its bytes back, whatever became of the copy."""
        dependency_failure(self._left)
        self._ledger.discharge(Kind.GRADIENT, self._host.nbytes)


def _in_order(gradient: torch.Tensor) -> torch.Tensor:
    return as_bytes(gradient.detach().as_strided((gradient.numel(),), (1,)))
