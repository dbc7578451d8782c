"""What the integrations have in common: what is asked of a plan, an example of a batch, the figures of a run."""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, final, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from forebay import api
from forebay.budgets import Budget
from forebay.device.compiling import compile_each
from forebay.errors import ConfigError, ModelError, StorageError
from forebay.loss import Loss, expect_loss
from forebay.memory import Tier
from forebay.plans import Plan, UpdateTime
from forebay.runtime import generators
from forebay.runtime.blocks import whole_blocks
from forebay.runtime.generators import OwnGenerator
from forebay.runtime.hooks import attachment_of, is_prepared, prepared_session
from forebay.runtime.losses import LossFunction
from forebay.units import format_bytes, format_seconds

__all__ = [
    "FOLDER",
    "Memory",
    "as_drawn_before",
    "blocks_compiled",
    "expect_restarts",
    "expect_served",
    "figures",
    "in_words",
    "resume_in",
    "save_in",
    "stream_quantised",
]

FOLDER: Final = "forebay"
"""Of a framework's checkpoint: the folder with what ``forebay.save`` wrote."""


@final
@dataclass(frozen=True)
class Memory:
    """What ``forebay.prepare`` is asked for, in its words; None: what that takes where nobody says. ``example`` is what
    the model is called with for the largest batch that training will see (for a Trainer: a batch as its collator makes
    it, if that is what it trains on); None: the first of the training data, which is right where all have one
    length. ``loss_fn`` is how a loop that calls the model several times before a backward makes its loss, of the model
    and a batch: then ``example`` is a batch as that takes it. None: the model is called once, and its output has the
    loss."""

    device_memory: int | str
    host_memory: int | str | None = None
    disk: str | os.PathLike[str] | None = None
    policy: str | None = None
    loss: Loss | None = None
    compress: int | None = None
    blocks: tuple[str, ...] | None = None
    checksums: bool | None = None
    accumulates: bool | None = None
    update: UpdateTime | None = None
    example: Any = None
    device_reserve: int | str | None = None
    loss_fn: LossFunction | None = None

    def __post_init__(self) -> None:
        _ = self.budget  # raises for what cannot be read
        if self.loss is not None:
            expect_loss(self.loss)
        if self.update not in (None, *get_args(UpdateTime)):
            raise ConfigError(f"Memory(update=) is {' or '.join(get_args(UpdateTime))}, not {self.update!r}")

    @property
    def budget(self) -> Budget:
        """The bytes that may be taken of each tier."""
        return Budget.of(self.device_memory, self.host_memory, self.disk, self.device_reserve or 0)

    def not_in_backward(self, asked: Iterable[tuple[bool, str, str]]) -> Iterator[tuple[bool, str, str]]:
        """For ``expect_served``: what of ``asked`` does not go with gradients that backward uses up."""
        for is_asked, what, remedy in asked:
            yield self.update == "backward" and is_asked, f"{what} beside Memory(update='backward')", remedy

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, device: torch.device | None = None
    ) -> torch.optim.Optimizer:
        """Puts a plan for ``batch`` under ``model``; returns the optimizer to use. Raises what ``forebay.prepare``
        raises."""
        said = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "example"}
        asked = {name: value for name, value in said.items() if value is not None}
        return api.prepare(model, optimizer, batch, device=device, **asked)[1]


def expect_served(asker: str, refused: Iterable[tuple[bool, str, str]]) -> None:
    """Raises ``ConfigError`` for the first of ``refused`` that is asked for: whether it is, what it is, what to do
    instead."""
    for is_asked, what, remedy in refused:
        if is_asked:
            raise ConfigError(f"{asker} {what}, which forebay does not serve: {remedy}")


@contextmanager
def as_drawn_before(*sources: object) -> Iterator[None]:
    """Leaves the random number generators of the host, and those that ``sources`` of data hold (loaders, their samplers
    and datasets, what collates), as they are: the example is data that training draws again. One that is made meanwhile
    is not there afterwards."""
    held = [one for source in sources for one in _reachable(source)]
    own = [one for one in held if isinstance(one, OwnGenerator) and not isinstance(one, random.SystemRandom)]
    named = [there for one in held if (there := _named(one)) is not None and len(there) <= _ELEMENTS]
    fields = [(there, there.copy()) for there in named]
    try:
        with generators.as_drawn_before(own):
            yield
    finally:
        for now, before in fields:
            for name in [name for name, value in list(now.items()) if isinstance(value, OwnGenerator)]:
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]


def expect_restarts(loader: object) -> None:
    """Raises ``ConfigError`` for data that begins once: training would not see what an example of it was made of."""
    stream: Any = loader.dataset if isinstance(loader, DataLoader) else loader
    begins = stream is loader or isinstance(stream, IterableDataset)  # else its rows are asked for by number
    if begins and iter(stream) is iter(stream):
        raise ConfigError(
            f"the training data ({type(stream).__name__}) begins only once, so that training would lack the batch that "
            f"a plan is made for; give Memory an example of a batch, or data that begins anew with every iter()"
        )


_ELEMENTS: Final = 100
"""Of each container, the first ones: a dataset may be a list of all rows."""

_OBJECTS: Final = 10_000
"""Of one source of data, the nearest ones."""


def _reachable(source: object) -> Iterable[object]:
    """``source``, what its attributes and elements are, what theirs are, and so on; each once."""
    found = {id(source): source}
    waiting = deque([source])
    while waiting and len(found) < _OBJECTS:
        for one in islice(_inside(waiting.popleft()), _ELEMENTS):
            if id(one) not in found:
                found[id(one)] = one
                waiting.append(one)
    return found.values()


def _inside(value: Any) -> Iterator[object]:
    """What ``value`` refers to, of a function only what is bound to it."""
    if isinstance(value, list | tuple | deque):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                yield cell.cell_contents
    else:
        yield from (_named(value) or {}).values()


def _named(value: Any) -> dict[Any, Any] | None:
    """A dict, or the fields of an object; None for what has none, and for what is no data's own."""
    if isinstance(value, dict):
        return value
    if isinstance(value, type | ModuleType | FunctionType | MethodType | torch.Tensor):
        return None
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


@contextmanager
def blocks_compiled(model: nn.Module, names: Sequence[str] | None, how: Mapping[str, Any] | None) -> Iterator[None]:
    """The body prepares ``model``. Before, ``torch.compile`` is applied to each of its blocks, with the arguments
    ``how`` (None: to none): those that repeat, or those of ``names``. When the model is closed, or the body raises,
    they are as they were.

    forebay does its part between the blocks: it cannot be inside of what is compiled. Raises ``ModelError`` for a model
    without such blocks.
    """
    if how is None or is_prepared(model):
        yield
        return
    blocks = whole_blocks(model, names)
    if not blocks:
        raise ModelError(
            "torch.compile is applied block by block, and the model has no blocks; name them: Memory(blocks=)"
        )
    take_off = compile_each(blocks.values(), how)
    try:
        yield
    except BaseException:
        take_off()
        raise
    attachment_of(model).at_end(take_off)


def save_in(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, scheduler: Any = None) -> None:
    """``forebay.save`` into ``path``, which is left to others at once: nobody writes there again, but somebody may read
    it, or remove it for a newer one."""
    try:
        api.save(model, optimizer, path, step=step, scheduler=scheduler)
    finally:
        prepared_session(model).unlock(path)


def resume_in(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, expected: int | None = None
) -> int:
    """``forebay.resume`` from ``path``; returns the optimizer steps so far. Raises ``ConfigError`` where nobody has
    called ``save_in``, and ``StorageError`` where these are not the ``expected`` steps."""
    if not path.is_dir():
        raise ConfigError(
            f"{path.parent} holds no optimizer states of forebay; resume from a checkpoint that was written with it, "
            f"optimizer states included"
        )
    try:
        step = api.resume(model, optimizer, path, scheduler=scheduler).step
    finally:
        prepared_session(model).unlock(path)
    if expected is not None and step != expected:
        raise StorageError(
            f"{path} is of optimizer step {step} and the checkpoint beside it of step {expected}; give a checkpoint "
            f"with the folder that was saved with it"
        )
    return step


def in_words(plan: Plan) -> str:
    """``plan`` in one line, for a log."""
    seconds = plan.step_seconds
    pace = "" if seconds is None else f", about {format_seconds(seconds)} a micro-batch and update"
    peaks = ", ".join(f"{tier.value} {format_bytes(nbytes)}" for tier, nbytes in plan.peaks().items() if nbytes)
    return f"forebay ({plan.planner}): {peaks}{pace}"


def figures(model: nn.Module) -> Mapping[str, float]:
    """What was predicted for the run of a prepared model and what was measured so far, by names that any logger takes:
    seconds of a step, and peaks of every tier in bytes. What is not known is left out.

    Raises ``UsageError`` for a model that is not prepared.
    """
    record = api.report(model)
    found: dict[str, float | None] = {
        "forebay_predicted_step_seconds": record.predicted_step_seconds,
        "forebay_step_seconds": record.step_seconds,
    }
    predicted, measured = record.predicted_peaks(), record.measured_peaks()
    for tier in Tier:
        if predicted[tier] or measured[tier]:
            found[f"forebay_predicted_{tier.value}_bytes"] = predicted[tier]
            found[f"forebay_{tier.value}_bytes"] = measured[tier]
    return {name: float(value) for name, value in found.items() if value is not None}


def stream_quantised(model: nn.Module) -> None:
    """Has layers of bitsandbytes let go of their weights, where there are any (``bitsandbytes.stream``)."""
    if "bitsandbytes" in sys.modules:
        from forebay.integrations.bitsandbytes import stream

        stream(model)
