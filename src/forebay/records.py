"""Reading and writing records (frozen dataclasses) as JSON, validated by pydantic on the way in."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from forebay.errors import ConfigError
from forebay.names import meant

__all__ = ["dump", "load"]

T = TypeVar("T")


def dump(record: object) -> str:
    """``record`` as indented JSON."""
    cls: Any = type(record)
    return _adapter(cls).dump_json(record, indent=2).decode()


def load(cls: type[T], text: str | bytes) -> T:
    """Reads a ``cls`` from JSON. Raises ``ConfigError`` naming the first field that is wrong, or that there is not."""
    kind: Any = cls
    if not isinstance(text, str | bytes | bytearray):
        raise ConfigError(
            f"a {cls.__name__} is read from its JSON text, got {type(text).__name__}; give what to_json() has made, or "
            f"the content of a file"
        )
    try:
        record: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        _refuse_other_schema(cls, text)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        what = first["msg"]
        if first["type"] == "unexpected_keyword_argument":
            what = f"there is no such key; {meant(str(first['loc'][-1]), _keys(kind)) or 'leave it out'}"
        raise ConfigError(f"cannot read a {cls.__name__}: {where}: {what}") from None
    return record


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    # Made once for each class: that takes milliseconds, with the interpreter's lock, and checkpoints are made beside
    # steps.
    return TypeAdapter(with_config(ConfigDict(extra="forbid"))(cls))


def _keys(cls: Any) -> list[str]:
    """The keys of a ``cls`` and of the records in it."""
    schema = _adapter(cls).json_schema()
    return [key for record in (schema, *schema.get("$defs", {}).values()) for key in record.get("properties", ())]


def _refuse_other_schema(cls: type[Any], text: str | bytes) -> None:
    """Raises ``ConfigError`` when ``text`` is another record, or says that it is of another schema: what else is wrong
    follows from that."""
    own = next((f.default for f in fields(cls) if f.name == "schema"), None)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(whole, dict):
        return
    odd = [key for key in whole if key not in {field.name for field in fields(cls)}]
    if 2 * len(odd) > len(whole):
        raise ConfigError(
            f"this is no {cls.__name__} in JSON but something else, with the keys {', '.join(odd[:4])}"
        ) from None
    theirs = whole.get("schema")
    if isinstance(theirs, int) and own is not None and theirs != own:
        what = cls.__name__.lower()
        raise ConfigError(
            f"this {what} has schema {theirs}, this forebay reads schema {own}; make the {what} again, or use the "
            f"forebay that wrote it"
        ) from None
