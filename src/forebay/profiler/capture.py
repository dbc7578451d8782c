"""Model in, ``Trace`` out: one training step under fake tensors, without memory, a GPU or weights.

The step runs under fake tensors (``fake_step``), by one guess after the other where it follows from values that nobody
has (``guessing``). Afterwards the list of ops is cut into visits of blocks, and visits that are alike are stored once
(``segments``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from forebay.collector import collector_paused
from forebay.errors import ModelError
from forebay.profiler import remarks
from forebay.profiler.batch import call_arguments, count_tokens
from forebay.profiler.fake_step import FakeStep, losing_of
from forebay.profiler.finish import finish
from forebay.profiler.guesses import Guess
from forebay.profiler.guessing import Run, guessed
from forebay.profiler.modes import as_trained
from forebay.profiler.optimizers import optimizer_kept
from forebay.profiler.run_again import needing_each_other
from forebay.profiler.work import Call
from forebay.profiler.workspaces import ELSEWHERE, workspace_nbytes
from forebay.runtime.blocks import BoundModel, find_blocks
from forebay.runtime.head import Recognised, recognise
from forebay.runtime.losses import LossFunction
from forebay.runtime.no_logits import REMEDY
from forebay.trace import Leaves, Trace

__all__ = ["Captured", "capture"]


@final
@dataclass(frozen=True)
class Captured:
    """A trace, and for the ``signature`` of each of its works how to call that op for real. ``seconds``, by
    ``signature``, are those of compiled blocks, which were run while the trace was taken."""

    trace: Trace
    calls: Mapping[str, Call]
    seconds: Mapping[str, float] = field(default_factory=dict)


def capture(
    model: nn.Module,
    batch: Any,
    optimizer: str | torch.optim.Optimizer = "adamw",
    device: str | torch.device = "cpu",
    blocks: Sequence[str] | None = None,
    loss_piece: int = 0,
    loss_fn: LossFunction | None = None,
) -> Captured:
    """Records one micro-batch of training, forward and backward, of ``model`` on ``batch``.

    Parameters, buffers and batch may be real or on the meta device; nothing is computed, and nothing is changed: what
    the model's forward does to attributes of its modules is undone (``attributes``). A model in evaluation mode, as
    ``from_pretrained`` leaves it, is recorded as it is in training mode (``modes``). The batch's integers are used
    where the model asks for values (on meta: made-up ones); routes that follow from floats are taken as balanced, and
    where sizes follow from them, the step is captured again for ``Trace.extremes``. ``optimizer`` is one, or one of
    ``optimizers.STATES``; ``blocks`` are as in ``runtime.blocks.find_blocks``. Under ``torch.autocast`` forward and
    loss are recorded with it, backward without. ``loss_piece`` (0: not) is the most bytes of logits that the model's
    loss is computed from at a time (``runtime/head.py``). ``loss_fn`` is what the loop computes its loss by, of the
    model and the batch: what it lets go of is gone when backward begins. None: the loop names the model's output, which
    lives while the next forward runs, and what it computes of it is allowed for.

    Raises ``ModelError`` for a batch without tensors, a device that is neither ``cpu`` nor ``cuda`` and a loss that
    cannot be computed in pieces, ``CaptureFailed`` for a model that cannot run so, naming the op and the module;
    ``OptimizerError`` for an optimizer that is not known; ``UsageError`` for a ``loss_fn`` that calls parts of the
    model and not the model.
    """
    recording = _Recording(model, batch, optimizer, device, blocks, loss_piece, loss_fn)
    with as_trained(model), collector_paused(), _one_thread():
        found = guessed(recording.run)
        if any(extreme.model != found.typical.trace.model for extreme in found.extremes):
            found = guessed(recording.run)  # one of them asked for more than the typical one, which asks for it now
    trace = found.typical.trace
    leaves = Leaves.ALWAYS if _is_one_outside(trace.changed_buffers, recording.bound) else found.leaves
    once = tuple(dict.fromkeys(name for one in (trace, *found.extremes) for name in one.unrepeatable))
    notes = (*recording.notes, *found.notes, *found.typical.remarks)
    notes += tuple(remarks.once_only(once, recording.differentiating))
    trace = replace(trace, unrepeatable=once, leaves=leaves, notes=notes, extremes=found.extremes)
    return Captured(trace, found.typical.recorder.works.calls)


@final
class _Recording:
    """A step of a model, run by one guess after the other: what a run shows of the blocks, those behind it know.

    ``notes`` say in words what was assumed of the device. ``bound`` are the blocks as the last run had them,
    ``differentiating`` names those that any run has seen take a gradient in forward.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: str | torch.optim.Optimizer,
        device: str | torch.device,
        blocks: Sequence[str] | None,
        loss_piece: int,
        loss_fn: LossFunction | None,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._optimizer, self._states, self._keeping = optimizer_kept(optimizer, model)
        self._args, self._kwargs = call_arguments(batch)
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((self._args, self._kwargs))):
            raise ModelError(
                "batch holds no tensors; give what the model's forward is called with, as a dict or a tuple"
            )
        self._losing = losing_of(batch, loss_fn)
        self.bound = find_blocks(model, blocks, keeping=self._keeping)
        self._head = _head(model) if loss_piece else None
        self._loss_piece = loss_piece
        self._device = self._fakes = _recorded_for(device)
        self._workspaces = 0
        self.notes: tuple[str, ...] = ()
        if self._device.type == "cuda" and torch.cuda.is_available():
            self._workspaces = workspace_nbytes(self._device)
        elif self._device.type == "cuda":
            self._fakes, self._workspaces = torch.device("cpu"), ELSEWHERE
            self.notes = (remarks.NO_CARD,)
        self._outside = set[str]()
        self._together = set[frozenset[str]]()
        self.differentiating = set[str]()

    def run(self, guess: Guess) -> Run:
        """The step by ``guess``. Raises what ``FakeStep.run`` raises."""
        step = self._stepped(guess)
        if step.recorder.parameters.outside:
            # What such parameters are there for shows only when the step runs: from now on the root asks for them.
            self._outside.update(step.recorder.parameters.outside)
            self.bound = find_blocks(self._model, self._blocks, self._outside, keeping=self._keeping)
            step = self._stepped(guess)
        self._together.update(step.recorder.again.together)
        self.differentiating.update(step.recorder.differentiates)
        trace = finish(
            step.recorder,
            needing_each_other(self.bound.model, self._together),
            device=self._device.type,
            optimizer=self._optimizer,
            state_names=self._states,
            tokens=count_tokens(self._kwargs or self._args),
            held_nbytes=step.held_nbytes,
            unseen_nbytes=step.unseen_nbytes,
            workspace_nbytes=self._workspaces,
        )
        return Run(trace, step.recorder, step.arrays.made, tuple(step.remarks), step.changes_modules)

    def _stepped(self, guess: Guess) -> FakeStep:
        step = FakeStep(self._model, self.bound, self._fakes, guess, self._head, self._loss_piece)
        step.run(self._losing, self._args, self._kwargs)
        return step


def _is_one_outside(buffers: Iterable[str], bound: BoundModel) -> bool:
    """Whether one of ``buffers`` is in no block, so that several blocks may read it."""
    inside = tuple(f"{name}." for block in bound.model.blocks for name in block.modules if name)
    return any(not buffer.startswith(inside) for buffer in buffers)


def _head(model: nn.Module) -> Recognised:
    found = recognise(model)
    if isinstance(found, str):
        raise ModelError(f"the loss cannot be computed in pieces: {found}; {REMEDY}")
    return found


def _recorded_for(device: str | torch.device) -> torch.device:
    # Of another kind torch may know the name and not the device: fake tensors there end the process.
    if re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device)) is None:
        raise ModelError(f"a step is recorded for device cpu or cuda, got {str(device)!r}")
    return torch.device(device)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """What runs for real here are many small ops on integers. Shared among threads they take as long on an idle
    machine, and on a busy one three times as long, because the threads wait for each other at the end of every op."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
