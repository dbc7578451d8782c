"""What a checkpoint names in place: homes on disk, of which training writes the other copy from then on.

A save has no more to do for these than to note where they are and to wait until the disk has them. Their checksums are
those that were made when they were written (``tiers.kept``); what was not written since is read. All of them are
compared before a resume uses a byte.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import final

from forebay.checkpoint.files import Files, read_whole, refused
from forebay.checkpoint.halved import Halved, halved_in
from forebay.checkpoint.inventory import entries_of, entry_name, value_of
from forebay.checkpoint.manifest import Home, HomeFile, Homes, Stretch
from forebay.errors import ForebayError, StorageError
from forebay.layout import PAGE, StateLayout, align, has_stream, state_layout
from forebay.model import Block
from forebay.plans import Streaming
from forebay.runtime.blockstate import BlockState
from forebay.runtime.homes import DiskHome
from forebay.runtime.tensors import bytes_before
from forebay.states import Masters, form_of, masters_for
from forebay.tiers.kept import KeptFile, KeptFolder
from forebay.tiers.sums import checksum

__all__ = ["HomesReader", "InPlace"]

_READ = 32 * PAGE
"""Bytes that are read at a time to compare a checksum."""

_PARAMETERS, _STATES = "parameters", "states"


@dataclass(frozen=True)
class _Extent:
    """Bytes of a tensor from byte ``begin`` of it on: where they are in the file of ``what``."""

    begin: int
    what: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Noted:
    """What of a block is in place, as it was when it was noted: ``home`` without checksums, and the parts that have one
    (offset and bytes), of its parameters and of its states."""

    home: Home
    parameters: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, int], ...]


@final
class InPlace:
    """What ``blocks`` have in the files of ``kept`` (None: nothing), by their current copies as they are now. ``names``
    are those tensors, ``nbytes`` their bytes."""

    def __init__(
        self,
        blocks: Mapping[str, BlockState],
        kept: KeptFolder | None,
        streaming: Streaming,
        state_names: tuple[str, ...],
    ) -> None:
        self._kept = kept
        self._streaming = streaming
        self._state_names = state_names
        self._blocks: list[_Noted] = []
        self.nbytes = 0
        names = set[str]()
        for state in blocks.values() if kept is not None else ():
            parameters, states = _there(state)
            if parameters is None and states is None:
                continue
            found = _extents(state.block, state.layout, parameters, states)
            names |= found.keys()
            self.nbytes += sum(extent.nbytes for extents in found.values() for extent in extents)
            tensors = _tensors(state.block, state_names, _masters(state.layout, states), found)
            self._blocks.append(_noted(state, parameters, states, tensors))
        self.names = frozenset(names)

    def noted(self) -> Homes | None:
        """What a manifest says of them, when they are written. Called from any thread."""
        if self._kept is None or not self._blocks:
            return None
        files = {what: HomeFile(file.path.name, file.nbytes) for what, file in self._kept.files.items()}
        blocks = tuple(
            Home(
                noted.home.block,
                noted.home.tensors,
                _summed(noted.home.parameters, self._kept.files.get(_PARAMETERS), noted.parameters),
                _summed(noted.home.states, self._kept.files.get(_STATES), noted.states),
            )
            for noted in self._blocks
        )
        chunk, masters = self._streaming.update_chunk, self._streaming.masters
        return Homes(chunk, self._state_names, files.get(_PARAMETERS), files.get(_STATES), blocks, masters)


def _noted(state: BlockState, parameters: int | None, states: int | None, tensors: int) -> _Noted:
    home = Home(
        state.block.name,
        tensors,
        None if parameters is None else Stretch(parameters, (), state.current.parameters.nbytes),
        None if states is None else Stretch(states, (), state.current.states.nbytes),
    )
    whole = ((0, state.current.parameters.nbytes),)
    return _Noted(home, whole, tuple((chunk.offset, chunk.nbytes) for chunk in state.layout.chunks if chunk.nbytes))


def _there(state: BlockState) -> tuple[int | None, int | None]:
    """Where the parameters and the states of a block begin in their files; None where they are somewhere else."""
    homes = state.current.parameters, state.current.states
    parameters, states = (home.offset if isinstance(home, DiskHome) else None for home in homes)
    masters = _masters(state.layout, states)
    # Those that have a whole master are made from it.
    needed = any(value_of(parameter, masters) is not None for parameter in state.block.parameters)
    return parameters if needed else None, states


def _masters(layout: StateLayout, states: int | None) -> Masters:
    """How a checkpoint has the masters of a block: as they are where its ``states`` are in place, else whole."""
    return Masters.WHOLE if states is None else layout.masters


def _summed(stretch: Stretch | None, file: KeptFile | None, parts: Sequence[tuple[int, int]]) -> Stretch | None:
    if stretch is None or file is None:
        return None
    sums = []
    for offset, nbytes in parts:
        known = file.checksum(stretch.offset + offset, nbytes)
        # Values that were loaded, and states that no step has written yet, are read.
        sums.append(_sum(file.read, stretch.offset + offset, nbytes) if known is None else known)
    return replace(stretch, checksums=tuple(sums))


def _sum(read: Callable[[int, memoryview], None], offset: int, nbytes: int) -> int:
    """The checksum of so many bytes that ``read`` gives from ``offset`` on."""
    buffer = memoryview(bytearray(min(_READ, nbytes)))
    found = done = 0
    while done < nbytes:
        part = buffer[: nbytes - done]
        read(offset + done, part)
        found, done = checksum(part, found), done + len(part)
    return found


def _extents(block: Block, layout: StateLayout, parameters: int | None, states: int | None) -> dict[str, list[_Extent]]:
    """Where the tensors of ``block`` are that are in place, each from its first byte to its last. ``parameters`` and
    ``states`` is where those of the block begin in their files (None: they are not there)."""
    found: dict[str, list[_Extent]] = {}
    for parameter in block.parameters:
        value = value_of(parameter, _masters(layout, states))
        if parameters is not None and value is not None:
            extent = _Extent(0, _PARAMETERS, parameters + parameter.offset, parameter.nbytes)
            found[entry_name(value, parameter)] = [extent]
    if states is None:
        return found
    for chunk in layout.chunks:
        for stream, (start, _) in layout.spans(chunk).items():
            form = form_of(stream)
            for piece in chunk.pieces:
                if not has_stream(stream, piece.parameter):
                    continue
                at = states + chunk.offset + start + chunk.before(form, piece) * form.itemsize
                nbytes = piece.values(form)[1] * form.itemsize
                extent = _Extent(bytes_before(stream, piece), _STATES, at, nbytes)
                found.setdefault(entry_name(stream, piece.parameter), []).append(extent)
    return found


def _tensors(block: Block, state_names: tuple[str, ...], masters: Masters, names: Iterable[str]) -> int:
    """The checksum of what ``names`` are."""
    wanted = frozenset(names)
    said = [[e.name, e.dtype, list(e.shape)] for e in entries_of(block, state_names, masters) if e.name in wanted]
    return zlib.crc32(json.dumps(said).encode())


@final
class HomesReader:
    """The tensors of ``blocks`` that ``homes``, in ``folder``, has in place, ``names``. ``halved`` are the masters of
    which it has the lower half there, by the names that whole ones would have. Use it as a context manager.

    Raises ``StorageError`` for a file that is missing, cut or damaged, and for homes of another model or optimizer.
    """

    def __init__(
        self, files: Files, folder: Path, homes: Homes, blocks: Iterable[Block], state_names: tuple[str, ...]
    ) -> None:
        self._files = files
        self._folder = folder
        self.halved: dict[str, Halved] = {}
        self._extents: dict[str, list[_Extent]] = {}
        self._open: dict[str, tuple[Path, int]] = {}
        if homes.state_names != state_names:
            raise StorageError(
                f"the checkpoint in {folder} has the states {', '.join(homes.state_names)} and this optimizer has "
                f"{', '.join(state_names)}; it was saved from another optimizer"
            )
        blocks = tuple(blocks)
        trained = {p.dtype for block in blocks for p in block.parameters if p.trainable}
        if homes.masters is not Masters.WHOLE and masters_for(state_names, trained) is not homes.masters:
            raise StorageError(
                f"the checkpoint in {folder} has of each master the half that a parameter in bfloat16 is not, and this "
                f"model trains {', '.join(sorted(trained))}; it was saved from another model"
            )
        try:
            for what, file in ((_PARAMETERS, homes.parameters), (_STATES, homes.states)):
                if file is not None:
                    self._expect(what, file)
            known = {block.name: block for block in blocks}
            for home in homes.blocks:
                self._look_into(home, known.get(home.block), homes)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        """The tensors in place."""
        return frozenset(self._extents)

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes of a tensor from ``offset`` on."""
        extents = self._extents[name]
        place = bisect_right(extents, offset, key=lambda extent: extent.begin) - 1
        done = 0
        while done < len(buffer):
            extent = extents[place]
            inside = offset + done - extent.begin
            length = min(extent.nbytes - inside, len(buffer) - done)
            if length <= 0:
                raise ForebayError(f"{name} has no byte {offset + done}")
            self._read(extent.what, extent.offset + inside, buffer[done : done + length])
            done, place = done + length, place + 1

    def __enter__(self) -> HomesReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            with contextlib.suppress(OSError):  # nothing was written
                self._files.close(self._open.popitem()[1][1])

    def _expect(self, what: str, file: HomeFile) -> None:
        path = self._folder / file.name
        try:
            fd = self._files.open(path)
            self._open[what] = path, fd
            nbytes = self._files.size(fd)
        except OSError as error:
            raise refused(self._files, "read", path, error) from error
        if nbytes != file.nbytes:
            raise StorageError(f"{path} has {nbytes} bytes and had {file.nbytes}; the file was cut or changed")

    def _look_into(self, home: Home, block: Block | None, homes: Homes) -> None:
        layout, found = self._laid_out(home, block, homes)
        if block is None or layout is None:
            raise StorageError(
                f"the checkpoint in {self._folder} has a block {home.block} that this model does not have, or has in "
                f"another form; it was saved from another model or optimizer"
            )
        self._extents |= found
        self.halved |= halved_in(block, found)
        if home.parameters is not None:
            self._compare(home, _PARAMETERS, home.parameters, [(0, align(block.nbytes, PAGE))])
        if home.states is not None:
            chunks = [(chunk.offset, chunk.nbytes) for chunk in layout.chunks if chunk.nbytes]
            self._compare(home, _STATES, home.states, chunks)

    @staticmethod
    def _laid_out(home: Home, block: Block | None, homes: Homes) -> tuple[StateLayout | None, dict[str, list[_Extent]]]:
        """How the states of ``block`` lie there, and where its tensors are; None where they are not those of
        ``home``."""
        if block is None:
            return None, {}
        layout = state_layout(block, homes.state_names, homes.update_chunk, homes.masters)
        parameters, states = (None if stretch is None else stretch.offset for stretch in (home.parameters, home.states))
        found = _extents(block, layout, parameters, states)
        told = _tensors(block, homes.state_names, _masters(layout, states), found)
        return layout if told == home.tensors else None, found

    def _compare(self, home: Home, what: str, stretch: Stretch, parts: Sequence[tuple[int, int]]) -> None:
        path = self._open[what][0]
        if len(stretch.checksums) != len(parts):
            raise StorageError(f"{path}: the {what} of block {home.block} have {len(parts)} parts, not the manifest's")
        for (offset, nbytes), known in zip(parts, stretch.checksums, strict=True):
            found = _sum(partial(self._read, what), stretch.offset + offset, nbytes)
            if found != known:
                raise StorageError(
                    f"the {what} of block {home.block} in {path} are not what was saved: the checksum at byte "
                    f"{stretch.offset + offset} is {found:08x} and was {known:08x}; the disk has changed bytes of it"
                )

    def _read(self, what: str, offset: int, buffer: memoryview) -> None:
        path, fd = self._open[what]
        try:
            read_whole(self._files, fd, buffer, offset)
        except OSError as error:
            raise refused(self._files, "read", path, error) from error
        except EOFError:
            raise StorageError(f"{path} ends before byte {offset + len(buffer)}; the file was cut") from None
