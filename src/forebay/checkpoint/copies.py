"""What a checkpoint has to copy: one file of tensors for each block that has some, and one for the buffers.

What is at home in memory may be copied while training goes on: its next update waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import final

import torch

from forebay.checkpoint.files import Files
from forebay.checkpoint.inventory import BUFFER, Entry, dtype_name, entries_of, entry_name, value_of
from forebay.checkpoint.manifest import PieceFile
from forebay.checkpoint.passing import Onward, Passing
from forebay.checkpoint.pieces import PieceWriter
from forebay.device.base import Completion, Device
from forebay.errors import ForebayError
from forebay.layout import LOWER, RESIDUAL, Chunk, Piece
from forebay.memory import Tier
from forebay.model import Parameter
from forebay.runtime.blockstate import BlockCopy, BlockState
from forebay.runtime.homes import Home, MemoryHome
from forebay.runtime.tensors import bytes_before, elements
from forebay.states import Masters
from forebay.timeline import Lane

__all__ = ["Copying", "buffer_entry", "copies_of_blocks", "copy_of_buffers", "kept_states"]


@final
class Copying:
    """A file with ``entries``, which ``write`` writes. ``reads`` are the homes in memory from which it does so, if that
    can be done while training goes on; else none."""

    def __init__(self, entries: Sequence[Entry], write: Callable[[PieceWriter], None], reads: tuple[Home, ...]) -> None:
        self.reads = reads
        self._entries = entries
        self._write = write
        self._file: PieceFile | None = None
        self._error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(entry.nbytes for entry in self._entries)

    def run(self, files: Files, path: Path) -> None:
        """Writes the file. Raises ``StorageError`` or ``DiskFull``."""
        writer = PieceWriter(files, path, self._entries)
        try:
            self._write(writer)
            self._file = writer.finish()
        finally:
            writer.abandon()  # closes it, if it is not finished

    def queue(self, device: Device, files: Files, path: Path) -> Completion:
        """Has it written beside the steps that follow, when what was asked for until now is at home."""
        written = [home.written for home in self.reads if home.written is not None]
        run = partial(self._run_aside, files, path)
        job = device.submit(Lane.DISK_WRITE, run, after=written, nbytes=self.nbytes, what="checkpoint")
        for home in self.reads:
            home.saved_by(job)
        return job

    def _run_aside(self, files: Files, path: Path) -> None:
        try:
            self.run(files, path)
        except BaseException as error:  # the checkpoint's, which tells it: updates wait for this job, and must go on
            self._error = error

    def finished(self) -> PieceFile:
        """What was written. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        if self._file is None:
            raise ForebayError("a file of a checkpoint was not written")
        return self._file


def copies_of_blocks(
    blocks: Iterable[BlockState], state_names: tuple[str, ...], in_place: Collection[str]
) -> list[Copying]:
    """What is copied of ``blocks``, by their current copies as they are now: all but ``in_place``."""
    made = []
    for state in blocks:
        names = kept_states(state, state_names)
        entries = [e for e in entries_of(state.block, names, _masters(state, in_place)) if e.name not in in_place]
        if entries:
            copy = state.current
            made.append(
                Copying(entries, partial(_write_block, state, copy, in_place), _in_memory(state, copy, in_place))
            )
    return made


def kept_states(state: BlockState, state_names: tuple[str, ...]) -> tuple[str, ...]:
    """What is kept of a block beside its parameters: the optimizer's states, and what of its gradients no update has
    had."""
    return (*state_names, RESIDUAL) if state.residuals else state_names


def copy_of_buffers(buffers: Mapping[str, torch.Tensor]) -> list[Copying]:
    """What is copied of a model's buffers, if it has any."""
    entries = [buffer_entry(name, buffer) for name, buffer in buffers.items()]
    return [Copying(entries, partial(_write_buffers, buffers), ())] if entries else []


def buffer_entry(name: str, buffer: torch.Tensor) -> Entry:
    """The tensor that a buffer becomes."""
    return Entry(f"{BUFFER}.{name}", dtype_name(str(buffer.dtype).removeprefix("torch.")), tuple(buffer.shape))


def _in_memory(state: BlockState, copy: BlockCopy, in_place: Collection[str]) -> tuple[Home, ...]:
    """The homes from which a block is copied, if all of them are on the host: what is on the device is updated in the
    order of compute, which waits for no job."""
    moving = _moving(state, in_place)
    joined = moving and state.layout.masters is Masters.LOWER
    needed = [copy.parameters] if _alone(state, in_place) or joined else []
    if moving:
        needed.append(copy.states)
    on_host = state.placement.states is not Tier.DEVICE and all(isinstance(home, MemoryHome) for home in needed)
    return tuple(needed) if on_host else ()


def _masters(state: BlockState, in_place: Collection[str]) -> Masters:
    """How the checkpoint has the masters of a block: whole, unless the lower halves stay where they are."""
    stay = any(entry_name(LOWER, parameter) in in_place for parameter in state.block.parameters)
    return Masters.LOWER if stay else Masters.WHOLE


def _alone(state: BlockState, in_place: Collection[str]) -> dict[str, Parameter]:
    """The parameters that are copied from where they are, by the names of what they become: those without a whole
    master that do not stay."""
    masters = _masters(state, in_place)
    values = ((value_of(p, masters), p) for p in state.block.parameters)
    named = {entry_name(value, p): p for value, p in values if value is not None}
    return {name: p for name, p in named.items() if name not in in_place}


def _moving(state: BlockState, in_place: Collection[str]) -> list[Chunk]:
    """The chunks of states that are copied: of an optimizer without states, and without masters, there are none."""
    return [chunk for chunk in state.layout.chunks if chunk.nbytes and not _stays(state, chunk.pieces, in_place)]


def _stays(state: BlockState, pieces: Iterable[Piece], in_place: Collection[str]) -> bool:
    """Whether the states of ``pieces`` stay where they are."""
    return any(entry_name(name, p.parameter) in in_place for p in pieces for name in state.streams_of(p.parameter))


def _write_block(state: BlockState, copy: BlockCopy, in_place: Collection[str], writer: PieceWriter) -> None:
    passing = Passing()
    alone, moving = _alone(state, in_place), _moving(state, in_place)
    values_at_home = torch.empty(0, dtype=torch.uint8, device="cpu")
    if alone or (moving and state.layout.masters is Masters.LOWER):
        values_at_home = copy.parameters.held(0, copy.parameters.nbytes)
    for name, parameter in alone.items():
        passing.out(elements(values_at_home, parameter, parameter.offset), partial(writer.write, name))
    for chunk in moving:
        content = copy.states.held(chunk.offset, chunk.nbytes)
        for name in state.said:
            for piece, values in state.values(name, chunk, content, values_at_home):
                onward = Onward(writer.write, entry_name(name, piece.parameter), bytes_before(name, piece))
                passing.out(values, onward)
    # Only where the states are on disk, which is copied when all updates are at home.
    for parameter in state.block.parameters:
        if parameter.name in state.residuals:
            passing.out(state.residuals[parameter.name], partial(writer.write, entry_name(RESIDUAL, parameter)))


def _write_buffers(buffers: Mapping[str, torch.Tensor], writer: PieceWriter) -> None:
    passing = Passing()
    for name, buffer in buffers.items():
        passing.out(buffer.detach().contiguous().reshape(-1), partial(writer.write, f"{BUFFER}.{name}"))
