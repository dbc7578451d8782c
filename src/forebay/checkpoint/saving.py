"""Saving a prepared model and its optimizer, so that training goes on from there bit for bit.

Written from where the bytes are at home: states chunk by chunk, those on disk through the buffers that updates pass
through. No tier holds more than it does between two steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import torch
from torch import nn

from forebay.checkpoint.copies import copies_of_blocks, copy_of_buffers
from forebay.checkpoint.encoding import encode
from forebay.checkpoint.ending import Ending
from forebay.checkpoint.generations import Generations
from forebay.checkpoint.homes import InPlace
from forebay.checkpoint.manifest import Group, Manifest
from forebay.checkpoint.randomness import capture
from forebay.checkpoint.source import saved_buffers
from forebay.device.base import Completion
from forebay.device.completions import dependency_failure
from forebay.errors import OptimizerError, UsageError
from forebay.runtime.blockstate import BlockState
from forebay.runtime.session import Phase, Session
from forebay.timeline import Lane

__all__ = ["Scheduler", "groups_of", "kept_buffers", "save_checkpoint"]


@runtime_checkable
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
    background: bool = False,
) -> int:
    """Writes a new generation and has it be the one that stands; returns its bytes. See ``forebay.save``."""
    if session.phase is not Phase.IDLE:
        session.expect_open()
        raise UsageError("forebay.save has no place within a forward or a backward; call it after optimizer.step()")
    # Everything that can be refused is, before a byte is written.
    count = _counted(step)
    session.finish_saving()
    groups = groups_of(session, optimizer)
    kept = None if scheduler is None else _kept(scheduler)
    plain = encode(extra, "extra")
    blocks, buffers = session.contents.whole(), kept_buffers(model)
    homes = _in_place(session, blocks, generations)
    copies = copies_of_blocks(blocks.values(), session.state_names, homes.names)
    if not (background and all(copy.reads for copy in copies)):
        # What is copied here is read when every update of it is at home. What stays may still be on its way there.
        session.contents.complete()
    copies += copy_of_buffers(buffers)
    old = generations.current()
    number = generations.begin(old, [copy.nbytes for copy in copies])
    jobs: list[Completion] = []
    try:
        folder = generations.path_of(number)
        for place, copy in enumerate(copies):
            path = folder / f"{place:05d}.safetensors"
            if background and copy.reads:
                jobs.append(copy.queue(session.device, generations.files, path))
            else:
                copy.run(generations.files, path)
        steps = {name: count for state in blocks.values() for name, count in state.steps.items()}
        manifest = Manifest(count, number, (), steps, groups, kept, capture(session), plain)
    except BaseException:
        for job in jobs:
            dependency_failure(job)  # none writes there any more
        generations.abandon(number)
        raise
    ending = Ending(generations, manifest, old, homes, copies, jobs, session.store.kept)
    _finish(session, blocks, ending, jobs, background=background)
    return sum(copy.nbytes if background else copy.finished().nbytes for copy in copies)


def _finish(
    session: Session, blocks: Mapping[str, BlockState], ending: Ending, jobs: Sequence[Completion], *, background: bool
) -> None:
    """Has a checkpoint end when all updates are at home, here or on the lane that writes them."""
    homes = (home for state in blocks.values() for home in (state.current.parameters, state.current.states))
    after = [*jobs, *(home.written for home in homes if home.written is not None)]
    # Both before it can stand: an interrupt anywhere here leaves nobody who writes where a checkpoint may come to be.
    if ending.is_in_place:
        for state in blocks.values():
            state.keep(ending)
    if background:
        session.saving = ending
        # Behind the last write of its lane, so that it holds up none that it waits for.
        ending.coming = session.device.submit(Lane.DISK_WRITE, ending.run, after=after, what="checkpoint")
    else:
        ending.run()


def _in_place(session: Session, blocks: Mapping[str, BlockState], generations: Generations) -> InPlace:
    """What the checkpoint names where it lies: nothing in a folder where training keeps nothing."""
    kept = session.store.kept if generations.own else None
    return InPlace(blocks if kept is not None else {}, kept, session.plan.streaming, session.state_names)


def _counted(step: SupportsIndex) -> int:
    try:
        count = operator.index(step)
    except TypeError:
        raise UsageError(f"step counts the optimizer steps so far and is an int, got {step!r}") from None
    if count < 0:
        raise UsageError(f"step counts the optimizer steps so far, 0 or more, got {count}")
    return count


def groups_of(session: Session, optimizer: torch.optim.Optimizer) -> tuple[Group, ...]:
    """The parameter groups, by plain names. Raises ``OptimizerError`` for an optimizer of another model, and
    ``ConfigError`` for a setting that cannot be kept."""
    names, made = session.names, []
    try:
        groups = optimizer.param_groups
    except AttributeError:
        raise OptimizerError(
            f"optimizer is the one that forebay.prepare returned; got {type(optimizer).__name__}"
        ) from None
    for number, group in enumerate(groups):
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
    if not isinstance(scheduler, Scheduler):
        raise UsageError(
            f"scheduler is a learning rate scheduler, or what else has state_dict() and load_state_dict(); got "
            f"{type(scheduler).__name__}"
        )
    return {"kind": type(scheduler).__qualname__, "state": encode(dict(scheduler.state_dict()), "scheduler")}
