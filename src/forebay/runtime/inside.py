"""What modules hold beside tensors and modules: lists, dicts, sets and deques, small arrays of NumPy's, objects of the
program's own, and generators of random numbers.

They are in attributes, and where a forward or a hook has them by name: in a variable of the file, or of the function
around it. A forward may write to any of them: it appends a loss, counts its calls in a dict, updates a meter. Whoever
runs it for other reasons than training takes that back.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import getattr_static
from operator import is_
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

from forebay.runtime.generators import OwnGenerator

__all__ = ["OF_TORCH", "Content", "Inside", "attributes_of", "has_inside", "look_inside", "own_generators"]

OF_TORCH: Final = frozenset(nn.Module().__dict__)
"""The attributes that a module has by being one: parameters, modules, hooks."""

_NOTHING_INSIDE: Final = (torch.Tensor, nn.Module, str, int, float, type(None), torch.dtype, torch.device)
"""What most attributes are. Modules are looked into by whoever wants to."""


def attributes_of(module: nn.Module) -> Iterator[Any]:
    """Those of ``module`` that are not torch's, and what runs when it is called: its forward and the hooks of it."""
    yield from (value for name, value in module.__dict__.items() if name not in OF_TORCH)
    yield from module._forward_pre_hooks.values()
    yield MethodType(type(module).forward, module)
    yield from module._forward_hooks.values()


class Content(ABC):
    """A container, and what is in it when this is made."""

    value: Any

    @staticmethod
    def of(container: Any) -> Content:
        """What is in ``container``, one of ``Inside.containers``."""
        if isinstance(container, dict):
            return _Dict(container, dict(container))
        if isinstance(container, (list, deque)):
            return _List(container, list(container))
        if isinstance(container, set):
            return _Set(container, set(container))
        if isinstance(container, np.ndarray):
            return _Array(container, container.copy())
        return _Fields(container, dict(_fields(container)))

    def now(self) -> Content:
        """What is in the container now."""
        return Content.of(self.value)

    def held(self) -> Iterable[Any]:
        """What is in it now and may hold something in turn."""
        return _held_by(self.value)

    @abstractmethod
    def is_changed(self) -> bool:
        """Whether something else is in it now."""

    @abstractmethod
    def put_back(self) -> None:
        """What was in it is in it again."""


@final
@dataclass(frozen=True, eq=False)
class _Dict(Content):
    value: dict[Any, Any]
    before: dict[Any, Any]

    def is_changed(self) -> bool:
        return _differ(self.value, self.before)

    def put_back(self) -> None:
        self.value.clear()
        self.value.update(self.before)


@final
@dataclass(frozen=True, eq=False)
class _Fields(Content):
    """Of an object, which others may be looking at: what has not changed is there all the time."""

    value: Any
    before: dict[str, Any]

    def is_changed(self) -> bool:
        return _differ(_fields(self.value), self.before)

    def put_back(self) -> None:
        now = _fields(self.value)
        now.update(self.before)
        for name in now.keys() - self.before.keys():
            del now[name]


@final
@dataclass(frozen=True, eq=False)
class _List(Content):
    value: list[Any] | deque[Any]
    before: list[Any]

    def is_changed(self) -> bool:
        return not _same(self.value, self.before)

    def put_back(self) -> None:
        self.value.clear()
        self.value.extend(self.before)


@final
@dataclass(frozen=True, eq=False)
class _Set(Content):
    value: set[Any]
    before: set[Any]

    def is_changed(self) -> bool:
        return self.value != self.before

    def put_back(self) -> None:
        self.value.clear()
        self.value.update(self.before)


@final
@dataclass(frozen=True, eq=False)
class _Array(Content):
    value: np.ndarray[Any, Any]
    before: np.ndarray[Any, Any]

    def is_changed(self) -> bool:
        return self.value.tobytes() != self.before.tobytes()

    def put_back(self) -> None:
        self.value[...] = self.before


def _differ(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return not (_same(now.values(), before.values()) and _same(now, before))


def _same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and (all(map(is_, now, before)) or all(map(_is_same, now, before)))


def _is_same(one: Any, other: Any) -> bool:
    """Whether nobody can tell one from the other: a number that is computed anew is another object."""
    return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and one == other)


_VALUES: Final = (bool, int, float, str)


@final
@dataclass(frozen=True)
class Inside:
    """What some attributes hold, each object once: the ``containers``, objects of the program's own among them, the
    ``generators``, and the ``tensors`` that are no parameters."""

    containers: Sequence[Any]
    generators: tuple[OwnGenerator, ...]
    tensors: Sequence[torch.Tensor] = ()

    def joined(self, other: Inside) -> Inside:
        """What both hold."""
        known = {id(container) for container in self.containers}
        more = [container for container in other.containers if id(container) not in known]
        generators = tuple(dict.fromkeys((*self.generators, *other.generators)))
        return Inside((*self.containers, *more), generators, (*self.tensors, *other.tensors))


def look_inside(values: Iterable[Any]) -> Inside:
    """What is in ``values`` and, one in the other, in the containers there. Of an object its fields, and containers in
    these; objects that an object refers to are not looked into. Of a function what it has by name, ``FUNCTIONS`` deep;
    not what it finds through something else (``utils.losses``)."""
    look = _Look()
    for value in values:
        look.into(value, objects=True, functions=FUNCTIONS)
    return Inside(tuple(look.containers.values()), tuple(look.generators.values()), tuple(look.tensors.values()))


def has_inside(value: Any) -> bool:
    """Whether ``look_inside`` may find something in ``value``."""
    return not isinstance(value, _NOTHING_INSIDE)


def own_generators(modules: Iterable[nn.Module]) -> tuple[OwnGenerator, ...]:
    """The generators that ``modules`` hold, each once."""
    return look_inside(value for module in modules for value in attributes_of(module)).generators


@final
class _Look:
    def __init__(self) -> None:
        # By id. They are held, so that no other object gets one of these ids meanwhile.
        self.containers: dict[int, Any] = {}
        self.generators: dict[int, OwnGenerator] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._seen: dict[int, Any] = {}

    def into(self, value: Any, *, objects: bool, functions: int) -> None:
        """Looks into ``value``: also where it is an object, or a function that ``functions`` more are in reach of."""
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            self.tensors[id(value)] = value
        if not has_inside(value) or id(value) in self.containers or id(value) in self._seen:
            return
        inside: Iterable[Any] = ()
        if isinstance(value, OwnGenerator):
            if not isinstance(value, random.SystemRandom):
                self.generators[id(value)] = value
        elif isinstance(value, tuple):
            self._seen[id(value)] = inside = value
        elif isinstance(value, _FUNCTIONS):
            if functions:
                self._seen[id(value)], inside, functions = value, _named_by(value), functions - 1
        elif isinstance(value, _CONTAINERS) or _is_small_array(value):
            self.containers[id(value)], inside = value, _held_by(value)
        elif objects and _is_the_programs(value):
            self.containers[id(value)], inside, objects = value, _held_by(value), False
        for one in inside:
            self.into(one, objects=objects, functions=functions)


_CONTAINERS = (dict, list, deque, set)


def _held_by(container: Any) -> Iterable[Any]:
    """What is in a container, or in the fields of an object, and may hold something in turn."""
    if isinstance(container, dict):
        return container.values()
    if isinstance(container, (list, deque)):
        return container
    return () if isinstance(container, (set, np.ndarray)) else _fields(container).values()


def _is_small_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.flags.writeable and value.dtype != object and value.nbytes <= MOST


MOST: Final = 1024**2
"""Bytes of an array of NumPy's that are copied in front of each forward. Larger ones are tables."""

FUNCTIONS: Final = 3
"""A forward or a hook, the functions and methods that it has by name, and those that these have."""

_FUNCTIONS = (FunctionType, MethodType, partial)


def _named_by(function: Any) -> Iterator[Any]:
    """What ``function`` has by name: variables of its file and of the functions around it; of a method the object and
    methods of it, of a ``partial`` its arguments."""
    if isinstance(function, partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    body = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(body, FunctionType) or (body.__module__ or "").partition(".")[0] in _OF_OTHERS:
        return
    for cell in body.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents
    names = list(_names_in(body.__code__))
    yield from (body.__globals__[name] for name in names if name in body.__globals__)
    if isinstance(function, MethodType):
        own = function.__self__
        yield own
        methods = (getattr_static(type(own), name, None) for name in names)
        yield from (MethodType(method, own) for method in methods if isinstance(method, FunctionType))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):  # a function, or the inside of [... for ...]
            yield from _names_in(one)


def _is_the_programs(value: Any) -> bool:
    """Whether it is an object with fields, of a class that is none of ``_OF_OTHERS``."""
    if isinstance(value, SimpleNamespace):
        return True
    root = type(value).__module__.partition(".")[0]
    return not (isinstance(value, type) or root in _OF_OTHERS) and bool(_fields(value))


_OF_OTHERS: Final = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "transformers", "forebay"}
"""Packages whose objects (a thread pool, a configuration) are nothing that a forward keeps its own things in, and know
what they refer to: something else in a field would be another object."""


def _fields(value: Any) -> dict[str, Any]:
    """Those of an object, as they are; none of one without (``__slots__``)."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}
