"""A folder of safetensors, read one tensor at a time. Files are mapped into memory: a tensor that is read takes none of
its own. Nothing pickled is ever opened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch
from safetensors import SafetensorError, safe_open

from forebay.errors import ConfigError

__all__ = ["INDEX", "Entry", "Tensors", "Weights"]

INDEX: Final = "model.safetensors.index.json"

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_PICKLED: Final = (".metadata", "*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of a tensor that may not have been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Tensors(Protocol):
    """Tensors of ``folder`` by name, each read when it is asked for. What cannot be read raises ``ConfigError``."""

    @property
    def folder(self) -> Path:
        """Where the files are."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""

    def __contains__(self, name: str) -> bool: ...

    def entry(self, name: str) -> Entry:
        """Shape and dtype of a tensor, without its values."""

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor."""


@final
class Weights:
    """The tensors of a folder of safetensors. Raises ``ConfigError`` where it has none, or they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder} to load weights from")
        self._file_of = dict(self._index())

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the index, or of the files."""
        return tuple(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def entry(self, name: str) -> Entry:
        path = self._file_of[name]
        with self._open(path) as tensors:
            part = self._named(path, name, lambda: tensors.get_slice(name))
            kind = str(part.get_dtype())
            if kind not in _DTYPES:
                raise ConfigError(f"{name} in {path} is {kind}, which forebay does not read; save it as F32 or BF16")
            return Entry(tuple(part.get_shape()), _DTYPES[kind])

    def read(self, name: str) -> torch.Tensor:
        path = self._file_of[name]
        with self._open(path) as tensors:
            value: torch.Tensor = self._named(path, name, lambda: tensors.get_tensor(name))
            return value

    def _index(self) -> Iterator[tuple[str, Path]]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                # The index is input: it names files of this folder and none elsewhere.
                files = {n: Path(f).name for n, f in dict(json.loads(index.read_text())["weight_map"]).items()}
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f"{index} is not an index of safetensors; save the model again") from None
            yield from ((name, self.folder / file) for name, file in files.items())
            return
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{self.folder} has no safetensors; {self._instead()}")
        for path in paths:
            with self._open(path) as tensors:
                yield from ((name, path) for name in tensors.keys())  # noqa: SIM118 - a reader, not a dict

    def _instead(self) -> str:
        if any(next(self.folder.glob(pattern), None) is not None for pattern in _PICKLED):
            return (
                "what is there is pickled, which can run code when it is opened, so that forebay does not: load it "
                "with the program that wrote it, and save the model with save_pretrained"
            )
        return "save the model with save_pretrained"

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from None

    @staticmethod
    def _named(path: Path, name: str, read: Any) -> Any:
        try:
            return read()
        except SafetensorError as error:
            raise ConfigError(f"{path} has no {name} although the index says so: {error}") from None
