"""One model twice, with forebay and in plain PyTorch, taken through the same steps.

First step by step: before each one the plain model takes over what forebay has, so that whatever differs was made in
this step, and everything is looked at. Then as a user trains, with no look in between: a look waits for transfers and
updates, and would hide a step that does not wait for them. What is left at the end is compared. Last, if that is asked
for, forebay's model is saved and trains on, and another one resumes and takes the same steps: those two are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from torch import nn

from forebay import api
from forebay.errors import ModelError, UsageError
from forebay.layout import MASTER, RESIDUAL
from forebay.plans import Plan, Update
from forebay.profiler.batch import call_arguments, scalar_loss
from forebay.reporting.verdict import Check
from forebay.runtime.accumulate import accumulate_in_order
from forebay.runtime.generators import as_drawn_before, seed_all
from forebay.runtime.hooks import session_of
from forebay.runtime.losses import LossFunction
from forebay.testing.differences import Differences
from forebay.testing.plain import PlainOptimizer
from forebay.testing.promises import Course, Promise

__all__ = ["Pair", "compare", "loss_of"]

Accumulate = Callable[[nn.Module, Sequence[Any], LossFunction], Sequence[torch.Tensor]]

Again = Callable[[Plan], tuple[nn.Module, torch.optim.Optimizer]]
"""Makes the model and its optimizer another time and prepares them, under the plan given."""


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a model's output holds, as transformers' do, or else the sum of its output."""
    args, kwargs = call_arguments(batch)
    return scalar_loss(model(*args, **kwargs)).loss


@dataclass(frozen=True)
class Pair:
    """A prepared model and its optimizer, and the same model in plain PyTorch on the same device.

    ``batches`` are micro-batches on that device, taken in turn; ``loss_fn`` makes a loss of one. ``alike``: both models
    were made with the same values, and not given them afterwards. ``again`` makes a model that resumes, for a course
    with that in it; what is saved goes to a new folder in ``folder`` (None: where temporary files go).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plain: nn.Module
    plain_optimizer: PlainOptimizer
    batches: Sequence[Any]
    loss_fn: LossFunction = loss_of
    alike: bool = False
    again: Again | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.batches:
            raise UsageError("there is no batch to train on; give one at least")

    def batch(self, number: int) -> Any:
        """The ``number``-th micro-batch (from 0)."""
        return self.batches[number % len(self.batches)]


def compare(pair: Pair, course: Course) -> tuple[Check, ...]:
    """Takes both models through ``course`` and says what was equal.

    The caller's random number generators are left as they were; after a course with a resume in it the prepared model
    is closed. Raises ``ModelError`` for a prepared model whose parameters are not those of the plain one,
    ``UsageError`` for a course that its plan does not allow, ``DiskFull`` or ``StorageError`` where nothing can be
    saved, and whatever either model raises.
    """
    session = _session(pair.model)
    device = session.torch_device
    if {n for n, _ in pair.plain.named_parameters()} != set(session.parameters):
        raise ModelError("the two models have other parameters; make both of them alike, with the same settings")
    if session.plan.updated(Update.BACKWARD) and (course.accumulate > 1 or course.clip_norm is not None):
        raise UsageError(
            "blocks are updated in backward, which uses gradients up: go through a course with accumulate=1 and "
            "clip_norm=None, or prepare with update='step'"
        )
    dtype = next(pair.plain.parameters()).dtype
    promise = Promise.of(session.plan, device, dtype, course)
    found = Differences()
    with as_drawn_before(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if pair.alike:
            _note_parameters("parameters at the start", pair, found, "at the start", 0.0)
        _step_by_step(pair, course, promise, found, device)
        _at_a_stretch(pair, course, promise, found)
        if course.resumed:
            _resumed(pair, course, found)
    return found.checks


def _session(model: nn.Module) -> Any:
    attachment = session_of(model)
    if attachment is None:
        raise UsageError("the model is not prepared; call forebay.prepare(model, optimizer, ...) first")
    return attachment.session


# Step by step


@final
@dataclass(frozen=True)
class _Pass:
    """What one forward and backward came to: its loss, and the random number generator after it."""

    loss: torch.Tensor
    random: torch.Tensor


def _step_by_step(pair: Pair, course: Course, promise: Promise, found: Differences, device: torch.device) -> None:
    there = not _session(pair.model).plan.updated(Update.BACKWARD)  # else backward has used gradients up
    for step in range(course.steps):
        _take_over(pair)
        for micro in range(course.accumulate):
            number, where = step * course.accumulate + micro, f"step {step + 1}, micro-batch {micro + 1}"
            # forebay's first: what the plain model takes then is not charged to the device of a pass under way.
            made = _pass(pair.model, pair, number, course, device)
            expected = _pass(pair.plain, pair, number, course, device)
            found.note("loss", made.loss, expected.loss, where, promise.loss)
            found.note("random numbers", made.random, expected.random, where)
            if micro == 0 and there:
                _note_gradients("gradients", pair, found, where, promise.gradients)
        where = f"step {step + 1}"
        if course.accumulate > 1:
            _note_gradients("accumulated gradients", pair, found, where, promise.gradients)
        if course.clip_norm is not None:
            mine, theirs = (_clip(model, course.clip_norm) for model in (pair.model, pair.plain))
            found.note("norm of the gradients", mine, theirs, where, promise.roundings)
            _note_gradients("clipped gradients", pair, found, where, promise.roundings)
        pair.optimizer.step()
        pair.plain_optimizer.step()
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        _note_parameters("parameters after one step", pair, found, where, promise.updates)


def _clip(model: nn.Module, norm: float) -> torch.Tensor:
    found: torch.Tensor = nn.utils.clip_grad_norm_(model.parameters(), norm)
    return found


def _pass(model: nn.Module, pair: Pair, number: int, course: Course, device: torch.device) -> _Pass:
    seed_all(course.seed + number)  # dropout draws the same in both
    loss = pair.loss_fn(model, pair.batch(number))
    loss.backward()
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return _Pass(loss.detach(), state)


def _take_over(pair: Pair) -> None:
    """Gives the plain model forebay's parameters, and the states of its optimizer."""
    session = _session(pair.model)
    session.contents.whole()  # first: reading states gives blocks their turn, after which parameters are others
    values = api.parameters(pair.model)
    for name, parameter in pair.plain.named_parameters():
        states = session.read_states(name) if parameter.requires_grad else {}
        pair.plain_optimizer.take_over(parameter, values[name], states)


def _note_gradients(name: str, pair: Pair, found: Differences, where: str, allowed: float | None) -> None:
    gradients = api.gradients(pair.model)
    for own, parameter in pair.plain.named_parameters():
        found.note(name, gradients.get(own), parameter.grad, f"{own}, {where}", allowed)


def _note_parameters(name: str, pair: Pair, found: Differences, where: str, allowed: float | None) -> None:
    values = api.parameters(pair.model)
    for own, parameter in pair.plain.named_parameters():
        found.note(name, values[own], pair.plain_optimizer.value(parameter), f"{own}, {where}", allowed)


# At a stretch


@dataclass(frozen=True)
class _Stretch:
    """The losses of a run, in order, and that of the evaluation in between."""

    losses: tuple[torch.Tensor, ...]
    evaluated: torch.Tensor


def _at_a_stretch(pair: Pair, course: Course, promise: Promise, found: Differences) -> None:
    _take_over(pair)
    accumulate: Accumulate = api.accumulate if course.together else accumulate_in_order
    mine = _run(pair, pair.model, pair.optimizer, course, accumulate)
    theirs = _run(pair, pair.plain, pair.plain_optimizer, course, accumulate_in_order)
    run = f"a run of {course.steps} {'step' if course.steps == 1 else 'steps'}"
    for number, (left, right) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
        found.note(f"losses of {run}", left, right, f"pass {number + 1}", promise.losses)
    found.note("evaluation in between", mine.evaluated, theirs.evaluated, "its loss", promise.losses)
    _note_parameters(f"parameters after {run}", pair, found, "at the end", promise.outcome)
    _note_states(f"optimizer states after {run}", pair, found, promise.outcome)
    _note_buffers(f"buffers after {run}", pair, found, promise.outcome)


def _run(
    pair: Pair,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | PlainOptimizer,
    course: Course,
    accumulate: Accumulate,
) -> _Stretch:
    losses: list[torch.Tensor] = []
    evaluated = torch.empty(0)
    for number in range(course.steps):
        seed_all(course.seed + course.steps * course.accumulate + number)
        losses += _step(pair, model, optimizer, course, accumulate, course.steps + number)
        # After the first step, and not the last: steps that come after it must not notice.
        if number == 0:
            with _evaluating(model):
                evaluated = pair.loss_fn(model, pair.batch(0)).detach()
    return _Stretch(tuple(losses), evaluated)


def _step(
    pair: Pair,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | PlainOptimizer,
    course: Course,
    accumulate: Accumulate,
    step: int,
) -> Sequence[torch.Tensor]:
    """Step number ``step`` (from 0) of either model; its losses."""
    numbers = range(step * course.accumulate, (step + 1) * course.accumulate)
    losses = accumulate(model, [pair.batch(number) for number in numbers], pair.loss_fn)
    if course.clip_norm is not None:
        _clip(model, course.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` without gradients and without dropout; then each module as it was."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            module.training = was


def _note_states(name: str, pair: Pair, found: Differences, allowed: float | None) -> None:
    session = _session(pair.model)
    for own, parameter in pair.plain.named_parameters():
        if not parameter.requires_grad:
            continue
        mine: Mapping[str, torch.Tensor] = session.read_states(own)
        theirs = pair.plain_optimizer.states(parameter)
        # The count of steps is not every optimizer's to keep, and the fp32 copy is compared as the parameter. What of a
        # gradient was not sent is nothing that plain PyTorch has.
        for state in mine.keys() - {"step", MASTER, RESIDUAL}:
            found.note(name, mine[state], theirs.get(state), f"{state} of {own}", allowed)


def _note_buffers(name: str, pair: Pair, found: Differences, allowed: float | None) -> None:
    buffers = dict(pair.model.named_buffers())
    for own, buffer in pair.plain.named_buffers():
        found.note(name, buffers.get(own), buffer, own, allowed)


# Resumed


def _resumed(pair: Pair, course: Course, found: Differences) -> None:
    """Holds N steps, a resume and N steps against 2 N steps without one. The plain model keeps what the latter have
    come to: there is no room for a third model."""
    if pair.again is None:
        raise UsageError("nobody has said how to make the model again that is to resume; give Pair(again=...)")
    accumulate: Accumulate = api.accumulate if course.together else accumulate_in_order
    plan = _session(pair.model).plan
    with TemporaryDirectory(prefix="forebay-", dir=pair.folder) as folder:
        api.save(pair.model, pair.optimizer, folder, step=2 * course.steps)
        straight = _further(pair, course, accumulate)
        _take_over(pair)
        for name, buffer in pair.model.named_buffers():
            pair.plain.get_buffer(name).copy_(buffer)
        api.close(pair.model)  # its folder is locked, and its memory is for the other one
        model, optimizer = pair.again(plan)
        try:
            other = replace(pair, model=model, optimizer=optimizer)
            api.resume(model, optimizer, folder)
            for number, (left, right) in enumerate(zip(_further(other, course, accumulate), straight, strict=True)):
                found.note("losses after a resume", left, right, f"pass {number + 1}")
            _session(model).contents.whole()  # as the model had been that the plain one has taken over
            _note_parameters("parameters after a resume", other, found, "at the end", 0.0)
            _note_states("optimizer states after a resume", other, found, 0.0)
            _note_buffers("buffers after a resume", other, found, 0.0)
        finally:
            api.close(model)


def _further(pair: Pair, course: Course, accumulate: Accumulate) -> list[torch.Tensor]:
    """The losses of the last steps of forebay's model. Nothing is seeded: a resume brings the random numbers too."""
    steps = range(2 * course.steps, 3 * course.steps)
    taken = [_step(pair, pair.model, pair.optimizer, course, accumulate, step) for step in steps]
    return [loss for losses in taken for loss in losses]
