"""The CSV of minimalloc (https://github.com/google/minimalloc): buffers in, buffers with offsets out. No torch.

The first line names the columns: ``id,lower,upper,size`` in any order, and ``alignment`` where there is one. A buffer
is live from ``lower`` up to ``upper``, which is not part of its life. What is written has one column more, ``offset``;
a file that has it already can be read too, and its offsets are not.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from forebay.buffers import Addresses, Buffer
from forebay.errors import ConfigError, StorageError

__all__ = ["read_buffers", "write_offsets"]

_NEEDED = ("id", "lower", "upper", "size")
_KNOWN = (*_NEEDED, "alignment", "offset")


def read_buffers(path: Path) -> tuple[Buffer, ...]:
    """The buffers in the file at ``path``. Raises ``ConfigError``, which names the line, for what is no such file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return tuple(_buffers(path, csv.reader(file, strict=True)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file in UTF-8: {error}") from None


def _buffers(path: Path, lines: Iterator[list[str]]) -> Iterator[Buffer]:
    header = [name.strip() for name in next(lines, [])]
    missing = [name for name in _NEEDED if name not in header]
    unknown = [name for name in header if name not in _KNOWN]
    if missing or unknown or len(set(header)) != len(header):
        old = ""
        if {"start", "end"} <= set(header):
            old = "; files of older versions of minimalloc say buffer,start,end: call these columns id,lower,upper"
        raise ConfigError(
            f"{path}: the first line must name the columns {','.join(_NEEDED)} (and alignment, offset where there are "
            f"some), each once; it is {','.join(header)!r}{old}"
        )
    place = {name: header.index(name) for name in header}
    for number, line in enumerate(lines, start=2):
        if not line or not any(cell.strip() for cell in line):
            continue
        if len(line) != len(header):
            raise ConfigError(f"{path}, line {number}: {len(header)} values are needed, there are {len(line)}")
        values = {name: line[at].strip() for name, at in place.items()}
        try:
            lower, upper, size = (int(values[name]) for name in ("lower", "upper", "size"))
            yield Buffer(values["id"], lower, upper, size, int(values.get("alignment", "") or 1))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        except ValueError:
            raise ConfigError(
                f"{path}, line {number}: lower, upper, size and alignment are whole numbers, got {','.join(line)!r}"
            ) from None


def write_offsets(addresses: Addresses, path: Path) -> None:
    """Writes the buffers and their offsets to ``path``, in the order in which they were read. Raises
    ``StorageError``."""
    aligned = any(buffer.alignment != 1 for buffer in addresses.given.buffers)
    columns: Sequence[str] = (*_NEEDED, *(["alignment"] if aligned else []), "offset")
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(columns)
            for buffer, offset in zip(addresses.given.buffers, addresses.offsets, strict=True):
                alignment = [buffer.alignment] if aligned else []
                rows.writerow([buffer.id, buffer.lower, buffer.upper, buffer.size, *alignment, offset])
    except OSError as error:
        raise StorageError(f"cannot write the addresses to {path}: {error.strerror or error}") from None
