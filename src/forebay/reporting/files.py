"""Files that a user names for a page, a picture, a trace or a plan. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.errors import ConfigError, StorageError

__all__ = ["expect_folder_of", "writing"]


def expect_folder_of(path: Path, flag: str) -> None:
    """Raises ``ConfigError`` where the folder that ``path`` is to lie in, which ``flag`` named, is not there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}; make it first")


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Around what writes ``what`` to ``path``: raises ``StorageError`` where that fails."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {what} to {path}: {error.strerror or error}") from None
