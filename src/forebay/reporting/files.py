"""Files that a user names for a page, a picture, a trace or a plan. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from forebay.errors import ConfigError, StorageError

__all__ = ["expect_apart", "expect_folder_of", "writing"]


def expect_folder_of(path: Path, flag: str) -> None:
    """Raises ``ConfigError`` where the folder that ``path`` is to lie in, which ``flag`` named, is not there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}; make it first")


def expect_apart(asked: Mapping[str, Path | None]) -> None:
    """Raises ``ConfigError`` where of the files to write, by their flags, one would take the place of another."""
    taken: dict[Path, str] = {}
    for flag, path in asked.items():
        if path is None:
            continue
        first = taken.setdefault(path.resolve(), flag)
        if first != flag:
            raise ConfigError(f"{flag} {path} is what {first} writes; give each a name of its own")


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Around what writes ``what`` to ``path``: raises ``StorageError`` where that fails."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {what} to {path}: {error.strerror or error}") from None
