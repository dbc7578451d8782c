"""A number that changes with the source of any kernel.

numba keeps compiled code beside the source and looks only at the file that the function is in. A kernel also depends
on the files whose functions it calls; one that names this number is compiled again when any of them changes.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Final

__all__ = ["STAMP"]


def _stamp(folder: Path) -> int:
    checksum = 0
    for path in sorted(folder.glob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


STAMP: Final = _stamp(Path(__file__).parent)
