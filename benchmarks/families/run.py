"""Every architecture of transformers: trained by plain PyTorch, and by forebay in the least memory that it asks for.

scripts/bench families
scripts/bench families --tasks "image classification" --names vit resnet

A model is made tiny (``tiny``) and takes three steps of AdamW (``fused=True``) with gradients clipped and dropout as it
comes. Forebay is given a fiftieth more of the device than it says that it needs at least: most blocks stream and run
again. All losses and all parameters are compared to the last bit.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
import transformers
from torch import nn

import forebay
from benchmarks.case import BenchmarkError
from benchmarks.families.record import Comparison, Trained, Verdict
from benchmarks.families.tiny import OTHERWISE, Family, TooLarge, families, tiny
from benchmarks.provenance import provenance
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.units import format_bytes

__all__ = ["chosen", "compare", "in_words", "trained"]

STEPS: Final = 3

NOTHING: Final = 1024
"""Bytes of the device that no model fits into: what is refused says what is needed."""

ROOM: Final = 1.02
"""Of what is needed at least, so much is given."""

HOST: Final = "8GiB"

CLIPPED_TO: Final = 0.5


def chosen(tasks: Sequence[str], names: Sequence[str]) -> Mapping[str, Sequence[Family]]:
    """By task the architectures that are called ``names`` (none: all). Raises ``BenchmarkError`` for names that none of
    the tasks has."""
    found = {task: [family for family in families(task) if not names or family.name in names] for task in tasks}
    unknown = set(names) - {family.name for of in found.values() for family in of}
    if unknown:
        raise BenchmarkError(f"no architecture of transformers for these tasks is called {', '.join(sorted(unknown))}")
    return {task: of for task, of in found.items() if of}


def compare(given: Sequence[Family], command: str, say: Callable[[str], None]) -> Comparison:
    """How all of ``given`` are trained. ``say`` gets a line about each."""
    origin, found = provenance(command), []
    with _quiet():
        for family in given:
            found.append(trained(family))
            say(in_words(found[-1]))
    return Comparison(**origin, trained=tuple(found))


@contextmanager
def _quiet() -> Iterator[None]:
    """What architectures have to say about tiny configurations is of no account here."""
    before = transformers.logging.get_verbosity()  # type: ignore[no-untyped-call]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


def trained(family: Family) -> Trained:
    """How ``family`` is trained."""
    reason = ""
    for otherwise in OTHERWISE:
        try:
            model = tiny(family, otherwise)
            plain = copy.deepcopy(model)
            losses = _steps(family, plain, _adamw(plain))
        except TooLarge as large:
            return Trained(family.task, family.name, Verdict.NOT_TRIED, f"not small: {large}")
        except Exception as error:  # whatever an architecture has against its numbers
            reason = reason or _first_line(error)
        else:
            return _beside(family, _Plain(losses, plain.state_dict()), model)
    return Trained(family.task, family.name, Verdict.NOT_TRIED, reason)


@final
@dataclass(frozen=True)
class _Plain:
    """What plain PyTorch made: the losses, and the state of the model behind the last step."""

    losses: Sequence[torch.Tensor]
    state: Mapping[str, torch.Tensor]


def _beside(family: Family, plain: _Plain, model: nn.Module) -> Trained:
    """``model``, as it was before, trained by forebay."""
    parameters, least = sum(parameter.numel() for parameter in model.parameters()), 0
    try:
        least = _least(family, model)
        same = _is_same(family, plain, model, int(ROOM * least))
    except Exception as error:  # a traceback, too, is an answer
        return Trained(family.task, family.name, Verdict.REFUSED, _first_line(error), parameters, least)
    return Trained(family.task, family.name, Verdict.SAME if same else Verdict.OTHER, "", parameters, least)


def _least(family: Family, model: nn.Module) -> int:
    """The bytes of the device that it needs at least."""
    try:
        prepared, _ = forebay.prepare(
            model, _adamw(model), family.batch(model, 0), device_memory=NOTHING, host_memory=HOST
        )
    except DoesNotFit as refusal:
        if refusal.tier != Tier.DEVICE.value:
            raise
        return refusal.needed
    forebay.close(prepared)
    return NOTHING


def _is_same(family: Family, plain: _Plain, model: nn.Module, allowed: int) -> bool:
    """Whether all is as ``plain``, within ``allowed`` bytes of the device."""
    model, optimizer = forebay.prepare(
        model, _adamw(model), family.batch(model, 0), device_memory=allowed, host_memory=HOST
    )
    try:
        losses, state = _steps(family, model, optimizer), model.state_dict()
        as_losses = all(map(torch.equal, plain.losses, losses))
        return as_losses and all(torch.equal(value, state[name]) for name, value in plain.state.items())
    finally:
        forebay.close(model)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _steps(family: Family, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The losses of all steps."""
    losses = []
    for step in range(STEPS):
        # Dropout; and by NumPy and Python, what is masked of sound and which layers are left out.
        torch.manual_seed(step)
        np.random.seed(step)
        random.seed(step)
        loss = model(**family.batch(model, step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_TO)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def in_words(one: Trained) -> str:
    """A line about ``one``."""
    size = f", {one.parameters:,} parameters within {ROOM} of {format_bytes(one.least)}" if one.least else ""
    return f"{one.task}: {one.name}{size}: {one.verdict}{f' ({one.why})' if one.why else ''}"
