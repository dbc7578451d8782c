"""Reading and printing sizes, times and rates.

Sizes are bytes, times are seconds, rates are bytes per second. Binary units (KiB, MiB, ...) are powers of 1024,
decimal ones (KB, MB, ...) powers of 1000; letters may be upper or lower case. A number without a unit is bytes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType

from forebay.errors import UnitError

__all__ = [
    "GiB",
    "KiB",
    "MiB",
    "TiB",
    "format_apart",
    "format_bytes",
    "format_count",
    "format_enough",
    "format_rate",
    "format_seconds",
    "parse_bytes",
    "parse_disk",
    "parse_disks",
]

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_UNITS: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": KiB,
        "MiB": MiB,
        "GiB": GiB,
        "TiB": TiB,
    }
)
_FACTOR: Mapping[str, int] = MappingProxyType({"": 1} | {name.lower(): factor for name, factor in _UNITS.items()})
_UNDERSTOOD = f"sizes are written like 24GiB, 1.5 GiB or 500MB; units are {', '.join(_UNITS)}; no unit means bytes"

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)")
# What someone meant as a size, right or wrong: it is never silently taken for the end of a path.
_LIKE_A_SIZE = re.compile(r"\s*(?:[+-]?[0-9.]+\s*[A-Za-z]*)?\s*")

_BEYOND = 10**60
"""More of anything than there is; less than a float can hold."""

_GIVEN = (("B", 1), ("KiB", KiB), ("MiB", MiB), ("GiB", GiB), ("TiB", TiB))
"""Units that a size can be read in."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def parse_bytes(text: str | int) -> int:
    """Bytes that ``text`` stands for: ``"24GiB"``, ``"500MB"``, ``"1.5 GiB"``, ``"1024"`` or an int of bytes.

    A fraction of a byte is dropped. Raises ``UnitError``, which lists the units, for anything else: a negative
    size, an empty text, a unit that is not known.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise UnitError(f"a size cannot be negative, got {text}; {_UNDERSTOOD}")
        return text
    if not isinstance(text, str):
        raise UnitError(f"a size must be a text or an int of bytes, got {text!r}; {_UNDERSTOOD}")
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"cannot read {text!r} as a size; {_UNDERSTOOD}")
    number, unit = match.groups()
    factor = _FACTOR.get(unit.lower())
    if factor is None:
        raise UnitError(f"unknown unit {unit!r} in {text!r}; {_UNDERSTOOD}")
    return int(Decimal(number) * factor)


def parse_disk(text: str) -> tuple[str, int | None]:
    """Folder and bytes allowed of a disk written as ``PATH`` or ``PATH:SIZE``; None: no size was given.

    Only the text after the last colon can be the size, and only if it reads like one: a colon inside a path stays
    part of it. End the path in "/" if its last part is itself of the form ``name:123``. Raises ``UnitError`` for an
    empty path and for a size that cannot be read.
    """
    path, colon, tail = text.rpartition(":")
    if not colon or _LIKE_A_SIZE.fullmatch(tail) is None:
        path, size = text, None
    else:
        try:
            size = parse_bytes(tail)
        except UnitError as error:
            raise UnitError(
                f"a disk is written PATH or PATH:SIZE, got {text!r}: {error}; "
                'if the colon belongs to the path, end the path in "/"'
            ) from None
    if not path.strip():
        raise UnitError(f"a disk is written PATH or PATH:SIZE, got {text!r} without a path")
    return path, size


def parse_disks(text: str | os.PathLike[str]) -> tuple[tuple[str, int | None], ...]:
    """The folders of disks written as ``PATH``, ``PATH:SIZE`` or several of these with commas between them.

    A comma separates where a size comes before it or a "/" after it; another one is part of a path. Raises
    ``UnitError`` as ``parse_disk`` does, and for what is no text and no path.
    """
    written = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(written, str):
        raise UnitError(f"a disk is written PATH or PATH:SIZE, in a text or as a path, got {text!r}")
    folders: list[str] = []
    for piece in written.split(","):
        if folders and not piece.startswith("/") and parse_disk(folders[-1])[1] is None:
            folders[-1] += f",{piece}"
        else:
            folders.append(piece)
    return tuple(parse_disk(folder) for folder in folders)


def format_bytes(nbytes: int) -> str:
    """``nbytes`` in binary units with one decimal: ``"24.0 GiB"``; below 1 KiB in whole bytes: ``"512 B"``."""
    return _scale(nbytes, 1024, _BINARY)


def format_apart(needed: int, allowed: int) -> tuple[str, str]:
    """Two sizes for one message: as ``format_bytes`` writes them, or in bytes where that would make them look equal."""
    short = format_bytes(needed), format_bytes(allowed)
    return short if short[0] != short[1] else (f"{needed} bytes", f"{allowed} bytes")


def format_enough(nbytes: int) -> str:
    """``nbytes`` as a size to be given, with one decimal at most and never too small: ``"32MiB"``, ``"4.8GiB"``."""
    unit, factor = next(((u, f) for u, f in reversed(_GIVEN) if nbytes >= f), _GIVEN[0])
    tenths = -(-10 * nbytes // factor)
    whole, rest = divmod(tenths, 10)
    return f"{whole}.{rest}{unit}" if rest else f"{whole}{unit}"


def format_rate(bytes_per_second: float) -> str:
    """A rate in binary units: ``"1.2 GiB/s"``."""
    return f"{_scale(bytes_per_second, 1024, _BINARY)}/s"


def format_count(count: float) -> str:
    """A number of things in powers of 1000: ``"134.5 M"``; below 1000 in full: ``"999"``."""
    return _scale(count, 1000, _DECIMAL).rstrip()


def format_seconds(seconds: float) -> str:
    """A time with three digits that matter: ``"12.3 ms"``, ``"4.56 s"``, ``"2 min 05 s"``, ``"3 h 07 min"``."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 3599.5:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 99.95:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def _three_digits(value: float) -> str:
    """``value`` with as many decimals as make three digits: 1.23, 12.3, 123."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def _scale(value: float, base: int, units: Sequence[str]) -> str:
    """``value`` in the largest of ``units`` (powers of ``base``) that leaves at least 1.0 as printed."""
    if not abs(value) < _BEYOND:  # nor NaN
        return f"{value if isinstance(value, float) else math.inf:.0f} {units[0]}"
    if round(abs(value)) < base:
        return f"{value:.0f} {units[0]}"
    power = 1
    # 0.05 below the next unit would print as "1024.0 KiB": what counts is the rounded figure.
    while power < len(units) - 1 and abs(value) / base**power >= base - 0.05:
        power += 1
    return f"{value / base**power:.1f} {units[power]}"
