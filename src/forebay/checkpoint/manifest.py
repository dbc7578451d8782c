"""The manifest of a checkpoint: what was saved, when, and in which files. JSON with a checksum of its own."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError, StorageError
from forebay.records import dump, load

__all__ = ["CHECKPOINT_SCHEMA", "Group", "Manifest", "PieceFile"]

CHECKPOINT_SCHEMA = 1

_WHOLE = re.compile(rb'\{"crc32": (\d{1,10}), "manifest": (\{.*\})\}\n', re.DOTALL)
"""The checksum is that of the bytes of the manifest as they stand."""


@dataclass(frozen=True)
class PieceFile:
    """A file of tensors: its name in the folder of its generation, its bytes, the checksum of each tensor."""

    name: str
    nbytes: int
    crc32: Mapping[str, int]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9A-Za-z_-]+\.safetensors", self.name):
            raise ConfigError(f"a checkpoint has files NAME.safetensors in its own folder, not {self.name!r}")
        if self.nbytes < 0:
            raise ConfigError(f"{self.name} has 0 bytes or more, not {self.nbytes}")


@dataclass(frozen=True)
class Group:
    """A parameter group: the plain names of its parameters and its settings (``encoding``)."""

    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What was saved after optimizer step ``step`` (0: before the first).

    ``generation`` counts the checkpoints of a folder and names the folder of this one. ``steps`` are those that each
    trained parameter has taken, ``groups`` the parameter groups, ``scheduler`` the kind and the state of the scheduler
    (None: there was none), ``randomness`` the states of the random number generators, ``extra`` what the caller gave.
    Values that are not JSON's are encoded (``encoding``).
    """

    step: int
    generation: int
    files: tuple[PieceFile, ...]
    steps: Mapping[str, int]
    groups: tuple[Group, ...]
    scheduler: Mapping[str, Any] | None
    randomness: Mapping[str, Any]
    extra: Any = None
    schema: int = CHECKPOINT_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != CHECKPOINT_SCHEMA:
            raise ConfigError(
                f"this checkpoint has schema {self.schema}, this forebay reads schema {CHECKPOINT_SCHEMA}"
            )
        if self.step < 0 or self.generation < 1 or any(count < 0 for count in self.steps.values()):
            raise ConfigError("a checkpoint has 0 steps or more, and generations count from 1")
        names = [file.name for file in self.files]
        tensors = [name for file in self.files for name in file.crc32]
        for what in (names, tensors):
            if len(set(what)) != len(what):
                raise ConfigError(f"a checkpoint names {max(what, key=what.count)} twice")

    def to_bytes(self) -> bytes:
        """The text of the file."""
        body = dump(self).encode()
        return b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body)

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Reads ``to_bytes``'s text. Raises ``StorageError`` for a text that is damaged, ``ConfigError`` for one that
        another forebay wrote; ``where`` names the file."""
        whole = _WHOLE.fullmatch(text)
        if whole is None or zlib.crc32(whole[2]) != int(whole[1]):
            raise StorageError(f"{where} is damaged: its checksum is not that of its text; the disk has changed it")
        try:
            return load(cls, whole[2])
        except (ConfigError, RecursionError) as error:
            raise ConfigError(f"{where}: {error}") from None
