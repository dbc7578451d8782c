"""A benchmark as it was asked for: the command that is kept with what it found, and what is said meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from benchmarks.archive import Archive
    from benchmarks.provenance import Provenance

__all__ = ["asked", "keep", "say"]

Record = TypeVar("Record", bound="Provenance")


def asked(verb: str, *words: object, **flags: Sequence[object] | bool) -> str:
    """The command of ``verb`` with these ``words`` and ``flags``, each with its values, or by itself where it is True;
    without those that have no value or are False."""
    command = [verb, *map(str, words)]
    for name, values in flags.items():
        if values:
            command += [f"--{name.replace('_', '-')}", *(() if values is True else map(str, values))]
    return f"scripts/bench {join(command)}"


def say(line: str) -> None:
    """Prints ``line``, now: what comes next may take minutes."""
    print(line, flush=True)


def keep(archive: Archive[Record], found: Record) -> None:
    """Keeps ``found`` in its ``archive``, and says where."""
    say(f"kept as {archive.save(found).name}")
