"""Numbers that change with the sources of compiled functions.

numba keeps compiled code beside the source and looks only at the file that the function is in. A function also depends
on the files whose functions it calls; one that has such a number in its closure is compiled again when any of them
changes. Kernels, which have a closure anyway, name ``STAMP`` themselves; others are given theirs (``jit.compiled``).
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["STAMP", "stamp_of"]


@cache
def stamp_of(folder: Path) -> int:
    """The number of the sources in ``folder``."""
    checksum = 0
    for path in sorted(folder.glob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


STAMP: Final = stamp_of(Path(__file__).parent)
