"""A folder is one session's until that gives it back, whatever its children do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.errors import StorageError
from forebay.tiers.lock import FolderLock


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
