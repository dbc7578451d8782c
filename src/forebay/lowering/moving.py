"""Activations that move or become codes, as a whole or in part, on paper: the order of copies and waits that
``runtime.stash`` and ``runtime.depots`` keep. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from forebay.device.base import Completion
from forebay.lowering.index import NEVER
from forebay.lowering.lives import Move
from forebay.lowering.recorder import Recorded, Recorder
from forebay.memory import Kind
from forebay.plans import Streaming
from forebay.program import Change, Verb
from forebay.scheduling.activations import DiskRing, ReadAhead, Reloads, RingPlace, disk_nbytes
from forebay.scheduling.window import TransferWindow
from forebay.timeline import Lane
from forebay.treatments import Fate

__all__ = ["Moving"]


@final
class Moving:
    """Writes down what ``moves`` ask for in every pass: codes made and read, copies to the host and back, writes and
    reads.

    ``freed`` are changes since the last compute that was written down, for the next of these actions to come with that
    takes memory, or else the next compute.
    """

    def __init__(self, recorder: Recorder, moves: Iterable[Move], streaming: Streaming) -> None:
        self.freed: list[Change] = []
        self._accounts = not recorder.sketching  # whether anybody asks what is where on the device
        self._recorder = recorder
        self._unasked = [move for move in moves if move.asked == NEVER]
        self._window = TransferWindow(recorder, streaming.offload_window)
        self._reloads = Reloads[Move](streaming.reload_window, self._reload)
        self._reading = ReadAhead[Move](DiskRing(streaming.disk_window), self._read)
        self._offloaded: dict[Move, Recorded] = {}
        # The latest offload of the pass. The window is empty before anything comes back: whoever issues a reload has
        # waited for all offloads, and a fetch that comes before it must not be the only one to know.
        self._latest: tuple[Recorded, ...] = ()
        self._written: dict[Move, Recorded] = {}
        self._reloaded: dict[Move, Recorded] = {}
        # What is there as codes, or in part, in this pass.
        self._encoded: set[Move] = set()
        self._asking = 0  # the number of the op before which things come back

    def leave(self, move: Move, dropping: int) -> None:
        """The op behind which ``move`` is sent was issued. ``dropping`` bytes go after it that are there while it is
        encoded."""
        if move.leaves:
            self._window.admit(move.in_transit)  # before its codes are made, which are part of what the window bounds
        if move.stand_in.is_made:
            self._encode(move, dropping)
        if move.leaves:
            self._offload(move)

    def end_forward(self) -> None:
        """The last op of forward was issued: what stays of what nobody will ask for goes with its last reference."""
        for move in self._unasked:
            stays = move.rest if move.leaves else move.stand_in.made
            if move in self._encoded and stays:
                self.freed.append(Change(Kind.ACTIVATION, -stays))
            self._encoded.discard(move)

    def begin_backward(self, op: int) -> None:
        """Backward begins, before op number ``op``; once more does nothing."""
        self._asking = op
        self.end_forward()  # what that op itself has made was encoded after it
        for move in self._unasked:
            self._reloads.forget(move)
            self._reading.forget(move)
        self._window.empty()
        self._reloads.begin_backward()
        self._reading.fill()

    def ask(self, move: Move, op: int) -> None:
        """The next op, number ``op``, reads ``move``, or has made it and does not run again."""
        self._asking = op
        if move.leaves:
            self._reloads.demand(move)
            self._recorder.hold_compute(self._reloaded[move])
        if move in self._encoded:
            self._encoded.remove(move)
            self._decode(move)
        self._reading.fill()

    def finish(self) -> None:
        """Nothing is asked for any more."""
        del self._reloads, self._reading  # they refer to this, which would outlive its walk

    # On the device.

    def _encode(self, move: Move, dropping: int) -> None:
        """Its codes are made, and a copy of the rest."""
        self._encoded.add(move)
        self._recorder.add(
            Lane.COMPUTE,
            Verb.ENCODE,
            f"encode {move.what}",
            nbytes=move.nbytes + move.stand_in.made,
            block=move.block,
            peak=dropping + move.stand_in.made + _workspace(move),
            changes=(Change(Kind.ACTIVATION, move.stand_in.made),),
            tensor=move.root,
            bits=_bits(move),
            rest=move.rest,
        )

    def _decode(self, move: Move) -> None:
        """It is whole again: decoded to a storage of its own, or where its first part has come back to."""
        freed, self.freed = self.freed, []
        gone = sum(change.nbytes for change in freed)
        taken = 0 if move.codes is None else move.nbytes + _workspace(move)
        there = move.rest + move.in_transit
        self._recorder.add(
            Lane.COMPUTE,
            Verb.DECODE,
            f"decode {move.what}",
            nbytes=move.nbytes + move.stand_in.made,
            block=move.block,
            peak=max(0, gone + taken),
            changes=(*_some(freed), Change(Kind.ACTIVATION, move.nbytes - there)),
            ops=(self._asking, self._asking),
            tensor=move.root,
            bits=_bits(move),
            rest=move.rest,
        )

    # Between device, host and disk.

    def _offload(self, move: Move) -> None:
        place: RingPlace | None = None
        busy: tuple[Completion, ...] = ()
        if move.fate is Fate.DISK:
            place, busy = self._reading.take(move.moved)
        done = self._recorder.add(
            Lane.D2H,
            Verb.OFFLOAD,
            f"offload {move.what}",
            after=(self._recorder.mark(), *busy),
            nbytes=move.moved,
            block=move.block,
            changes=self._left(move),
            ops=move.ops,
            tensor=move.root,
            ring=-1 if place is None else place.offset,
            pieces=move.pieces,
        )
        self._offloaded[move] = done
        self._latest = (done,)
        if place is not None:
            self._write(move, place, done)
        self._reloads.offloaded(move, move.in_transit)
        self._window.sent(done, move.in_transit)

    def _left(self, move: Move) -> tuple[Change, ...]:
        """What the copy of ``move`` to the host frees on the device."""
        if not self._accounts:
            return ()
        return (Change(move.kind if move.codes is None else Kind.ACTIVATION, -move.in_transit),)

    def _reload(self, move: Move) -> None:
        place: RingPlace | None = None
        there: Completion = self._offloaded[move]
        if move.fate is Fate.DISK:
            place, there = self._reading.demand(move)
        after = there, *self._latest, self._recorder.mark()
        freed, self.freed = self.freed, []
        self._reloaded[move] = self._recorder.add(
            Lane.H2D,
            Verb.RELOAD,
            f"reload {move.what}",
            after=after,
            nbytes=move.moved,
            block=move.block,
            peak=move.in_transit,
            changes=(*_some(freed), Change(Kind.ACTIVATION, move.in_transit)) if self._accounts else (),
            ops=(self._asking, self._asking),
            tensor=move.root,
            ring=-1 if place is None else place.offset,
            pieces=move.pieces,
        )
        if place is not None:
            self._reading.sent(move, self._reloaded[move])

    def _write(self, move: Move, place: RingPlace, offloaded: Recorded) -> None:
        written = self._recorder.add(
            Lane.DISK_WRITE,
            Verb.WRITE,
            f"write {move.what}",
            after=(offloaded,),
            nbytes=disk_nbytes(move.moved),
            block=move.block,
            tensor=move.root,
            ring=place.offset,
            pieces=tuple(map(disk_nbytes, move.pieces)),
        )
        place.busy = (written,)
        self._written[move] = written
        self._reading.left(move, move.moved)

    def _read(self, move: Move, place: RingPlace, after: tuple[Completion, ...]) -> Completion:
        return self._recorder.add(
            Lane.DISK_READ,
            Verb.READ,
            f"read {move.what}",
            after=(self._written[move], *after),
            nbytes=disk_nbytes(move.moved),
            block=move.block,
            tensor=move.root,
            ring=place.offset,
            pieces=tuple(map(disk_nbytes, move.pieces)),
        )


def _workspace(move: Move) -> int:
    return 0 if move.codes is None else move.codes.workspace


def _bits(move: Move) -> int:
    return 0 if move.codes is None else move.codes.bits


def _some(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.nbytes)
