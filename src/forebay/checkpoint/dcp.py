"""A torch distributed checkpoint (DCP) of one process, one tensor in memory at a time.

``torch.distributed.checkpoint.load`` reads it into a model and an optimizer of any program, sharded in any way. torch's
own writer holds every tensor of a file until the file is written; this one writes and forgets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from forebay.checkpoint.source import Source, kept_dtype
from forebay.checkpoint.weights import Entry

__all__ = ["MODEL", "OPTIMIZER", "Later", "write_dcp"]

MODEL, OPTIMIZER = "model", "optimizer"
"""The keys of the state dict that is written."""

FILE, METADATA = "__0_0.distcp", ".metadata"


@dataclass(frozen=True)
class Later:
    """A tensor that is made when it is written."""

    entry: Entry
    read: Callable[[], torch.Tensor]


def write_dcp(
    source: Source, folder: Path, dtype: torch.dtype | None, optimizer: Mapping[str, Any] | None = None
) -> list[Path]:
    """Writes ``{"model": ..., "optimizer": ...}`` into ``folder``, a tied parameter under each of its names.

    ``optimizer`` is what ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` gives, with ``Later`` in
    the place of tensors; None: there is none. Returns the files; raises ``OSError`` after removing what was written.
    """
    names = {name: name for name in source.entries} | dict(source.aliases)
    tree: dict[str, Any] = {MODEL: {name: _of_model(source, owner, dtype) for name, owner in names.items()}}
    if optimizer is not None:
        tree[OPTIMIZER] = optimizer
    later: dict[str, Later] = {}
    state = _without_values(tree, "", later)
    try:
        with warnings.catch_warnings():
            # One process is meant; torch says so each time.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state, storage_writer=_Forgetful(folder), planner=_Reading(later), no_dist=True)
    except BaseException as error:
        for name in (FILE, METADATA):
            (folder / name).unlink(missing_ok=True)
        if isinstance(error, CheckpointException):
            # torch puts what went wrong on each rank into one error of its own; there is one rank.
            raise next(iter(error.failures.values()))[0] from None
        raise
    return [folder / FILE, folder / METADATA]


def _of_model(source: Source, name: str, dtype: torch.dtype | None) -> Later:
    entry = source.entries[name]
    kept = kept_dtype(entry, dtype)
    return Later(Entry(entry.shape, kept), lambda: source.read(name).to(kept))


def _without_values(tree: Mapping[str, Any], path: str, later: dict[str, Later]) -> dict[str, Any]:
    """``tree`` with tensors on the meta device; what stands for them goes to ``later``, by the names that torch makes
    of the keys on the way."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{path}.{key}" if path else key
        if isinstance(value, Later):
            found[key] = torch.empty(value.entry.shape, dtype=value.entry.dtype, device="meta")
            later[place] = value
        else:
            found[key] = _without_values(value, place, later) if isinstance(value, Mapping) else value
    return found


@final
class _Reading(DefaultSavePlanner):
    """Asks for a tensor when it is about to be written."""

    def __init__(self, later: Mapping[str, Later]) -> None:
        super().__init__()
        self._later = later

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._later.get(index.fqn)
        return super().lookup_object(index) if value is None else value.read()


@final
class _Forgetful(FileSystemWriter):
    """One file, into which one tensor goes after the other."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        with (Path(self.path) / FILE).open("wb") as file:
            for item in plan.items:
                begin = file.tell()
                _write(file, planner, item)
                size = file.tell() - begin
                results.append(WriteResult(item.index, size, _StorageInfo(FILE, begin, size)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write(file: Any, planner: SavePlanner, item: WriteItem) -> None:
    value: Any = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        file.write(value.getbuffer())
        return
    value = value.detach().cpu()
    # torch.save writes the whole storage, of which the tensor may be a part.
    torch.save(value if value.untyped_storage().nbytes() == value.nbytes else value.clone(), file)
