"""How the bytes of a disk transfer are cut into system calls, and whether they are held against their checksums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.errors import ConfigError
from forebay.units import MiB, format_bytes

__all__ = ["CHECKSUMS", "Calls"]

CHECKSUMS: Final = False
"""Whether what is read of parameters and states on disk is held against checksums of what was written, where nobody
says: they cost time of the lanes that read and write, and 8 bytes of the host for 4 KiB on disk."""


@dataclass(frozen=True)
class Calls:
    """Calls of ``block`` bytes at most, ``depth`` of one transfer in flight at a time in each folder.

    Reads and writes of a disk have calls of their own: disks were found that read fastest with few bytes in flight and
    write fastest with many (docs/log.md).
    """

    block: int = 4 * MiB
    depth: int = 1

    def __post_init__(self) -> None:
        if self.block < 1 or self.depth < 1:
            raise ConfigError(
                f"a disk is read and written in calls of 1 byte or more, 1 at a time or more, got a block of "
                f"{self.block} and a depth of {self.depth}"
            )

    def __str__(self) -> str:
        return f"calls of {format_bytes(self.block)}, {self.depth} at a time"
