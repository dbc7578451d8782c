"""The losses of a run: in memory, and in a file of its folder where it has one."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO, final

from forebay.cli.progress import StepResult
from forebay.errors import ConfigError, StorageError
from forebay.reporting.files import writing
from forebay.reporting.losses import StepLine

__all__ = ["Record", "jsonable"]


@final
class Record:
    """One loss for each step, and how many steps were ``skipped``. Where the run has a folder, a file in it has a JSON
    object in a line for each, and is open within ``with``. Raises ``StorageError`` where it cannot be opened or
    written."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.skipped = 0
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self._end = 0
        self._elapsed = 0.0

    @classmethod
    def read(cls, path: Path, step: int) -> Record:
        """The record in ``path`` of the first ``step`` steps. What comes after them belongs to steps that were not
        saved, and is dropped once the record is entered: nothing in the folder changes before.

        Raises ``ConfigError`` where steps are missing, ``StorageError`` where the file cannot be read.
        """
        record = cls()
        record._path = path
        try:
            record._end = record._read(path, step) if step else 0
        except OSError as error:
            raise _cannot_open(path, error) from None
        return record

    def add(self, result: StepResult) -> None:
        """A step is done."""
        self.losses.append(result.loss)
        self.skipped += bool(result.skipped)
        seconds, self._elapsed = result.elapsed - self._elapsed, result.elapsed
        if self._file is not None:
            line = StepLine(result.number, jsonable(result.loss), result.lr, seconds, bool(result.skipped))
            with _writing(self._file):
                self._file.write(line.to_json() + "\n")
                self._file.flush()

    def sync(self) -> None:
        """Returns when the lines are on the disk."""
        if self._file is not None:
            with _writing(self._file):
                os.fsync(self._file.fileno())

    def _read(self, path: Path, step: int) -> int:
        """Reads the first steps; returns the bytes of their lines."""
        end = 0
        with path.open("rb") as file:
            for number in range(1, step + 1):
                text = file.readline()
                end += len(text)
                try:
                    line = StepLine.parsed(text)
                    if line.step != number or not text.endswith(b"\n"):
                        raise ValueError(text)
                except ValueError:
                    raise ConfigError(
                        f"{path} does not have the loss of step {number} in line {number}, and step {step} is saved; "
                        f"put the file back as it was"
                    ) from None
                self.losses.append(line.number)
                self.skipped += line.skipped
        return end

    def __enter__(self) -> Record:
        if self._path is not None:
            try:
                self._file = self._path.open("a", encoding="utf-8")
                self._file.truncate(self._end)
            except OSError as error:
                raise _cannot_open(self._path, error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            with _writing(self._file):
                self._file.close()
        except StorageError:
            # A line that could not be written is in its buffer still: what that raised is on its way.
            if error is None:
                raise


def _writing(file: IO[str]) -> AbstractContextManager[None]:
    return writing("the losses", Path(file.name))


def _cannot_open(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot open {path}: {error.strerror}")


def jsonable(loss: float) -> float | None:
    """``loss`` for JSON, which has no word for what is infinite or NaN."""
    return loss if math.isfinite(loss) else None
