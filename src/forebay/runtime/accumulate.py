"""Gradient accumulation layer by layer: every micro-batch passes a block before the next block is fetched.

The forward of each micro-batch runs in a thread of its own, and they take turns (turns.py). A hook in front of each
block that streams gives the turn back, so that all of them come to a block before one goes on. There the graph is cut
(cuts.py). Backward goes the same way back: for each block all micro-batches, in the order of the loop, so that each sum
of gradients is the loop's (gathering.py). The model is unmodified.

    forward     block 1: micro-batch 1, 2, ... n    block 2: 1, 2, ... n    ...    the last block: 1, 2, ... n
    backward    of the last block each micro-batch's comes right after its forward: nobody keeps n times the logits
                ...    block 2: 1, 2, ... n    block 1: 1, 2, ... n

Micro-batches may go different ways: whoever waits for the same block comes to it together. Random numbers are drawn in
the order of the loop: from the first draw on, each forward runs to its end before the next one goes on. So it is where
forwards leave something in the modules (``forward_order.py``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn

from forebay.device.compiling import as_written, compiled_modules, outside_of_graphs
from forebay.errors import ModelError, UsageError
from forebay.runtime.cuts import Cutter, Segment
from forebay.runtime.forward_order import ForwardOrder
from forebay.runtime.gathering import Gathering
from forebay.runtime.gradients import LandedGradient
from forebay.runtime.hooks import Attachment
from forebay.runtime.losses import LossFunction, expect_loss, handed_over
from forebay.runtime.measure import Phase
from forebay.runtime.passes import Pass
from forebay.runtime.spent import SpentGradient
from forebay.runtime.turns import Turns
from forebay.treatments import Fate

__all__ = ["accumulate_by_block", "accumulate_in_order", "gains"]

Key = frozenset[str]
"""The streamed blocks that one segment of a forward uses."""


def accumulate_in_order(model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction) -> list[torch.Tensor]:
    """The loop: forward and backward of one micro-batch after the other. Returns the losses."""
    losses = []
    for number, batch in enumerate(batches):
        loss = expect_loss(loss_fn(model, batch), f"micro-batch {number}")
        loss.backward()
        losses.append(handed_over(loss))
        del loss  # or it is there in the next forward
    return losses


def gains(attachment: Attachment) -> bool:
    """Whether there is anything that would cross the link once instead of once for each micro-batch."""
    session = attachment.session
    if attachment.has_tiles:
        # Tiles are fetched inside of one autograd function, which no other micro-batch can come in between of: backward
        # of the first would go on to its end, with the gradients of all tiles on the device at once.
        return False
    if session.plan.compiled:
        # Passing together, blocks run as written, and the plan was made for what the compiler made of them.
        return False
    return any(not b.held and not session.store.blocks[b.name].placement.resident for b in session.model.blocks)


def accumulate_by_block(
    attachment: Attachment, model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction
) -> list[torch.Tensor]:
    """The same numbers, block by block. Raises ``UsageError`` where one is under way already."""
    if not attachment.accumulating.acquire(blocking=False):
        raise UsageError(
            "forebay.accumulate is under way on this model already, in another thread or around this call; one at a "
            "time: put all micro-batches of a step into one call"
        )
    try:
        attachment.session.expect_open()
        return _ByBlock(attachment, model, batches, loss_fn).run()
    finally:
        attachment.accumulating.release()


@final
class _MicroBatch:
    """One micro-batch: its forward, and then its segments, the last of which are gone as soon as backward is done.

    ``keys`` are the blocks of each segment, ``wanted`` those of the one that waits for its turn (None: it has not
    begun). ``inside`` counts the modules of blocks whose forward runs. ``names`` are the parameters of each segment.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.cutter = Cutter()
        self.keys: list[Key] = [frozenset()]
        self.wanted: Key | None = None
        self.inside = 0
        self.segments: list[Segment] = []
        self.names: list[list[str]] = []
        self.state = Pass()
        self.phase = Phase.IDLE
        self.turns: Turns[torch.Tensor] | None = None

    @property
    def ended(self) -> bool:
        """Whether its forward is over."""
        return self.turns is not None and self.turns.ended

    def close(self) -> None:
        """Lets go of its graph."""
        self.cutter.close()
        for segment in self.segments:
            segment.close()
        self.turns = None  # which holds the batch


@final
class _ByBlock:
    """One accumulation."""

    def __init__(self, attachment: Attachment, model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction) -> None:
        self._attachment = attachment
        self._session = session = attachment.session
        self._model = model
        self._loss_fn = loss_fn
        self._gathering = Gathering(
            session.parameters, len(batches), session.store.landing, session.resources.ledgers.host
        )
        self._micro_batches = [_MicroBatch(number) for number in range(len(batches))]
        self._of_thread: dict[int, _MicroBatch] = {}
        self._own = Pass()
        self._running: _MicroBatch | None = None
        for one, batch in zip(self._micro_batches, batches, strict=True):
            function = partial(self._forward_of, one, batch)
            one.turns = Turns(function, session.torch_device, f"forebay micro-batch {one.number}")

    def run(self) -> list[torch.Tensor]:
        """Adds the gradients of all micro-batches to the parameters' gradients; returns the losses."""
        # Around all of them: each forward that begins or ends in here finds it set, and puts back what it found; one
        # that is undone too.
        with as_written():
            return self._together()

    def _together(self) -> list[torch.Tensor]:
        session = self._session
        session.store.make_room(len(self._micro_batches))
        session.measure.passing_together(len(self._micro_batches))
        session.gathering = self._gathering
        handles: list[Any] = []
        try:
            handles += self._attach()
            losses = self._forward()
            self._backward()
        except BaseException:
            self._undo()
            raise
        finally:
            for handle in handles:
                handle.remove()
            for one in self._micro_batches:
                one.close()
        return losses

    def _undo(self) -> None:
        """Ends what is under way; the model is as it was, ready for the next pass."""
        attachment, session = self._attachment, self._session
        waiting = [one for one in self._micro_batches if one is not self._running]
        # First the one that runs, if the caller was interrupted meanwhile: never two at once.
        for one in (self._running, *waiting):
            if one is not None and one.turns is not None and not one.ended:
                if one is not self._running:
                    attachment.current = one.state
                    session.turn(one.phase)
                one.turns.cancel()
        self._gathering.undo()
        session.gathering = None
        attachment.current = Pass()
        attachment.abandon()

    # Hooks on the blocks.

    def _attach(self) -> list[Any]:
        session = self._session
        modules = dict(self._model.named_modules(remove_duplicate=False))
        asked: dict[nn.Module, set[str]] = {}
        for block in (b for b in session.model.blocks if not b.held):
            # One that was taken out of the model since never runs.
            for module in (modules[name] for name in block.modules if name in modules):
                streamed = asked.setdefault(module, set())
                if not session.store.blocks[block.name].placement.resident:
                    streamed.add(block.name)
        asked.pop(self._model, None)  # a pass begins and ends there
        before: Any = self._before_block
        after: Any = self._after_block
        if compiled_modules(self._model):
            before, after = outside_of_graphs(before), outside_of_graphs(after)
        handles: list[Any] = []
        for module, names in asked.items():
            # In front of all: while a micro-batch waits, nothing of the block is open.
            entering = partial(before, frozenset(names))
            handles.append(module.register_forward_pre_hook(entering, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        return handles

    def _before_block(self, blocks: Key, module: nn.Module, args: Any, kwargs: Any) -> Any:
        one = self._of_thread.get(threading.get_ident())
        if one is None:
            return None  # backward, which runs a block again
        one.inside += 1
        if one.inside > 1:
            return None
        one.cutter.enter()
        # Not inside a checkpoint of the model's own, which would be cut in two.
        if not blocks <= one.keys[-1] and torch.is_grad_enabled() and self._session.saved.innermost():
            self._come_to(one, blocks)
        return one.cutter.replaced((args, kwargs))

    def _come_to(self, one: _MicroBatch, blocks: Key) -> None:
        if not one.keys[-1]:
            one.keys[-1] = blocks  # what comes before the first block belongs to it
            return
        one.wanted = blocks
        if one.turns is not None:
            one.turns.give_back()
        one.keys.append(blocks)
        one.cutter.mark()

    def _after_block(self, module: nn.Module, args: Any, output: Any) -> None:
        one = self._of_thread.get(threading.get_ident())
        if one is None:
            return
        one.inside -= 1
        if one.inside == 0:
            one.cutter.leave()

    # Forward.

    def _forward_of(self, one: _MicroBatch, batch: Any) -> torch.Tensor:
        """The forward of one micro-batch, in a thread of its own."""
        self._of_thread[threading.get_ident()] = one
        try:
            with one.cutter.between_blocks():
                loss = expect_loss(self._loss_fn(self._model, batch), f"micro-batch {one.number}")
            one.segments = one.cutter.finished(loss)
            return handed_over(loss)
        finally:
            del self._of_thread[threading.get_ident()]
            if self._session.phase is Phase.FORWARD:
                self._attachment.abandon()  # an interrupt that calls no hooks; the scopes are this thread's
            self._session.watch.uninstall()

    def _forward(self) -> list[torch.Tensor]:
        losses: dict[int, torch.Tensor] = {}
        blocks = {name for block in self._session.model.blocks for name in block.modules}
        order = ForwardOrder(self._attachment.passing, self._model, blocks, self._session.torch_device)
        try:
            while active := [one for one in self._micro_batches if not one.ended]:
                for one in active[:1] if order.in_turn else _together(active):
                    self._turn(one)
                    if one.turns is not None and one.ended:
                        losses[one.number] = one.turns.take()
                        self._ended(one)
                    if order.look(one.number):
                        break
            order.end()
        finally:
            self._attachment.passing = order.passing
        return [losses[number] for number in sorted(losses)]

    def _turn(self, one: _MicroBatch) -> None:
        self._attachment.current = one.state
        self._session.turn(one.phase)
        row = self._session.store.rows.get(Fate.OFFLOAD)
        if row is not None:
            row.place = one.number
        # Casts of parameters that autocast keeps are views of slots, and nodes of another micro-batch's graph.
        torch.clear_autocast_cache()
        self._running = one
        if one.turns is not None:
            one.turns.go_on()
        self._running = None
        one.phase = self._session.phase

    def _ended(self, one: _MicroBatch) -> None:
        """A forward is over: the backward of its last segment comes at once, while what it has made is small."""
        names = self._session.names
        one.names = [
            list(dict.fromkeys(names[id(leaf)] for leaf in segment.leaves if id(leaf) in names))
            for segment in one.segments
        ]
        uses = Counter(name for own in one.names for name in own)
        self._expect_separable({name for name, count in uses.items() if count > 1}, one.segments)
        self._gathering.known(one.number, uses)
        self._backward_of(one)

    def _expect_separable(self, tied: set[str], segments: Sequence[Segment]) -> None:
        """Raises ``ModelError`` for parameters used in several segments where the sum over these is not autograd's
        own, which is all that the parameter itself sees of them: a hook would be called with each part, and casts that
        the loop makes once, adding up before them, are made in each segment."""
        names = self._session.names
        cast = Counter(names[i] for segment in segments for i in {id(leaf) for leaf in segment.cast} if i in names)
        for name in sorted(tied):
            if self._session.parameters[name]._backward_hooks:
                why = "has a hook (register_hook), which would be called with parts of its gradient"
            elif cast[name] > 1:
                why = "is cast by autocast, in the loop once for all of them and here for each"
            else:
                continue
            raise ModelError(
                f"parameter {name} is used in several blocks and {why}; train this model with the loop itself: "
                f"loss.backward() for each micro-batch"
            )

    # Backward.

    def _backward(self) -> None:
        session = self._session
        session.stash.end_forward()
        session.stash.begin_backward()
        while left := [one for one in self._micro_batches if one.segments]:
            latest = max(left, key=lambda one: (len(one.keys), -one.number)).keys[-1]
            for one in left:
                if one.keys[-1] == latest:
                    self._backward_of(one)
        self._gathering.finish()
        session.gathering = None
        for name, parameter in session.parameters.items():
            # What a backward inside backward has contributed to: nobody knew when the last of it would come.
            if parameter.grad is not None and not isinstance(parameter.grad, LandedGradient | SpentGradient):
                session.gradient_made(name, parameter)
        session.end_backward()

    def _backward_of(self, one: _MicroBatch) -> None:
        """Backward of the last segment that is left of a micro-batch."""
        self._attachment.current = self._own
        self._session.turn(Phase.BACKWARD)
        segment, names = one.segments.pop(), one.names.pop()
        one.keys.pop()
        first = self._gathering.begin(one.number, names)
        try:
            segment.backward(first)
        finally:
            self._gathering.end()
            segment.close()
        self._session.turn(Phase.IDLE)


def _together(active: Sequence[_MicroBatch]) -> list[_MicroBatch]:
    """Who goes on: those that have come least far, and whoever waits for the same blocks."""
    first = min(active, key=lambda one: (len(one.keys), one.number))
    return [one for one in active if one.wanted == first.wanted]
