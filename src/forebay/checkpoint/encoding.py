"""Settings and states of schedulers as JSON and back, value for value, without pickle.

What JSON has stays as it is. Everything else is a table with one key that begins with ``$``: ``{"$tuple": [...]}``,
``{"$float": "inf"}``, ``{"$tensor": {"dtype", "shape", "data"}}`` (hexadecimal), ``{"$counter": [[key, count], ...]}``
and, for tables whose keys are not plain names, ``{"$items": [[key, value], ...]}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from forebay.errors import ConfigError, StorageError

__all__ = ["decode", "encode"]


def encode(value: object, where: str) -> Any:
    """``value`` for JSON. Raises ``ConfigError`` for what has no form there; ``where`` names the value."""
    try:
        return _encoded(value, where)
    except RecursionError:
        raise ConfigError(f"{where} holds itself, or is nested too deeply, and a checkpoint cannot hold that") from None


def _encoded(value: object, where: str) -> Any:
    if isinstance(value, str):
        return _text(value, where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _tensor_text(value, where)}
    if isinstance(value, Counter):
        return {"$counter": [[_encoded(key, where), count] for key, count in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {_text(key, where): _encoded(entry, f"{where}.{key}") for key, entry in value.items()}
        return {"$items": [[_encoded(key, where), _encoded(entry, f"{where}.{key}")] for key, entry in value.items()]}
    if isinstance(value, tuple | list):
        members = [_encoded(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
        return {"$tuple": members} if isinstance(value, tuple) else members
    kind = type(value)
    raise ConfigError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; it holds numbers, text, "
        f"tensors, and lists, tuples and dicts of these"
    )


def decode(value: Any) -> Any:
    """What ``encode`` was given. Raises ``StorageError`` for what it never makes."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: decode(entry) for name, entry in value.items()}
    reader = _READERS.get(key)
    try:
        if reader is not None and len(value) == 1:
            return reader(value[key])
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        pass
    raise StorageError(f"the checkpoint holds a value of the kind {key!r} that this forebay cannot read")


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds {value!r}, which is no text in UTF-8; a checkpoint cannot hold it") from None
    return value


def _tensor_text(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    except RuntimeError:  # sparse, on the meta device, conjugated ...
        raise ConfigError(
            f"{where} is a tensor without bytes in the order of its elements ({tensor.layout}, on {tensor.device}), "
            f"which a checkpoint cannot hold; give a plain one with values"
        ) from None
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data.hex()}


def _tensor(said: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, said["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(said["dtype"])
    data = bytearray.fromhex(said["data"])
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu").reshape(said["shape"])
    return torch.frombuffer(data, dtype=dtype).reshape(said["shape"])


def _pairs(said: Sequence[Sequence[Any]]) -> dict[Any, Any]:
    return {decode(key): decode(value) for key, value in said}


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "$tuple": lambda said: tuple(decode(entry) for entry in said),
    "$float": lambda said: float(said),
    "$tensor": _tensor,
    "$counter": lambda said: Counter(_pairs(said)),
    "$items": _pairs,
}
