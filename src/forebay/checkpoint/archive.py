"""A plain ``state_dict`` in the file that ``torch.save`` writes, part of a tensor in memory at a time.

Such a file is a zip archive, uncompressed: a pickle that describes the tensors, and the bytes of each storage. torch
writes the description, from tensors without values, and leaves room for the bytes; they are filled in afterwards. Where
that room begins is read from the archive's own directory, and nothing is unpickled.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import IO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.checkpoint.source import Source, kept_dtype

__all__ = ["FILE", "write_archive"]

FILE = "model.pt"

LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a member of a zip archive: the lengths of its name and of what is between that and its bytes."""


def write_archive(source: Source, folder: Path, dtype: torch.dtype | None) -> list[Path]:
    """Writes the tensors of ``source`` into ``folder``, so that ``torch.load`` gives the state dict with tied names
    tied. Returns the file; raises ``OSError`` after removing what was written."""
    part = folder / f"{FILE}.part"
    try:
        _describe(source, part, dtype)
        with zipfile.ZipFile(part) as archive:
            members = {info.filename.partition("/data/")[2]: info for info in archive.infolist()}
        with part.open("r+b") as file:
            for number, (name, entry) in enumerate(source.entries.items()):
                _seek_bytes(file, members[str(number)])
                for piece in source.raw(name, kept_dtype(entry, dtype)):
                    file.write(piece)
                    del piece  # or the next one, or tensor, would be read while this one is still held
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / FILE)
    finally:
        part.unlink(missing_ok=True)
    return [folder / FILE]


def _seek_bytes(file: IO[bytes], member: zipfile.ZipInfo) -> None:
    file.seek(member.header_offset)
    lengths = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    file.seek(member.header_offset + LOCAL_HEADER.size + sum(lengths))


def _describe(source: Source, path: Path, dtype: torch.dtype | None) -> None:
    """The archive with room for the bytes: storage ``n`` is that of the ``n``-th of ``source.entries``."""
    with FakeTensorMode():
        state = {n: torch.empty(e.shape, dtype=kept_dtype(e, dtype), device="cpu") for n, e in source.entries.items()}
    state.update({alias: state[name] for alias, name in source.aliases.items()})
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, path)
