"""Checkpoints, as the public functions ``forebay.save`` and ``forebay.resume``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from forebay.arguments import expect, expect_folder
from forebay.budgets import DiskBudget
from forebay.checkpoint.files import SystemFiles, refused
from forebay.checkpoint.generations import Generations
from forebay.checkpoint.homes import InPlace
from forebay.checkpoint.inventory import checkpoint_nbytes
from forebay.checkpoint.resuming import Resumed, resume_checkpoint
from forebay.checkpoint.saving import Scheduler, kept_buffers, save_checkpoint
from forebay.errors import ConfigError
from forebay.runtime.hooks import prepared_session
from forebay.tiers.host import available_disk
from forebay.tiers.kept import KeptFolder
from forebay.tiers.lock import FolderLock

__all__ = ["CheckpointSize", "Shortage", "checkpoint_size", "keep_in", "resume", "save"]


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str],
    *,
    step: int,
    scheduler: Scheduler | None = None,
    extra: Any = None,
    background: bool = False,
) -> int:
    """Saves a prepared model and its optimizer in ``folder``, so that training goes on from there bit for bit.

    Called between ``optimizer.step()`` and the next forward; gradients are not saved. What is: parameters in full
    precision, buffers of the state dict, optimizer states, step counts, the settings of the parameter groups, the
    states of ``scheduler`` (anything with ``state_dict``) and of the random number generators of Python, NumPy and
    torch, ``step`` (optimizer steps so far), and ``extra``: numbers, text, small tensors and lists, tuples and dicts of
    these, such as the position in the data.

    A process that is killed at any instant, here or later, leaves the last checkpoint that this function returned from,
    or a newer one. It takes the place of the one before, which is removed when the new one is on the disk: twice its
    bytes are needed for a moment. No tier holds more than it does between two steps (``Plan``'s phase ``save``). The
    folder is made if it is not there, for its owner only, and belongs to this model until ``forebay.close``.

    In the folder that ``prepare`` was given as ``crash_safe`` nothing is copied that is at home on disk: the checkpoint
    names it where it is. With ``background`` the call returns before the disk has all of it, and the checkpoint before
    stands until then; what went wrong is raised by the next ``save``, or ``synchronize``, or ``close``.

    Returns the bytes that were written. Raises ``UsageError`` for a call that cannot be served, ``DiskFull`` and
    ``StorageError`` for what the disk refuses: the checkpoint before stands then.
    """
    session, files = prepared_session(model), SystemFiles()
    path = _path_of(folder)
    expect("background", background, bool, "True, or False to wait until the checkpoint stands")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise refused(files, "make", path, error) from error
    path = path.resolve()  # in the background it is written when the process may be in another folder
    session.lock(path)
    kept = session.store.kept
    own = kept.names if kept is not None and kept.path == path else frozenset[str]()
    generations = Generations(path, files, own)
    return save_checkpoint(
        session, model, optimizer, generations, step=step, scheduler=scheduler, extra=extra, background=background
    )


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | os.PathLike[str],
    *,
    scheduler: Scheduler | None = None,
) -> Resumed:
    """Puts a prepared model, its optimizer and ``scheduler`` where ``forebay.save`` left them; the next step is the one
    that would have come.

    The plan need not be the one that the checkpoint was saved under, nor the budgets; the model may have come on the
    meta device. Model, optimizer and groups must be made as they were made. No tier holds more than it does between two
    steps (phase ``resume``). Nothing of the folder is unpickled, and no byte of it is used unchecked.

    Returns ``step`` and ``extra`` of the checkpoint. Raises ``ConfigError`` or ``OptimizerError`` where there is no
    checkpoint, or one of another model or optimizer, and ``StorageError`` for one that is damaged. Nothing has changed
    then, unless the damage showed in the bytes of a tensor: the model has no values after that, until it is given some.
    """
    session, path = prepared_session(model), _path_of(folder)
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path} to resume from")
    session.lock(path)
    return resume_checkpoint(session, model, optimizer, Generations(path, SystemFiles()), scheduler)


def _path_of(folder: str | os.PathLike[str]) -> Path:
    expect_folder(folder, "the folder of a checkpoint")
    return Path(folder)


def keep_in(folder: str | os.PathLike[str], disk: DiskBudget | None) -> KeptFolder:
    """Makes ``folder`` the one in which what a run has on disk outlives it, and locks it. What no checkpoint names is
    removed, and the space given back of what it does not name in the files that it does.

    Raises ``ConfigError`` where it is no path, or not on the disk of ``disk``, or that is several, and ``StorageError``
    where it cannot be used, or another process has it.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"crash_safe is the path of a folder in which a run keeps what is on disk, got {folder!r}")
    path, files = Path(folder), SystemFiles()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise refused(files, "make", path, error) from error
    path = path.resolve()
    _expect_on(path, disk)
    lock = FolderLock(path)
    try:
        generations = Generations(path, files)
        generations.sweep()
        before = generations.thin()
    except BaseException:
        lock.close()
        raise
    return KeptFolder(path, lock, before)


def _expect_on(path: Path, disk: DiskBudget | None) -> None:
    folders = [Path(share.path) for share in disk.folders] if disk is not None else []
    if len(folders) > 1:
        raise ConfigError(
            f"crash_safe keeps what is on disk in {path}, and disk names {len(folders)} folders to spread it over; "
            f"name one, or leave crash_safe out: forebay.save copies then"
        )
    for there in folders:
        if there.exists() and there.stat().st_dev != path.stat().st_dev:
            raise ConfigError(
                f"crash_safe keeps what is on disk in {path}, which is on another file system than {there}; name a "
                f"folder on the same one, or leave crash_safe out: forebay.save copies then"
            )


class Shortage(NamedTuple):
    """Bytes that a disk is to have room for, and those that are free, which are fewer."""

    needed: int
    free: int


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of the tensors of a checkpoint: of those that ``save`` writes, and of those that it names in place."""

    copied: int
    in_place: int

    def shortage(self, folder: Path, generations: int = 1) -> Shortage | None:
        """Where the disk of ``folder`` has no room for so many ``generations`` at one time, what they take; else
        None."""
        needed, free = generations * self.copied, available_disk(folder)
        return Shortage(needed, free) if free < needed else None


def checkpoint_size(model: nn.Module) -> CheckpointSize:
    """What ``save`` makes of a prepared model, in the folder of ``crash_safe`` if it has one."""
    session = prepared_session(model)
    buffers = sum(buffer.nbytes for buffer in kept_buffers(model).values())
    store = session.store
    residuals = sum(values.nbytes for state in store.blocks.values() for values in state.residuals.values())
    every = checkpoint_nbytes(session.model.blocks, session.state_names, buffers) + residuals
    there = InPlace(store.blocks, store.kept, session.plan.streaming, session.state_names).nbytes
    return CheckpointSize(every - there, there)
