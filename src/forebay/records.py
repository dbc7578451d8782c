"""Reading and writing records (frozen dataclasses) as JSON, validated by pydantic on the way in."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from forebay.errors import ConfigError

__all__ = ["dump", "load"]

T = TypeVar("T")


def dump(record: object) -> str:
    """``record`` as indented JSON."""
    return TypeAdapter(type(record)).dump_json(record, indent=2).decode()


def load(cls: type[T], text: str | bytes) -> T:
    """Reads a ``cls`` from JSON. Raises ``ConfigError`` naming the first field that is wrong."""
    adapter: TypeAdapter[Any] = TypeAdapter(cls)
    try:
        record: T = adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ConfigError(f"cannot read a {cls.__name__}: {where}: {first['msg']}") from None
    return record
