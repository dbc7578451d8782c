"""The losses of a run as its folder keeps them: a line of JSON for each step. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError, StorageError

__all__ = ["LOSSES", "StepLine", "read_losses"]

LOSSES = "losses.jsonl"
"""The file in the folder of a run."""


@dataclass(frozen=True)
class StepLine:
    """Step ``step`` (from 1): its loss (None: not a finite number), the learning rate, its seconds from the end of the
    step before (None: nobody kept them), and whether its update was left out."""

    step: int
    loss: float | None
    lr: float
    seconds: float | None = None
    skipped: bool = False

    @classmethod
    def parsed(cls, line: str | bytes) -> StepLine:
        """Out of a line of the file. Raises ``ValueError`` for what is no step."""
        try:
            return cls._of(json.loads(line))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not the line of a step: {error!r}") from None

    @classmethod
    def _of(cls, said: Mapping[str, Any]) -> StepLine:
        loss, seconds = said["loss"], said.get("seconds")
        return cls(
            int(said["step"]),
            # Python reads NaN, which is no JSON: what draws the losses would not.
            None if loss is None or not math.isfinite(loss) else float(loss),
            _finite(said["lr"]),
            None if seconds is None else _finite(seconds),
            said.get("skipped") is True,
        )

    def to_json(self) -> str:
        """The line, without its end."""
        said: dict[str, Any] = {"step": self.step, "loss": self.loss, "lr": self.lr}
        if self.seconds is not None:
            said["seconds"] = round(self.seconds, 6)
        if self.skipped:
            said["skipped"] = True
        return json.dumps(said)

    @property
    def number(self) -> float:
        """The loss, NaN where it was not finite."""
        return math.nan if self.loss is None else self.loss


def _finite(said: Any) -> float:
    if not math.isfinite(said):
        raise ValueError(f"{said} is not a finite number")
    return float(said)


def read_losses(path: Path) -> tuple[StepLine, ...]:
    """All whole lines of the file: the last one may be cut where the run was killed. Empty where there is no file.

    Raises ``ConfigError`` for a line that is none, and ``StorageError`` for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StorageError(f"cannot read {path}: {reason}") from None
    found = []
    whole, _, _ = text.rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(StepLine.parsed(line))
        except ValueError:
            raise ConfigError(f"{path}: line {number} is not that of a step; put the file back as it was") from None
    return tuple(found)
