"""What the schema of an op says of the arguments that it is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["bound", "is_mutable", "written_aside", "written_by"]


def bound(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The arguments of ``func``'s schema with the values given."""
    schema = func._schema.arguments
    pairs = list(zip(schema, args, strict=False))
    pairs.extend((argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs)
    return pairs


def is_mutable(func: Any) -> bool:
    """Whether it writes to any of its arguments. What an op of higher order runs inside is not seen."""
    return isinstance(func, torch._ops.OpOverload) and bool(func._schema.is_mutable)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The values that ``func`` writes to, those in lists one by one."""
    return tree_leaves([value for argument, value in bound(func, args, kwargs) if _is_written(argument)])


def written_aside(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Those of ``written_by`` that ``func`` does not return."""
    returned = set[str]().union(*(r.alias_info.before_set for r in func._schema.returns if _is_written(r)))
    given = bound(func, args, kwargs)
    return tree_leaves([v for a, v in given if _is_written(a) and returned.isdisjoint(a.alias_info.before_set)])


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
