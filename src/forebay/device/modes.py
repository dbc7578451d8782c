"""A dispatch mode that may be put on and taken off at any time, in any order, from anywhere.

torch keeps its dispatch modes on a stack of each thread, made for ``with``: the last that is entered is the first that
leaves, and ``__exit__`` takes off whatever is on top. What forebay has to see begins and ends in hooks and finalizers.
There the stack may not be what it seems:

- while an op goes through a mode, torch has that mode off the stack, and puts it back behind the op; so does
  ``_disable_current_modes`` with all of them;
- backward runs on a copy of the stack; behind it, what was changed meanwhile is as it was;
- a finalizer runs when the garbage collector does: within any of these, between two lines of a function that has
  counted the modes and is about to look at them one by one, and in any thread, each of which has a stack of its own.

So whether a mode sees ops is said by its own state. One that is off hands them on, wherever it has come back to, and
leaves the stack when the next mode of this kind is put on or taken off in that thread.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any, final

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["BesideCompiled", "Mode", "OpMode", "compiles_nothing"]

Seer = Callable[[Any, Any, Any], Any]
"""Runs an op, given as (func, args, kwargs), and returns its result. Ops that it issues itself go past its mode."""


class _State(Enum):
    """Whether a mode sees ops: not now, yes, never again."""

    OFF = "off"
    ON = "on"
    ENDED = "ended"


_NEXT = {
    _State.OFF: {_State.OFF, _State.ON, _State.ENDED},
    _State.ON: {_State.OFF, _State.ON, _State.ENDED},
    _State.ENDED: {_State.ENDED},
}


class Mode(TorchDispatchMode, ABC):
    """Hands every op to ``see``, in the threads in which it was put on and in their backward. After ``end`` it holds
    nothing. What torch.compile does meanwhile is said by the class: ``OpMode``, ``BesideCompiled``."""

    def __init__(self, see: Seer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self._through: Seer = _hand_on
        self._state = _State.OFF

    def put_on(self) -> None:
        """In front of all modes of the calling thread; what is put on last sees an op first."""
        is_on = self._enter(_State.ON)
        _clear()
        if is_on:
            _push_mode(self)

    def put_behind(self) -> None:
        """Behind all modes of the calling thread, where it sees what those make of an op. Where it is on, nothing
        happens.

        Whoever has entered a mode with ``with`` takes off at its end what is on top, and that must be what was entered.
        """
        is_on = self._enter(_State.ON)
        _clear()
        stack = _get_current_dispatch_mode_stack()
        if is_on and not any(mode is self for mode in stack):
            with _Popped(len(stack)):
                _push_mode(self)

    def take_off(self) -> None:
        """It sees nothing until it is put on again. This and ``end`` may be called wherever a finalizer runs; modes of
        others stay, in their order."""
        self._enter(_State.OFF)
        _clear()

    def end(self) -> None:
        """It sees nothing any more, and holds nothing that it was given."""
        self._enter(_State.ENDED)
        _clear()

    @contextmanager
    def on(self) -> Iterator[None]:
        """It is on inside (``put_on``), and off again if what stands for the inside is dropped."""
        self.put_on()
        try:
            yield
        finally:
            self.take_off()

    @property
    def is_on(self) -> bool:
        """Whether it is to see ops."""
        return self._state is _State.ON

    def _enter(self, state: _State) -> bool:
        """Whether the mode may go to ``state``; it has then gone there."""
        if state not in _NEXT[self._state]:
            return False
        self._state = state
        if state is _State.ENDED:
            self._see = _hand_on
        self._through = self._see if state is _State.ON else _hand_on
        return True

    @abstractmethod
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Goes ``_through``. Each class has its own: torch treats the method of a class as that class asks."""


@final
class OpMode(Mode):
    """Nothing is compiled while it is on a stack."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._through(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method above in a switch that keeps torch.compile out of it, two more Python
        # calls for each op. Nothing is compiled while this mode is on.
        return False


@final
class BesideCompiled(Mode):
    """What was compiled stays so. That calls ops while the compiler looks at every frame: torch's switch stays around
    the method."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._through(func, args, kwargs or {})

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # If not, PyTorch compiles nothing while the mode is on. What compiled code makes need not come by here:
        # ``runtime.unseen``.
        return True


def compiles_nothing() -> bool:
    """Whether PyTorch compiles nothing in the calling thread, because of a dispatch mode that is on there: one of
    forebay's, or somebody else's."""
    _clear()
    return not all(mode.ignore_compile_internals() for mode in _get_current_dispatch_mode_stack())


def _hand_on(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@final
class _Popped:
    """Has the topmost ``count`` modes of the calling thread off the stack inside, and puts back those that are left of
    ``modes`` (the topmost first)."""

    def __init__(self, count: int) -> None:
        self.modes: list[TorchDispatchMode] = []
        self._count = count

    def __enter__(self) -> list[TorchDispatchMode]:
        for _ in range(self._count):
            self.modes.append(_pop_mode())
        return self.modes

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self.modes):
            _push_mode(mode)


def _clear() -> None:
    """Takes all modes of this kind that are off, off the stack of the calling thread; some other time if somebody is
    going through the stack just now."""
    stack = _get_current_dispatch_mode_stack()
    off = [place for place, mode in enumerate(stack) if _is_off(mode)]
    if off and _at_rest():
        with _Popped(len(stack) - off[0]) as modes:
            modes[:] = [mode for mode in modes if not _is_off(mode)]


def _is_off(mode: TorchDispatchMode) -> bool:
    return isinstance(mode, Mode) and not mode.is_on


_CHANGE_THE_STACK = frozenset(
    function.__code__ for function in (Mode.put_on, Mode.put_behind, _clear, _Popped.__enter__, _Popped.__exit__)
)


def _at_rest() -> bool:
    """Whether the calling thread is in none of the functions, of torch's and of those here, that look at the stack or
    change it: a finalizer may run between any two of their lines."""
    frame: FrameType | None = sys._getframe(3)  # whoever has called the method that clears
    while frame is not None:
        if frame.f_globals is vars(_python_dispatch) or frame.f_code in _CHANGE_THE_STACK:
            return False
        frame = frame.f_back
    return True
