"""Files of tensors: safetensors, written and read a part of a tensor at a time, with a checksum for each tensor.

A file starts with the length of its header (8 bytes, little endian), then the header (JSON, spaces may follow), then
the tensors, one after the other. What a checkpoint holds is known before it is written, so the header comes first, and
tensors can be written as their bytes come: an optimizer's states lie in chunks, each with a part of several tensors.

Nothing in a file is believed. Its size is the manifest's, its header names the tensors that the model has, in their
dtype and shape, and their bytes fill the rest of the file without a gap; only then is one of them read. Their checksums
(CRC-32, as in zlib) are compared as they are read.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from forebay.checkpoint.files import Files, read_whole, refused, write_whole
from forebay.checkpoint.inventory import Entry
from forebay.checkpoint.manifest import PieceFile
from forebay.errors import ForebayError, StorageError

__all__ = ["PieceReader", "PieceWriter"]

_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100 * 1000**2
"""Bytes: what the safetensors library takes at most."""


@final
class _Part:
    """How far a tensor is written or read: the bytes done, from its first one on, and their checksum."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.done = 0
        self.crc32 = 0

    def advance(self, name: str, offset: int, buffer: memoryview) -> None:
        # A checksum runs over bytes in their order.
        if offset != self.done or offset + len(buffer) > self.nbytes:
            raise ForebayError(
                f"bytes {offset} to {offset + len(buffer)} of {name} come after {self.done} of {self.nbytes} bytes"
            )
        self.crc32 = zlib.crc32(buffer, self.crc32)
        self.done += len(buffer)


@final
class PieceWriter:
    """One new file at ``path`` for ``entries``. Each tensor is written from its first byte to its last, in any turn
    with the others. Raises ``StorageError``, or ``DiskFull``, for what the operating system refuses."""

    def __init__(self, files: Files, path: Path, entries: Iterable[Entry]) -> None:
        self._files = files
        self._path = path
        self._parts: dict[str, _Part] = {}
        header, end = self._laid_out(entries)
        self._begin = len(header)
        self._nbytes = self._begin + end
        try:
            self._fd: int | None = files.create(path)
        except OSError as error:
            raise refused(files, "make", path, error, self._nbytes) from error
        try:
            self._write(memoryview(header), 0)
        except BaseException:
            self.abandon()
            raise

    def _laid_out(self, entries: Iterable[Entry]) -> tuple[bytes, int]:
        named: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            self._parts[entry.name] = _Part(end, entry.nbytes)
            begin, end = end, end + entry.nbytes
            named[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
        header = json.dumps(named).encode()
        header = header.ljust(-(-len(header) // 8) * 8)
        return _LENGTH.pack(len(header)) + header, end

    def write(self, name: str, offset: int, buffer: memoryview) -> None:
        """Writes the bytes of a tensor from ``offset`` on, the next ones that it lacks."""
        part = self._parts[name]
        part.advance(name, offset, buffer)
        self._write(buffer, self._begin + part.start + offset)

    def _write(self, buffer: memoryview, offset: int) -> None:
        if self._fd is None:
            raise ForebayError(f"{self._path} is finished; nothing can be written to it")
        try:
            write_whole(self._files, self._fd, buffer, offset)
        except OSError as error:
            raise refused(self._files, f"write {len(buffer)} bytes to", self._path, error, len(buffer)) from error

    def finish(self) -> PieceFile:
        """Waits until the file is on the disk, and closes it."""
        lacking = [name for name, part in self._parts.items() if part.done != part.nbytes]
        if lacking or self._fd is None:
            raise ForebayError(f"{self._path} is closed, or lacks bytes of {lacking[:1]}")
        try:
            self._files.sync(self._fd)
            # Nobody reads it again while the run goes on, and its pages would count against a cgroup's memory.
            self._files.drop(self._fd)
            fd, self._fd = self._fd, None
            self._files.close(fd)
        except OSError as error:
            raise refused(self._files, "finish", self._path, error) from error
        return PieceFile(self._path.name, self._nbytes, {name: part.crc32 for name, part in self._parts.items()})

    def abandon(self) -> None:
        """Closes the file, if it is open; what was written means nothing. Raises nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # what was to be written is given up anyway
                self._files.close(fd)


@final
class PieceReader:
    """The tensors of ``listed`` files in ``folder``, of which those of ``expected`` and no others must be there.

    Raises ``StorageError`` for a file that is missing, short, damaged or holds something else. Use it as a context
    manager: at most one file is open at a time.
    """

    def __init__(self, files: Files, folder: Path, listed: Sequence[PieceFile], expected: Mapping[str, Entry]) -> None:
        self._files = files
        self._folder = folder
        self._file_of: dict[str, PieceFile] = {}
        self._parts: dict[str, _Part] = {}
        self._open: tuple[str, int] | None = None
        try:
            for listed_file in listed:
                self._look_into(listed_file, expected)
        except BaseException:
            self.close()
            raise
        missing = sorted(expected.keys() - self._parts.keys())
        if missing:
            raise StorageError(
                f"the checkpoint in {folder} has no {missing[0]} ({len(missing)} tensors are missing); it was saved "
                f"from another model or optimizer"
            )

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file that is open."""
        opened, self._open = self._open, None
        if opened is not None:
            with contextlib.suppress(OSError):  # nothing was written
                self._files.close(opened[1])

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes of a tensor from ``offset`` on, the next ones that were not read. With the
        last of them the tensor's checksum is compared."""
        part, source = self._parts[name], self._file_of[name]
        path = self._folder / source.name
        try:
            read_whole(self._files, self._descriptor(path), buffer, part.start + offset)
        except OSError as error:
            raise refused(self._files, f"read {name} from", path, error) from error
        except EOFError:
            raise StorageError(f"{path} ends within {name}; the file was cut while it was read") from None
        part.advance(name, offset, buffer)
        if part.done == part.nbytes and part.crc32 != source.crc32[name]:
            raise StorageError(
                f"{name} in {path} is not what was saved: its checksum is {part.crc32:08x} and was "
                f"{source.crc32[name]:08x}; the disk has changed bytes of it"
            )

    def _descriptor(self, path: Path) -> int:
        if self._open is not None and self._open[0] == path.name:
            return self._open[1]
        self.close()
        fd = self._files.open(path)
        self._open = path.name, fd
        return fd

    def _look_into(self, listed: PieceFile, expected: Mapping[str, Entry]) -> None:
        path = self._folder / listed.name
        try:
            fd = self._descriptor(path)
            nbytes = self._files.size(fd)
            if nbytes != listed.nbytes:
                raise StorageError(
                    f"{path} has {nbytes} bytes and {listed.nbytes} were saved; the file was cut or changed"
                )
            named, begin = self._header(fd, path, nbytes)
        except OSError as error:
            raise refused(self._files, "read", path, error) from error
        except EOFError:
            raise StorageError(f"{path} ends within its header; the file was cut") from None
        named.pop("__metadata__", None)
        if named.keys() != listed.crc32.keys():
            odd = min(named.keys() ^ listed.crc32.keys())
            raise StorageError(f"{path} and the manifest do not name the same tensors: {odd} is in one of them only")
        end = 0
        # Tensors fill the file in the order of their names in the header, so that no two of them share a byte.
        for name, said in named.items():
            entry = expected.get(name)
            if entry is None:
                raise StorageError(
                    f"{path} has {name}, which this model and optimizer do not have; it was saved from others"
                )
            here, end = end, end + entry.nbytes
            wanted = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [here, end]}
            if said != wanted:
                other = f"{name} in {path} is {_shown(said)}, the model's is {_shown(wanted)}"
                raise StorageError(other + _of_masters(said, entry))
            self._parts[name] = _Part(begin + here, entry.nbytes)
            self._file_of[name] = listed
        if begin + end != nbytes:
            raise StorageError(f"{path} has {nbytes - begin} bytes of tensors and its header names {end}")

    def _header(self, fd: int, path: Path, nbytes: int) -> tuple[dict[str, Any], int]:
        """The header, and where the tensors begin."""
        prefix = bytearray(_LENGTH.size)
        read_whole(self._files, fd, memoryview(prefix), 0)
        length = int(_LENGTH.unpack(prefix)[0])
        if length > min(_LONGEST_HEADER, nbytes - len(prefix)):
            raise StorageError(f"{path} is damaged: its header says that it has {length} bytes, the file has {nbytes}")
        text = bytearray(length)
        read_whole(self._files, fd, memoryview(text), len(prefix))
        try:
            named = json.loads(text)
        except (ValueError, RecursionError):
            named = None
        if not isinstance(named, dict):
            raise StorageError(f"{path} is damaged: its header is no table of tensors")
        return named, len(prefix) + length


def _of_masters(said: object, entry: Entry) -> str:
    """What to do where a value was saved in fp32 and is wanted in bf16, or the other way round."""
    if not isinstance(said, dict) or {said.get("dtype"), entry.dtype} != {"F32", "BF16"}:
        return ""
    return (
        "; an optimizer with stochastic_rounding keeps parameters in bf16 as they are, and one without their fp32 "
        "masters: resume with one of the kind that was saved, or load its state_dict()"
    )


def _shown(said: object) -> str:
    if not isinstance(said, dict):
        return "no tensor"
    return f"{said.get('dtype')} {said.get('shape')} at bytes {said.get('data_offsets')}"
