"""Training loops of several models on one device, each in a thread of its own, one of which computes at a time.

Nagrecha and Kumar, "Hydra: a system for large multi-model deep learning", VLDB 2022 (arXiv 2110.08633): while one model
waits for its next block, or for its update, the device computes for another (``device.turn``). Each model has lanes of
its own; what they share is the link, the cores and the budget.

A loop sees nothing of the others. What torch keeps for each thread it takes over from the caller; the generators of
random numbers (torch's, NumPy's and Python's) it finds as the caller left them, whatever others draw meanwhile.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

import torch

from forebay.device.compiling import as_written
from forebay.device.turn import Part
from forebay.runtime.generators import Generators
from forebay.runtime.hooks import Attachment
from forebay.runtime.measure import Phase
from forebay.runtime.turns import Settings

__all__ = ["alternate_loops"]

Result = TypeVar("Result")


def alternate_loops(attachments: Sequence[Attachment], loops: Sequence[Callable[[], Result]]) -> list[Result]:
    """Runs every one of ``loops``, those of the models of ``attachments``, which have one turn, to its end, and returns
    what they return, in their order. Where some raise, the others go on; then the first of those errors is raised, and
    a note says who else has failed. An interrupt of the calling thread ends all of them.

    Afterwards the generators of random numbers are as the first loop has left them. Raises ``UsageError`` where loops
    of these models are under way already.
    """
    turn = attachments[0].session.device.turn
    # Around all of them: what a forward sets for compiled modules holds for all threads, and each would put back what
    # another has set.
    with turn.opened(), as_written():
        running = [_Loop(*one, number) for number, one in enumerate(zip(attachments, loops, strict=True))]
        try:
            for number, attachment in enumerate(attachments):
                attachment.session.own_loop.number = number
            for one in running:
                one.thread.start()
            for one in running:
                one.ended.wait()  # unlike a join, an interrupt ends it
        except BaseException:
            turn.cancel()
            raise
        finally:
            for one in running:
                if one.thread.ident is not None:
                    one.thread.join()
            for attachment in attachments:
                attachment.session.own_loop.number = None
                # Whoever has closed a model in its loop could not take the watch off this thread.
                attachment.session.lookout.between_passes()
        running[0].resume()
    _raise_first([one.error for one in running])
    return [one.result[0] for one in running]


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    failed = [(number, error) for number, error in enumerate(errors) if error is not None]
    if not failed:
        return
    (number, first), *others = failed
    first.add_note(f"raised by the loop of model {number}")
    for number, error in others:
        first.add_note(f"the loop of model {number} failed too: {type(error).__name__}: {error}")
    raise first


@final
class _Loop(Part, Generic[Result]):
    """One of them, in ``thread``: what it has returned or raised, and its random numbers while another one computes."""

    def __init__(self, attachment: Attachment, function: Callable[[], Result], number: int) -> None:
        context, settings = contextvars.copy_context(), Settings(attachment.session.torch_device)
        self._attachment = attachment
        self._function = function
        self._generators = Generators()
        self.result: list[Result] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()
        # A daemon: should the caller be interrupted a second time while it waits here, Python can still exit.
        name = f"forebay model {number}"
        self.thread = threading.Thread(target=context.run, args=(self._run, settings), name=name, daemon=True)

    def may_pause(self) -> bool:
        # What autocast has cast it keeps for all threads, and forgets when one of them leaves it: a parameter that is
        # used twice would be cast twice, and its gradient be another sum.
        casts = torch.is_autocast_enabled(self._attachment.session.torch_device.type)
        return not (casts and torch.is_autocast_cache_enabled())

    def pause(self) -> None:
        self._generators.keep()

    def resume(self) -> None:
        self._generators.put_back()

    def _run(self, settings: Settings) -> None:
        try:
            with settings.applied(), self._attachment.session.device.turn.taken(self):
                self._train()
        except BaseException as error:  # the caller's to handle, whatever it is
            self.error = error
        finally:
            self.ended.set()

    def _train(self) -> None:
        session = self._attachment.session
        session.own_loop.enter()
        try:
            self.result.append(self._function())
        finally:
            if session.phase is Phase.FORWARD:
                self._attachment.abandon()  # an interrupt that calls no hooks; the scopes are this thread's
            session.watch.uninstall()
