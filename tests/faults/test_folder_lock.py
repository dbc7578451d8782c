"""A folder is one session's until that gives it back, whatever its children do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import forebay
from forebay.errors import StorageError
from forebay.tiers.lock import FolderLock
from tests.faults.trained import prepare


def test_a_folder_is_free_although_a_forked_child_lives(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)  # until the parent closes its end
        os._exit(0)
    try:
        lock.close()
        FolderLock(tmp_path).close()
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
        os.close(ours)


def test_a_forked_child_gives_nothing_back(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(StorageError, match="is in use by process"):
        FolderLock(tmp_path)
    lock.close()
    FolderLock(tmp_path).close()


def test_a_folder_that_was_removed_and_made_again_is_held(tmp_path: Path) -> None:
    (model, optimizer), folder = prepare("stream", tmp_path), tmp_path / "folder"
    forebay.save(model, optimizer, folder, step=1)
    shutil.rmtree(folder)
    forebay.save(model, optimizer, folder, step=2)
    with pytest.raises(StorageError, match="is in use by process"):
        FolderLock(folder)
    forebay.close(model)
    FolderLock(folder).close()


def test_folders_that_are_gone_keep_no_descriptor(tmp_path: Path) -> None:
    (model, optimizer), open_files = prepare("stream", tmp_path), []
    for number in range(4):
        forebay.save(model, optimizer, tmp_path / str(number), step=number)
        shutil.rmtree(tmp_path / str(number))
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert len(set(open_files)) == 1
    forebay.close(model)
