"""Modes that are put on and taken off where torch's stack of modes is not what it seems."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _push_mode,
)

from forebay.device.modes import BesideCompiled, OpMode, compiles_nothing


class Seen:
    """What runs the ops of ``mode``, and does something ``inside`` of the next one."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.inside: Callable[[], object] | None = None
        self.mode = OpMode(self.run)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.ops.append(func.__name__)
        inside, self.inside = self.inside, None
        if inside is not None:
            inside()
        return func(*args, **kwargs)


class Others(TorchDispatchMode):
    """A mode of the user's, entered with ``with``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Cycle:
    """What only a collection finds."""

    def __init__(self, finalizer: Callable[[], object]) -> None:
        self.own = self
        weakref.finalize(self, finalizer)


def stack() -> list[TorchDispatchMode]:
    return list(_get_current_dispatch_mode_stack())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    assert not stack()
    yield
    OpMode(lambda func, args, kwargs: func(*args, **kwargs)).take_off()  # as the next of forebay's would
    assert not stack()


def in_its_own_op(drop: Callable[[], None]) -> None:
    (seen,) = (mode._see.__self__ for mode in stack())  # type: ignore[attr-defined]
    seen.inside = drop
    torch.ones(1)


def while_modes_are_off(drop: Callable[[], None]) -> None:
    with _disable_current_modes():
        drop()


def in_backward(drop: Callable[[], None]) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: drop())
    (2 * x).sum().backward()


def in_another_thread(drop: Callable[[], None]) -> None:
    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()


PLACES = [in_its_own_op, while_modes_are_off, in_backward, in_another_thread]


@pytest.mark.parametrize("place", PLACES)
def test_a_mode_that_could_not_be_taken_off_does_nothing_and_goes_with_the_next(
    place: Callable[[Callable[[], None]], None],
) -> None:
    """Each is a place where the stack cannot be changed for good; a collection may run a finalizer in any of them."""
    seen = Seen()
    mode = seen.mode
    mode.put_on()
    assert torch.ones(1).item() == 1 and seen.ops

    def drop() -> None:
        Cycle(mode.end)
        gc.collect()

    place(drop)
    assert stack() == [mode], "torch has put it back"
    before, held = list(seen.ops), weakref.ref(seen)
    assert torch.ones(1).item() == 1
    assert seen.ops == before
    mode.put_on()
    assert not mode.is_on, "for good"
    assert not stack()
    _push_mode(mode)  # wherever it comes back from
    del seen
    gc.collect()
    assert held() is None, "nobody holds what it has served"
    assert torch.ones(1).item() == 1
    other = Seen()
    other.mode.put_on()
    assert stack() == [other.mode]
    other.mode.take_off()


@pytest.mark.parametrize("place", PLACES)
def test_a_mode_taken_off_there_sees_again_when_it_is_put_on_again(
    place: Callable[[Callable[[], None]], None],
) -> None:
    seen = Seen()
    seen.mode.put_behind()
    place(seen.mode.take_off)
    before = len(seen.ops)
    torch.ones(1)
    assert len(seen.ops) == before
    seen.mode.put_behind()
    torch.ones(1)
    assert len(seen.ops) == before + 1 and stack() == [seen.mode]
    seen.mode.take_off()


def test_a_finalizer_leaves_the_stack_alone_while_somebody_goes_through_it() -> None:
    """torch counts the modes, and then looks at them one by one: a collection may come between the two."""
    below, above = Seen(), Seen()
    below.mode.put_on()
    above.mode.put_on()
    gc.collect()
    gc.disable()
    thresholds = gc.get_threshold()
    try:
        Cycle(below.mode.end)
        gc.set_threshold(1)
        gc.enable()
        found = _get_current_dispatch_mode_stack()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert not below.mode.is_on, "the collection has come"
    assert found == [below.mode, above.mode]
    above.mode.take_off()


def test_they_leave_in_any_order() -> None:
    first, second = Seen(), Seen()
    first.mode.put_on()
    with Others() as others:
        second.mode.put_on()
        first.mode.take_off()
        assert stack() == [others, second.mode]
        torch.ones(1)
        second.mode.take_off()
    assert (first.ops, second.ops) == ([], ["ones.default"])


def test_a_mode_put_on_within_the_users_leaves_at_its_own_end() -> None:
    """torch takes off what is on top where a ``with`` ends."""
    seen = Seen()
    with Others() as others:
        seen.mode.put_behind()
        assert stack() == [seen.mode, others]
    assert stack() == [seen.mode]
    with Others():
        seen.mode.take_off()
        seen.mode.put_behind()
    assert stack() == [seen.mode]
    seen.mode.take_off()


def test_a_mode_that_is_on_twice_leaves_at_once() -> None:
    seen = Seen()
    seen.mode.put_behind()
    with _disable_current_modes():
        seen.mode.put_behind()
    assert stack() == [seen.mode, seen.mode]
    seen.mode.take_off()
    assert not stack()


def test_one_that_is_on_for_a_while_goes_when_that_is_dropped() -> None:
    seen = Seen()
    inside = seen.mode.on()
    inside.__enter__()
    assert stack() == [seen.mode]
    del inside
    assert not stack()


def test_what_is_compiled_beside_them() -> None:
    """A mode that is off, and could not be taken off the stack, is in nobody's way."""
    seen = Seen()
    beside = BesideCompiled(seen.run)
    beside.put_behind()
    assert not compiles_nothing()
    with seen.mode.on():
        assert compiles_nothing()
        in_another_thread(seen.mode.end)
        assert stack() == [beside, seen.mode]
        assert not compiles_nothing()
        assert stack() == [beside]
    torch.ones(1)
    assert seen.ops == ["ones.default"]
    beside.take_off()
    with Others():
        assert compiles_nothing()
    assert not compiles_nothing()
