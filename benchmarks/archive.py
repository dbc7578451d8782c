"""Files of ``results/`` with one record each: a record for every run and machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, final

from benchmarks.host import slug
from benchmarks.provenance import Provenance
from benchmarks.result import RESULTS
from forebay.records import dump, load

__all__ = ["Archive"]


Record = TypeVar("Record", bound=Provenance)


@final
@dataclass(frozen=True)
class Archive(Generic[Record]):
    """The files of all records of ``kind``, whose names begin with ``prefix``; ``topic`` says what a record is about,
    where there are several a machine."""

    prefix: str
    kind: type[Record]
    topic: Callable[[Record], str] = lambda record: ""

    def save(self, record: Record, folder: Path = RESULTS) -> Path:
        """Writes ``record`` to a file of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.prefix}{record.date:%Y%m%dT%H%M%SZ}-{slug(record.hardware)}"
        number, path = 1, folder / f"{name}.jsonl"
        while True:
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(dump(record) + "\n")
            except FileExistsError:
                # Another run has begun in the same second, here or on a machine of the same name.
                number += 1
                path = folder / f"{name}-{number}.jsonl"
            else:
                return path

    def latest(self, folder: Path = RESULTS) -> Sequence[Record]:
        """The newest record of every machine and topic, in order of the machines' first ones."""
        found = self.every(folder)
        return tuple({(slug(record.hardware), self.topic(record)): record for record in found}.values())

    def every(self, folder: Path = RESULTS) -> Sequence[Record]:
        """All records, in order of their dates."""
        return tuple(load(self.kind, path.read_bytes()) for path in sorted(folder.glob(f"{self.prefix}*.jsonl")))
