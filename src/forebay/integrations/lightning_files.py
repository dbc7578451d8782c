"""The files of a checkpoint of Lightning's, and the folder beside it of what ``forebay.save`` wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, final

import torch

from forebay.errors import ConfigError
from forebay.integrations import missing

try:
    from lightning.pytorch.plugins import TorchCheckpointIO
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["SUFFIX", "Straight", "beside_of", "remove_others", "unused"]

SUFFIX = ".forebay"
"""Behind the name of a checkpoint: the folder of what ``forebay.save`` wrote, a folder in it for every save."""


@final
class Straight(TorchCheckpointIO):
    """Lightning's file without a copy of all of it in memory first."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes a new file, then gives it its name."""
        if storage_options is not None:
            raise ConfigError("storage_options are for a checkpoint_io of your own; give it to ForebayStrategy")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        try:
            torch.save(checkpoint, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def beside_of(file: Path) -> Path:
    """The folder beside ``file``."""
    return file.with_name(file.name + SUFFIX)


def unused(beside: Path) -> Path:
    """The folder for the next save: not one that a file may name, whose step may be the same in another run."""
    taken = [int(path.name) for path in beside.glob("*") if path.name.isdecimal()]
    return beside / str(max(taken, default=0) + 1)


def remove_others(beside: Path, kept: Path | None) -> None:
    """Removes what earlier saves left ``beside`` a file, which now names ``kept`` or none."""
    if kept is None:
        shutil.rmtree(beside, ignore_errors=True)
        return
    for path in beside.glob("*"):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)
