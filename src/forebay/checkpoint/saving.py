"""Saving a prepared model and its optimizer, so that training goes on from there bit for bit.

Written from where the bytes are at home: states chunk by chunk, those on disk through the buffers that updates pass
through. No tier holds more than it does between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from forebay.checkpoint.encoding import encode
from forebay.checkpoint.generations import Generations
from forebay.checkpoint.inventory import BUFFER, VALUE, Entry, dtype_name, entries_of, entry_name
from forebay.checkpoint.manifest import Group, Manifest, PieceFile
from forebay.checkpoint.passing import Onward, Passing
from forebay.checkpoint.pieces import PieceWriter
from forebay.checkpoint.randomness import capture
from forebay.checkpoint.source import saved_buffers
from forebay.errors import OptimizerError, UsageError
from forebay.layout import needs_master
from forebay.runtime.blockstate import BlockState
from forebay.runtime.session import Phase, Session
from forebay.runtime.tensors import bytes_before, elements

__all__ = ["Scheduler", "buffer_entry", "groups_of", "kept_buffers", "save_checkpoint"]


class Scheduler(Protocol):
    """A learning rate scheduler of torch, or whatever else has a state beside the optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes the state that another one like it had."""


def save_checkpoint(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generations: Generations,
    *,
    step: int,
    scheduler: Scheduler | None,
    extra: Any,
) -> int:
    """Writes a new generation and has it be the one that stands; returns its bytes. See ``forebay.save``."""
    if session.phase is not Phase.IDLE:
        session.expect_open()
        raise UsageError("forebay.save has no place within a forward or a backward; call it after optimizer.step()")
    if step < 0:
        raise UsageError(f"step counts the optimizer steps so far, 0 or more, got {step}")
    # Everything that can be refused is, before a byte is written.
    groups = groups_of(session, optimizer)
    kept = None if scheduler is None else _kept(scheduler)
    plain = encode(extra, "extra")
    blocks, buffers = session.contents.complete(), kept_buffers(model)
    names = session.state_names
    pieces: list[tuple[list[Entry], Callable[[PieceWriter], None]]] = [
        (list(entries_of(state.block, names)), partial(_write_block, state)) for state in blocks.values()
    ]
    if buffers:
        pieces.append(([buffer_entry(n, b) for n, b in buffers.items()], partial(_write_buffers, buffers)))
    old = generations.current()
    needed = sum(entry.nbytes for entries, _ in pieces for entry in entries)
    number = generations.begin(old, needed)
    try:
        files = tuple(_write_pieces(generations, number, pieces))
        steps = {name: count for state in blocks.values() for name, count in state.steps.items()}
        manifest = Manifest(step, number, files, steps, groups, kept, capture(session), plain)
        generations.commit(manifest, old)
    except BaseException:
        generations.abandon(number)
        raise
    return sum(file.nbytes for file in files)


def groups_of(session: Session, optimizer: torch.optim.Optimizer) -> tuple[Group, ...]:
    """The parameter groups, by plain names. Raises ``OptimizerError`` for an optimizer of another model, and
    ``ConfigError`` for a setting that cannot be kept."""
    names = {id(parameter): name for name, parameter in session.parameters.items()}
    made = []
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in names for parameter in group["params"]):
            raise OptimizerError("this optimizer is not of this model; give the one that forebay.prepare returned")
        settings = {key: value for key, value in group.items() if key != "params"}
        where = f"param_groups[{number}]"
        made.append(Group(tuple(names[id(p)] for p in group["params"]), encode(settings, where)))
    return tuple(made)


def kept_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the state dict: those that a module cannot compute again; each once."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, buffer in saved_buffers(model).items():
        first.setdefault(id(buffer), (name, buffer))
    return dict(first.values())


def _kept(scheduler: Scheduler) -> dict[str, Any]:
    return {"kind": type(scheduler).__qualname__, "state": encode(dict(scheduler.state_dict()), "scheduler")}


def buffer_entry(name: str, buffer: torch.Tensor) -> Entry:
    """The tensor that a buffer becomes."""
    return Entry(f"{BUFFER}.{name}", dtype_name(str(buffer.dtype).removeprefix("torch.")), tuple(buffer.shape))


def _write_pieces(
    generations: Generations, number: int, pieces: Sequence[tuple[list[Entry], Callable[[PieceWriter], None]]]
) -> Iterator[PieceFile]:
    folder = generations.path_of(number)
    for place, (entries, write) in enumerate(pieces):
        writer = PieceWriter(generations.files, folder / f"{place:05d}.safetensors", entries)
        try:
            write(writer)
            yield writer.finish()
        finally:
            writer.abandon()  # closes it, if it is not finished


def _write_block(state: BlockState, writer: PieceWriter) -> None:
    passing = Passing()
    alone = [p for p in state.block.parameters if not needs_master(p)]
    if alone:
        content = state.parameters.look(0, state.parameters.nbytes)
        for parameter in alone:
            values = elements(content, parameter, parameter.offset)
            passing.out(values, partial(writer.write, entry_name(VALUE, parameter)))
    for chunk in state.layout.chunks:
        if not chunk.nbytes:
            continue  # an optimizer without states, and no master
        content = state.states.look(chunk.offset, chunk.nbytes)
        for name in state.layout.streams:
            for piece, values in state.views(name, chunk, content):
                if name in state.streams_of(piece.parameter):
                    onward = Onward(writer.write, entry_name(name, piece.parameter), bytes_before(name, piece))
                    passing.out(values, onward)


def _write_buffers(buffers: Mapping[str, torch.Tensor], writer: PieceWriter) -> None:
    passing = Passing()
    for name, buffer in buffers.items():
        passing.out(buffer.detach().contiguous().reshape(-1), partial(writer.write, f"{BUFFER}.{name}"))
