"""Activations that move, on paper: the order of copies and waits that ``runtime.stash`` keeps. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from forebay.lowering.index import NEVER
from forebay.lowering.lives import Move
from forebay.lowering.recorder import Recorded, Recorder
from forebay.memory import Kind
from forebay.plans import Streaming
from forebay.program import Change, Verb
from forebay.scheduling.activations import OffloadWindow, Reloads
from forebay.timeline import Lane

__all__ = ["Moving"]


@final
class Moving:
    """Writes down the offloads and reloads of ``moves`` in every pass.

    ``freed`` are changes since the last compute that was written down, for the next reload to come with, or else the
    next compute.
    """

    def __init__(self, recorder: Recorder, moves: Iterable[Move], streaming: Streaming) -> None:
        self.freed: list[Change] = []
        self._recorder = recorder
        self._unasked = [move for move in moves if move.asked == NEVER]
        self._window = OffloadWindow(recorder, streaming.offload_window)
        self._reloads = Reloads[Move](streaming.reload_window, self._reload)
        self._offloaded: dict[Move, Recorded] = {}
        self._reloaded: dict[Move, Recorded] = {}

    def offload(self, move: Move) -> None:
        """The op that makes ``move`` was issued."""
        self._window.admit(move.nbytes)
        done = self._recorder.add(
            Lane.D2H,
            Verb.OFFLOAD,
            f"offload {move.what}",
            after=(self._recorder.mark(),),
            nbytes=move.nbytes,
            block=move.block,
            changes=(Change(move.kind, -move.nbytes),),
            ops=move.ops,
            tensor=move.root,
        )
        self._offloaded[move] = done
        self._reloads.offloaded(move, move.nbytes)
        self._window.sent(done, move.nbytes)

    def begin_backward(self) -> None:
        """Backward begins; once more does nothing."""
        for move in self._unasked:
            self._reloads.forget(move)  # its last reference went with the forward
        self._window.empty()
        self._reloads.begin_backward()

    def ask(self, move: Move) -> None:
        """The next op reads ``move``."""
        self._reloads.demand(move)
        self._recorder.hold_compute(self._reloaded[move])

    def _reload(self, move: Move) -> None:
        after = self._offloaded[move], self._recorder.mark()
        freed, self.freed = self.freed, []
        self._reloaded[move] = self._recorder.add(
            Lane.H2D,
            Verb.RELOAD,
            f"reload {move.what}",
            after=after,
            nbytes=move.nbytes,
            block=move.block,
            peak=move.nbytes,
            changes=(*(change for change in freed if change.nbytes), Change(Kind.ACTIVATION, move.nbytes)),
            tensor=move.root,
        )
