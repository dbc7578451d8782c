"""What a run of a model under fake tensors leaves in its modules' attributes, taken back.

A forward may do more than compute: count its calls, append a loss to a list, keep a mask that it has made for the next
time. Under fake tensors the counts would be wrong from then on, and the lists and masks have no values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

__all__ = ["attributes_put_back"]


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the attributes of all modules of ``model`` are the same objects afterwards, and the lists,
    dicts, sets and deques among them, and in these, hold the same objects. What did not change is not touched.

    Other objects that a module refers to are not looked into.
    """
    known: dict[int, Any] = {}  # by id; they are held, so that no other object gets one of these ids
    undone: list[Callable[[], None]] = []
    for module in model.modules():
        _note(module.__dict__, known, undone)
    try:
        yield
    finally:
        for undo in undone:
            undo()


def _note(value: Any, known: dict[int, Any], undone: list[Callable[[], None]]) -> None:
    """Adds to ``undone`` what puts the content of a container back, and of those in it."""
    if id(value) in known:
        return
    if isinstance(value, dict):
        undone.append(partial(_put_back_dict, value, dict(value)))
        inside = list(value.values())
    elif isinstance(value, list | deque):
        undone.append(partial(_put_back_list, value, list(value)))
        inside = list(value)
    elif isinstance(value, set):
        undone.append(partial(_put_back_set, value, set(value)))
        inside = []
    elif isinstance(value, tuple):
        inside = list(value)
    else:
        return
    known[id(value)] = value
    for one in inside:
        _note(one, known, undone)


def _put_back_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if not _same(list(value), list(before)) or not _same(list(value.values()), list(before.values())):
        value.clear()
        value.update(before)


def _put_back_list(value: list[Any] | deque[Any], before: list[Any]) -> None:
    if not _same(list(value), before):
        value.clear()
        value.extend(before)


def _put_back_set(value: set[Any], before: set[Any]) -> None:
    if value != before:
        value.clear()
        value.update(before)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
