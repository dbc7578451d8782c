"""Putting a prepared model and its optimizer back to where a checkpoint left them.

First everything is looked at: the manifest, the size and the header of every file, the names, dtypes and shapes of all
tensors, the parameter groups, the scheduler. What does not fit is refused then, and nothing has changed. After that
bytes go from the files to where they are at home, states chunk by chunk, and their checksums are compared on the way.
Where that fails the model has no values, and says so, until it gets some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from forebay.checkpoint.copies import buffer_entry, kept_states
from forebay.checkpoint.encoding import decode
from forebay.checkpoint.generations import Generations
from forebay.checkpoint.halved import JoiningReader
from forebay.checkpoint.homes import HomesReader
from forebay.checkpoint.inventory import BUFFER, VALUE, Entry, entries_of, entry_name
from forebay.checkpoint.manifest import Group, Manifest
from forebay.checkpoint.passing import Onward, Passing
from forebay.checkpoint.pieces import PieceReader
from forebay.checkpoint.randomness import restore
from forebay.checkpoint.saving import Scheduler, groups_of, kept_buffers
from forebay.errors import ConfigError, OptimizerError, UsageError
from forebay.layout import MASTER, RESIDUAL, Chunk, Piece, needs_master
from forebay.model import Parameter
from forebay.runtime.blockstate import BlockState
from forebay.runtime.session import Phase, Session
from forebay.runtime.sparse import forget
from forebay.runtime.tensors import bytes_before, dtype_of, elements
from forebay.states import Masters, form_of

__all__ = ["Resumed", "resume_checkpoint"]


@dataclass(frozen=True)
class Resumed:
    """Where training goes on: ``step`` optimizer steps have been taken, and ``extra`` is what ``forebay.save`` was
    given to keep."""

    step: int
    extra: Any


def resume_checkpoint(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generations: Generations,
    scheduler: Scheduler | None,
) -> Resumed:
    """Reads the checkpoint that stands. See ``forebay.resume``."""
    if session.phase is not Phase.IDLE:
        session.expect_open()
        raise UsageError("forebay.resume has no place within a forward or a backward; call it before the loop")
    session.finish_saving()
    manifest = generations.expect_current()
    state = _scheduler_state(manifest, scheduler)
    settings = _settings(manifest, groups_of(session, optimizer))
    buffers = kept_buffers(model)
    expected = _expected(session, manifest)
    expected |= {e.name: e for e in (buffer_entry(name, buffer) for name, buffer in buffers.items())}
    _check_steps(manifest, session)
    extra = decode(manifest.extra)
    with ExitStack() as stack:
        reader = stack.enter_context(_Tensors(generations, manifest, expected, session))
        stack.enter_context(torch.no_grad())
        blocks = stack.enter_context(session.contents.replacing())
        for block in blocks.values():
            _read_block(block, reader, expected)
            block.steps.update((name, manifest.steps[name]) for name in block.steps)
        _read_buffers(buffers, reader)
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        _set(group, session.rule.loaded(group, saved))
    if scheduler is not None:
        scheduler.load_state_dict(state)
    # Last: nothing draws between this and the next step.
    restore(session, manifest.randomness)
    return Resumed(manifest.step, extra)


@final
class _Tensors:
    """The tensors of ``manifest``, of which those of ``expected`` and no others must be there: in files of their own,
    or where training kept them. A context manager. Raises ``StorageError`` for what is not as it was saved."""

    def __init__(
        self, generations: Generations, manifest: Manifest, expected: Mapping[str, Entry], session: Session
    ) -> None:
        self._homes: HomesReader | None = None
        with ExitStack() as opened:
            homes, files = manifest.homes, generations.files
            if homes is not None:
                of = session.model.blocks, session.state_names
                self._homes = opened.enter_context(HomesReader(files, generations.folder, homes, *of))
            there = frozenset[str]() if self._homes is None else self._homes.names
            halved = {} if self._homes is None else self._homes.halved
            apart = {name: entry for name, entry in expected.items() if name not in there and name not in halved}
            apart |= {one.upper.name: one.upper for one in halved.values() if one.upper.name not in there}
            folder = generations.path_of(manifest.generation)
            self._pieces = opened.enter_context(PieceReader(files, folder, manifest.files, apart))
            self._stack = opened.pop_all()
        self.read = JoiningReader(halved, self._as_they_lie).read

    def _as_they_lie(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the bytes of a tensor from ``offset`` on, the next ones that were not read."""
        reader = self._pieces if self._homes is None or name not in self._homes.names else self._homes
        reader.read(name, offset, buffer)

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _scheduler_state(manifest: Manifest, scheduler: Scheduler | None) -> dict[str, Any]:
    saved = manifest.scheduler
    if saved is None or scheduler is None:
        if (saved is None) != (scheduler is None):
            there, here = ("none", "one") if saved is None else (f"a {saved.get('kind')}", "none")
            raise ConfigError(f"the checkpoint was saved with {there} as scheduler and resume was given {here}")
        return {}
    kind = type(scheduler).__qualname__
    if saved.get("kind") != kind:
        raise ConfigError(
            f"the checkpoint was saved with a {saved.get('kind')} as scheduler, resume was given a {kind}"
        )
    state = decode(saved.get("state"))
    return state if isinstance(state, dict) else {}


def _settings(manifest: Manifest, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The saved settings of each group. Raises ``OptimizerError`` where the groups are others."""
    if [g.parameters for g in manifest.groups] != [g.parameters for g in groups]:
        raise OptimizerError(
            f"the checkpoint was saved with parameter groups of {[len(g.parameters) for g in manifest.groups]} "
            f"parameters, this optimizer has {[len(g.parameters) for g in groups]}, or others in them; make the "
            f"optimizer as it was made"
        )
    return [decode(group.settings) for group in manifest.groups]


def _check_steps(manifest: Manifest, session: Session) -> None:
    trained = {p.name for block in session.model.blocks for p in block.parameters if p.trainable}
    odd = min(trained ^ manifest.steps.keys(), default=None)
    if odd is not None:
        where = "here" if odd in trained else "when the checkpoint was saved"
        raise ConfigError(f"parameter {odd} is trained {where} only; freeze the parameters that were frozen then")


def _set(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        now = group.get(key)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape:
            now.copy_(value)  # whoever holds the tensor goes on changing the learning rate
        else:
            group[key] = value


def _expected(session: Session, manifest: Manifest) -> dict[str, Entry]:
    """The tensors of blocks that the checkpoint must have. Where it has no residuals there were none: every gradient
    went whole. Raises ``ConfigError`` where it has some and this plan sends gradients whole."""
    saved = {name for file in manifest.files for name in file.crc32 if name.startswith(f"{RESIDUAL}.")}
    found: dict[str, Entry] = {}
    for state in session.store.blocks.values():
        names = kept_states(state, session.state_names) if saved else session.state_names
        found |= {entry.name: entry for entry in entries_of(state.block, names)}
    lost = min(saved - found.keys(), default=None)
    if lost is not None:
        raise ConfigError(
            f"the checkpoint has what of gradients no update has had yet ({lost}), and under this plan gradients go "
            f"whole; prepare the model with policy='smart-infinity-compressed', or with the plan of then"
        )
    return found


def _read_block(state: BlockState, reader: _Tensors, expected: Mapping[str, Entry]) -> None:
    passing = Passing()
    home = state.parameters
    with home.replace(0, home.nbytes) as content:
        for parameter in state.block.parameters:
            if not needs_master(parameter):
                values = elements(content, parameter, parameter.offset)
                passing.into(values, partial(reader.read, entry_name(VALUE, parameter)))
        for chunk in state.layout.chunks:
            if chunk.nbytes:
                with state.states.replace(chunk.offset, chunk.nbytes) as states:
                    for name in state.said:
                        for piece, values in _places(state, name, chunk, states):
                            onward = Onward(reader.read, entry_name(name, piece.parameter), bytes_before(name, piece))
                            passing.into(values, onward)
                            if state.layout.masters is Masters.LOWER:
                                state.write_piece(name, chunk, piece, states, content, values)
                            elif name == MASTER:
                                _round(values, content, piece.parameter, piece.start)
    for parameter in state.block.parameters:
        residual, name = state.residuals.get(parameter.name), entry_name(RESIDUAL, parameter)
        if residual is not None and name in expected:
            passing.into(residual, partial(reader.read, name))
        elif residual is not None:
            forget(residual)


def _places(state: BlockState, name: str, chunk: Chunk, states: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Where what one stream says of each piece of ``chunk`` is read into: where it belongs, or, where masters are kept
    as halves, new memory on the host for one piece at a time."""
    form, own = form_of(name), [piece for piece in chunk.pieces if name in state.streams_of(piece.parameter)]
    if state.layout.masters is Masters.LOWER:
        for piece in own:
            yield piece, torch.empty(piece.values(form)[1], dtype=getattr(torch, form.dtype), device="cpu")
    else:
        yield from ((piece, view) for piece, view in state.views(name, chunk, states) if piece in own)


def _round(master: torch.Tensor, content: torch.Tensor, parameter: Parameter, start: int) -> None:
    """Makes elements of a 16-bit parameter from those of its master, as an update does."""
    begin = parameter.offset + start * dtype_of(parameter).itemsize
    nbytes = master.numel() * dtype_of(parameter).itemsize
    content[begin : begin + nbytes].view(dtype_of(parameter)).copy_(master)


def _read_buffers(buffers: Mapping[str, torch.Tensor], reader: _Tensors) -> None:
    passing = Passing()
    for name, buffer in buffers.items():
        values = buffer.detach()
        if not values.is_contiguous():
            values = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
        passing.into(values.reshape(-1), partial(reader.read, f"{BUFFER}.{name}"))
        if not buffer.is_contiguous():
            buffer.copy_(values)
