"""What a session measured: compute by block and phase, steps, and the events of every lane.

A compute event lasts from the moment at which the host begins a block to the moment at which it begins the next one.
What that leaves out, and what stays approximate:

- The wait for a block's bytes lies between two events: it is a stall, not compute.
- Outside of all blocks the name is empty; a piece of that kind under ``SHORTEST`` seconds is not recorded.
- In backward the first saved tensor of another block that autograd unpacks begins that block. Ops that saved nothing
  (an addition between two blocks) count to the block whose backward came before them.
- The clock is the host's. On a device that computes on its own, an event says when its kernels were issued; over a
  whole step the difference evens out, since the host waits for the device where it reads a loss or a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import final

from forebay.device.base import Device
from forebay.memory import ArenaUsage, Ledger, TierUsage
from forebay.model import Block
from forebay.runtime.levels import Levels
from forebay.timeline import Event, Lane, Timeline

__all__ = ["BACKWARD", "FORWARD", "RECOMPUTE", "Measurement", "Phase", "Whereabouts"]

EVENT_LIMIT = 200_000
"""Events that a session remembers; older steps are forgotten first."""

SHORTEST = 20e-6
"""Seconds: less than this between two blocks is what it costs to look, not compute."""

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


class Phase(Enum):
    """What the model is doing."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    CLOSED = "closed"


@final
class Whereabouts:
    """What is running now, in words, for whoever must say it in a message. Holds no reference to the model."""

    def __init__(self) -> None:
        self.block = ""
        self.phase = Phase.IDLE

    def __call__(self) -> str:
        return f"block {self.block} in {self.phase.value}: " if self.block else ""


@final
class Measurement:
    """The events of a session, the seconds of its steps, and what the compute lane is doing now."""

    def __init__(self, device: Device, whereabouts: Whereabouts, beside: Sequence[Ledger] = ()) -> None:
        self._device = device
        self.levels = Levels(device, beside)
        """Bytes of the device and of the tiers of the ledgers ``beside``."""
        self._whereabouts = whereabouts
        self._events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self._verb = ""
        self._block = ""
        self._start = 0.0
        # Blocks whose forward is running, innermost last.
        self._inside: list[str] = []
        self._first_step: float | None = None
        self._step: float | None = None
        self.step_seconds: list[float] = []
        self.step_starts: list[float] = []
        self.waiting = 0
        """Training forwards that have ended since the last backward began, or the last step."""
        self._passes = 0
        self._together = 1
        self.micro_batches = 1
        """Training passes of the last whole step."""
        self.together = 1
        """Of these, the most that passed the model at a time."""

    # Compute.

    def begin(self, verb: str, block: str = "") -> None:
        """A phase begins: ``forward`` or ``backward``, in ``block``."""
        self.end()
        self._inside.clear()
        if verb == BACKWARD:
            self.waiting = 0
        self._verb, self._block, self._start = verb, block, self._device.now()

    def end(self) -> None:
        """The phase that was under way, if any, ends."""
        if self._verb:
            self._close(self._device.now())
        self._verb = ""

    @property
    def block(self) -> str:
        """The block that computes now, "" outside of all."""
        return self._block if self._verb else ""

    def now(self) -> float:
        """Seconds on the clock of the events."""
        return self._device.now()

    def waited(self, since: float) -> None:
        """Since then compute may have waited for bytes: a wait is a stall, and no part of what computes."""
        if self._verb:
            now = self._device.now()
            if now - since >= SHORTEST:
                self._close(since)
                self._start = now

    def opening(self, block: Block) -> float:
        """The module of ``block`` is called and its parameters are still to come; returns the time, in seconds."""
        self._whereabouts.block = block.name
        return self._device.now()

    def enter(self, block: Block, since: float) -> None:
        """The parameters of ``block`` are there and its forward begins; nothing has computed since ``since``."""
        if block.held:
            self.waited(since)  # not what encloses other blocks computes, but they and what lies between them
        elif self._verb == FORWARD:
            self._inside.append(block.name)
            self._go_to(block.name, since)
        elif self._verb == BACKWARD:
            self._go_to(block.name, since)  # a model that checkpoints itself: its recomputation is part of backward
        else:
            self.waited(since)

    def leave(self, block: Block) -> None:
        """The forward of ``block`` ended; what encloses it goes on."""
        if self._verb == FORWARD and self._inside and self._inside[-1] == block.name:
            self._inside.pop()
            self._go_to(self._inside[-1] if self._inside else "", None)

    def goes_on(self, block: str) -> bool:
        """Whether it is the backward of ``block`` that computes now."""
        return self._block == block and self._verb == BACKWARD

    def unpacked(self, block: str) -> bool:
        """Backward reads what the forward of ``block`` saved. Returns whether that begins the block."""
        begins = self._verb == BACKWARD and block != self._block
        if begins:
            self._go_to(block, None)
        return begins

    def recompute(self, block: str) -> None:
        """From here on ``block`` is computed again for its backward."""
        if self._verb == BACKWARD:
            if block == self._block and self._device.now() - self._start < SHORTEST:
                self._verb = RECOMPUTE  # all that happened in it so far was to look up the inputs
            else:
                self._turn(RECOMPUTE, block)

    def recomputed(self) -> None:
        """The block has been computed again; its backward goes on."""
        if self._verb == RECOMPUTE:
            self._turn(BACKWARD, self._block)

    def _go_to(self, block: str, since: float | None) -> None:
        now = self._device.now()
        self._close(now if since is None else since)
        self._block, self._start = block, now
        self._whereabouts.block = block

    def _turn(self, verb: str, block: str) -> None:
        self._go_to(block, None)
        self._verb = verb

    def _close(self, end: float) -> None:
        if self._block:
            what = f"{self._verb} {self._block}"
        elif end - self._start < SHORTEST:
            return
        else:
            what = self._verb
        self._device.record(Event(Lane.COMPUTE, self._start, max(self._start, end), 0, what))
        self.levels.note(end)

    # Steps.

    def begin_pass(self, *, seen: bool) -> None:
        """A training forward begins, the first of its step or a later one; ``seen``: all that it makes is counted."""
        now = self._device.now()
        if self._first_step is None:
            self._first_step = now
        if self._step is None:
            self._step = now
            self.levels.begin(now, seen=seen)
        self._passes += 1

    @property
    def in_step(self) -> bool:
        """Whether a training pass has begun whose step is not done."""
        return self._step is not None

    def passing_together(self, count: int) -> None:
        """The next ``count`` training passes of the step take turns."""
        self._together = max(self._together, count)

    def end_step(self) -> None:
        """The optimizer's step is done."""
        if self._step is not None:
            now = self._device.now()
            self.levels.end(now)
            self.step_starts.append(self._step)
            self.step_seconds.append(now - self._step)
            self._step = None
        self.waiting = 0
        self.micro_batches, self._passes = max(1, self._passes), 0
        # Passes that failed are counted in both, or in neither.
        self.together, self._together = min(self._together, self.micro_batches), 1

    @property
    def elapsed(self) -> float:
        """Seconds since the first training forward began."""
        return 0.0 if self._first_step is None else self._device.now() - self._first_step

    def forget(self) -> None:
        """Drops the events so far."""
        self.gather()
        self._events.clear()

    def collect(self) -> tuple[Event, ...]:
        """Every event so far, in the order of their start within each step."""
        self.gather()
        return tuple(self._events)

    def timeline(
        self, tiers: tuple[TierUsage, ...], counters: Mapping[str, int], arenas: tuple[ArenaUsage, ...]
    ) -> Timeline:
        """What was measured so far, with the accounts of others."""
        return Timeline(
            self.collect(),
            tiers,
            tuple(self.step_seconds),
            counters,
            self.levels.collect(),
            tuple(self.step_starts),
            arenas,
        )

    def gather(self) -> None:
        """Takes over what the device has recorded, whose own memory is for some steps only. To be called while it has
        work queued: it takes the time of a few kernels."""
        self._events.extend(self._device.drain_events())
