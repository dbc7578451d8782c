"""The manifest of a checkpoint: what was saved, when, and in which files. JSON with a checksum of its own."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError, StorageError
from forebay.records import dump, load
from forebay.states import Masters
from forebay.tiers.kept import HOME

__all__ = ["CHECKPOINT_SCHEMA", "Group", "Home", "HomeFile", "Homes", "Manifest", "PieceFile", "Stretch"]

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
class HomeFile:
    """A file in which training keeps what is on disk (``tiers.kept``), in the folder of the checkpoint; its bytes."""

    name: str
    nbytes: int

    def __post_init__(self) -> None:
        if not re.fullmatch(re.escape(HOME) + r"[0-9a-z-]+", self.name):
            raise ConfigError(f"a checkpoint has files {HOME}NAME in its own folder, not {self.name!r}")


@dataclass(frozen=True)
class Stretch:
    """Where in its file a home of a block begins, the checksums of its chunks one after the other (the parameters of a
    block are one), and its bytes (0: not known, as in checkpoints of before)."""

    offset: int
    checksums: tuple[int, ...]
    nbytes: int = 0


@dataclass(frozen=True)
class Home:
    """What of a block is where training keeps it on disk: its parameters, its states, or both. ``tensors`` is the
    checksum of their names, dtypes and shapes."""

    block: str
    tensors: int
    parameters: Stretch | None
    states: Stretch | None


@dataclass(frozen=True)
class Homes:
    """What a checkpoint names in place: two files at most, and what of each block is in them. The states of a block lie
    in chunks of ``update_chunk`` elements, those of ``state_names`` and masters as ``masters`` says
    (``layout.state_layout``)."""

    update_chunk: int
    state_names: tuple[str, ...]
    parameters: HomeFile | None
    states: HomeFile | None
    blocks: tuple[Home, ...]
    masters: Masters = Masters.WHOLE

    def __post_init__(self) -> None:
        if self.update_chunk < 1:
            raise ConfigError(f"a chunk of states has 1 element or more, not {self.update_chunk}")
        for home in self.blocks:
            for stretch, file in ((home.parameters, self.parameters), (home.states, self.states)):
                if stretch is not None and (file is None or stretch.offset < 0 or stretch.nbytes < 0):
                    raise ConfigError(f"the home of block {home.block} is in no file")

    def unnamed(self) -> dict[str, list[tuple[int, int]]]:
        """What of each file is not named (offset and bytes); nothing of a file where that is not known."""
        found: dict[str, list[tuple[int, int]]] = {}
        for file, stretches in (
            (self.parameters, [home.parameters for home in self.blocks]),
            (self.states, [home.states for home in self.blocks]),
        ):
            there = sorted((s.offset, s.nbytes) for s in stretches if s is not None)
            if file is None or not all(nbytes for _, nbytes in there):
                continue
            ends = [0, *(offset + nbytes for offset, nbytes in there)]
            begins = [*(offset for offset, _ in there), file.nbytes]
            gaps = zip(ends, begins, strict=True)
            found[file.name] = [(end, begin - end) for end, begin in gaps if end < begin]
        return found

    @property
    def names(self) -> frozenset[str]:
        """The files."""
        return frozenset(file.name for file in (self.parameters, self.states) if file is not None)


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
    What lies on disk already is in ``homes`` and not in ``files``. Values that are not JSON's are encoded
    (``encoding``).
    """

    step: int
    generation: int
    files: tuple[PieceFile, ...]
    steps: Mapping[str, int]
    groups: tuple[Group, ...]
    scheduler: Mapping[str, Any] | None
    randomness: Mapping[str, Any]
    extra: Any = None
    homes: Homes | None = None
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
        """The text of the file. Raises ``ConfigError`` for values that nobody could read from it again."""
        try:
            body = dump(self).encode()
        except ValueError as error:
            raise ConfigError(f"this checkpoint cannot be written as JSON: {error}") from None
        text = b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body)
        self.from_bytes(text, "this checkpoint, if it were written")
        return text

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
