"""The losses of a run: in memory, and in a file of its folder where it has one."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import IO, final

from forebay.cli.progress import StepResult
from forebay.errors import ConfigError, StorageError
from forebay.reporting.losses import StepLine

__all__ = ["Record", "jsonable"]


@final
class Record:
    """One loss for each step, and how many steps were ``skipped``; ``file`` has a JSON object in a line for each."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.losses: list[float] = []
        self.skipped = 0
        self.file = file
        self._elapsed = 0.0

    @classmethod
    def opened(cls, path: Path, step: int) -> Record:
        """The record in ``path`` of the first ``step`` steps. What comes after them belongs to steps that were not
        saved and is dropped.

        Raises ``ConfigError`` where steps are missing, ``StorageError`` where the file cannot be used.
        """
        try:
            record = cls()
            end = record._read(path, step) if step else 0
            record.file = path.open("a", encoding="utf-8")
            record.file.truncate(end)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from None
        return record

    def add(self, result: StepResult) -> None:
        """A step is done."""
        self.losses.append(result.loss)
        self.skipped += bool(result.skipped)
        seconds, self._elapsed = result.elapsed - self._elapsed, result.elapsed
        if self.file is not None:
            line = StepLine(result.number, jsonable(result.loss), result.lr, seconds, bool(result.skipped))
            self.file.write(line.to_json() + "\n")
            self.file.flush()

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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()


def jsonable(loss: float) -> float | None:
    """``loss`` for JSON, which has no word for what is infinite or NaN."""
    return loss if math.isfinite(loss) else None
