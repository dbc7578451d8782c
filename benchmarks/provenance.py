"""Where a record comes from: when it was made, by what, on what; and, of one that times, what was beside."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, final

from benchmarks.case import BenchmarkError
from benchmarks.host import Code, CpuMeter, Hardware, code, hardware, versions

__all__ = ["SCHEMA", "Provenance", "TimedProvenance", "Timing", "in_words", "provenance"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Provenance(ABC):
    """What every record says of the run that it is of."""

    date: datetime
    command: str
    hardware: Hardware
    versions: Mapping[str, str]
    code: Code
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"this record has schema {self.schema}, this harness reads schema {SCHEMA}")


@dataclass(frozen=True, kw_only=True)
class TimedProvenance(Provenance, ABC):
    """Of a run whose seconds count: ``threads`` of torch, and how many cores other processes kept busy meanwhile, on
    average."""

    threads: int
    other_cores: float


def provenance(command: str) -> dict[str, Any]:
    """The fields of ``Provenance`` for a run without a GPU, asked for when it begins."""
    return {
        "date": datetime.now(UTC),
        "command": command,
        "hardware": hardware(with_gpu=False),
        "versions": versions(),
        "code": code(),
    }


@final
class Timing:
    """A run whose seconds count, from where this is made on. ``revision`` names the commit of a copy that is no
    repository."""

    def __init__(self, command: str, *, with_gpu: bool = False, revision: str | None = None) -> None:
        self._command = command
        self._with_gpu = with_gpu
        self._revision = revision
        self._date = datetime.now(UTC)
        self._code = code(revision)
        self._meter = CpuMeter()

    def ended(self, *, kept: bool = True, **packages: str) -> dict[str, Any]:
        """The fields of ``TimedProvenance``; ``packages`` are versions beside those that every record names. Raises
        ``BenchmarkError`` where the figures are to be kept and the code changed meanwhile: not all of them would be of
        the code that is named."""
        import torch

        others = self._meter.others()
        if kept and code(self._revision) != self._code:
            raise BenchmarkError("sources or commit changed during the run; run it again, in a checkout nobody edits")
        return {
            "date": self._date,
            "command": self._command,
            "hardware": hardware(self._with_gpu),
            "versions": {**versions(), **packages},
            "code": self._code,
            "threads": torch.get_num_threads(),
            "other_cores": others,
        }


def in_words(one: Provenance) -> str:
    """A line of Markdown about the run that a record is of."""
    commit = f"commit {one.code.revision[:12]}{', changed since' if one.code.dirty else ''}"
    where = f"{one.hardware.cpu}, {one.hardware.cores} cores"
    return f"- `{one.command}`: {where}; {commit}; {one.date:%Y-%m-%d %H:%M} UTC\n"
