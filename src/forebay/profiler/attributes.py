"""What a run of a model under fake tensors leaves in its modules' attributes, taken back.

A forward may do more than compute: count its calls, append a loss to a list, keep a mask that it has made for the next
time. Under fake tensors the counts would be wrong from then on, and the lists and masks have no values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import nn

__all__ = ["Attributes", "attributes_put_back"]


class _Content(Protocol):
    """A container, and what was in it."""

    def is_changed(self) -> bool:
        """Whether something else is in it now."""

    def put_back(self) -> None:
        """What was in it is in it again."""


@final
class Attributes:
    """The attributes of all modules of a model as they are now, with what is in the lists, dicts, sets and deques among
    them, and in these. Other objects that a module refers to are not looked into."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, Any] = {}  # by id; they are held, so that no other object gets one of these ids
        self._contents: list[_Content] = []
        for module in model.modules():
            self._note(module.__dict__)

    def are_changed(self) -> bool:
        """Whether one of them is another object."""
        return any(content.is_changed() for content in self._contents)

    def put_back(self) -> None:
        """All are the same objects as before. What did not change is not touched."""
        for content in self._contents:
            if content.is_changed():
                content.put_back()

    def _note(self, value: Any) -> None:
        if id(value) in self._known:
            return
        if isinstance(value, dict):
            self._contents.append(_Dict(value, dict(value)))
            inside = list(value.values())
        elif isinstance(value, list | deque):
            self._contents.append(_List(value, list(value)))
            inside = list(value)
        elif isinstance(value, set):
            self._contents.append(_Set(value, set(value)))
            inside = []
        elif isinstance(value, tuple):
            inside = list(value)
        else:
            return
        self._known[id(value)] = value
        for one in inside:
            self._note(one)


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the ``Attributes`` of ``model`` are afterwards what they were."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.put_back()


@final
@dataclass(frozen=True)
class _Dict:
    value: dict[Any, Any]
    before: dict[Any, Any]

    def is_changed(self) -> bool:
        now, before = self.value, self.before
        return not _same(list(now), list(before)) or not _same(list(now.values()), list(before.values()))

    def put_back(self) -> None:
        self.value.clear()
        self.value.update(self.before)


@final
@dataclass(frozen=True)
class _List:
    value: list[Any] | deque[Any]
    before: list[Any]

    def is_changed(self) -> bool:
        return not _same(list(self.value), self.before)

    def put_back(self) -> None:
        self.value.clear()
        self.value.extend(self.before)


@final
@dataclass(frozen=True)
class _Set:
    value: set[Any]
    before: set[Any]

    def is_changed(self) -> bool:
        return self.value != self.before

    def put_back(self) -> None:
        self.value.clear()
        self.value.update(self.before)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
