"""A plan lowered to actions: what every lane does, in which order, and what each action waits for. No torch.

The simulator plays a program against a clock, the checker proves it right, the runtime does the same against a
device. Inside a lane the order is that of the program; between lanes it is what ``after`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

from forebay.calls import CHECKSUMS
from forebay.memory import Kind, Tier
from forebay.timeline import Lane

__all__ = ["Action", "Change", "Outline", "Program", "Sketch", "Use", "Verb"]


class Verb(StrEnum):
    """What an action does."""

    COMPUTE = "compute"  # ops of the trace, in order
    FETCH = "fetch"  # a block's parameters into a slot
    LAND = "land"  # a gradient to the host, in the place of what was there
    ACCUMULATE = "accumulate"  # a gradient to the host, added to what has landed before
    ENCODE = "encode"  # an activation to codes, or to parts, on the device
    DECODE = "decode"  # codes, or parts, to an activation, on the device
    OFFLOAD = "offload"  # an activation, a part of it, or codes, to the host
    RELOAD = "reload"  # an activation, a part of it, or codes, back to the device
    UPDATE = "update"  # one chunk of a block's states, on the host (a resident block: all of it, on the device)
    LOAD = "load"  # a part of a chunk to where it is updated: its states, parameters or gradients
    STORE = "store"  # a part of a chunk home again: its states or parameters
    READ = "read"  # from disk
    WRITE = "write"  # to disk


@dataclass(frozen=True, slots=True)
class Use:
    """Block ``block`` is read from slot ``slot``: an index into ``Program.slots``."""

    block: str
    slot: int


@dataclass(frozen=True, slots=True)
class Change:
    """``nbytes`` more (or, below 0, fewer) bytes of ``kind`` on the device."""

    kind: Kind
    nbytes: int


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one lane does.

    ``after`` are indices of earlier actions that must be done before this one starts, beside the one before it on the
    same lane. ``nbytes`` are bytes moved (transfers) or touched (updates). ``what`` is the text of its event.

    ENCODE, DECODE   the root ``tensor`` as ``bits`` bits an element (0: as it is), but for its last ``rest`` bytes,
                 which are copied to a storage of their own, or back; ``nbytes`` are those of the root, of its codes and
                 of the rest.
                 While it runs the device holds ``peak`` bytes more: what it makes, and its workspace. When it is done,
                 what ``changes`` says. DECODE: ``ops`` as of RELOAD
    COMPUTE      ``ops`` is the range of op numbers, ``recomputed`` says that they are a block's forward run again for
                 its backward, ``treated`` that the plan treats some of that forward and every op of it is seen.
                 ``uses`` are the blocks that it reads from slots. While it runs, the device holds ``peak`` bytes more
                 than before it at most; when it is done, what ``changes`` says.
    FETCH        ``block`` into ``slot``
    LAND, ACCUMULATE   the gradient of ``parameter``; when done, ``changes`` frees it on the device. ``slot`` is which
                 of ``Streaming.gradient_slots`` it lands in, if its block is updated in backward
    OFFLOAD      the root ``tensor`` (an id of the trace) that ``block`` made. ``ops`` are the op that makes it and, not
                 included, the one before which forward lets go of it (of codes: the next): ``changes`` frees it when
                 both that is so and the copy is done. On its way to disk it lies at byte ``ring`` of the ring on the
                 host from when this starts until its WRITE is done
    RELOAD       the root ``tensor`` for backward; it takes ``peak`` from when it is issued, and ``changes`` says what
                 stays and what went just before. Both of ``ops`` are the op that comes next when it is issued: of a
                 block that runs again, named ops before that were given what they have made
    LOAD, STORE  ``block`` and the ``chunk`` of its states; ``part`` is what of it moves: STATE, PARAMETER or GRADIENT.
                 Where the largest elements of gradients move, they are ``chosen_from`` so many, which is done first
                 The UPDATE between them is on lane DEVICE_UPDATE or, beside the storage, on STORAGE_UPDATE: then states
                 move nowhere
    UPDATE, READ, WRITE   ``block`` and the ``chunk`` of its states; chunk -1: its parameters (READ, WRITE) or a
                 resident block as a whole (UPDATE). With ``tensor``: that root, or its codes; ``ring`` is where READ
                 puts it, until its RELOAD is done. An UPDATE that is ``apart`` reads one place in memory and writes
                 another, which takes longer than in place

    Of a block that is updated ahead of its step (``Update.AHEAD``) there are two copies at home. UPDATE, with its
    READs and WRITEs, works on the current one and writes the other. They change places when the step is over: whatever
    is issued after the last COMPUTE of a step reads what its updates have made, whatever is issued before reads what
    the step began with.
    """

    lane: Lane
    verb: Verb
    what: str
    step: int
    block: str = ""
    after: tuple[int, ...] = ()
    nbytes: int = 0
    ops: tuple[int, int] = (0, 0)
    recomputed: bool = False
    treated: bool = False
    uses: tuple[Use, ...] = ()
    peak: int = 0
    changes: tuple[Change, ...] = ()
    slot: int = -1
    parameter: str = ""
    chunk: int = 0
    tensor: int = -1
    bits: int = 0
    rest: int = 0
    ring: int = -1
    part: Kind | None = None
    apart: bool = False
    chosen_from: int = 0

    pieces: ClassVar[tuple[int, ...]] = ()
    """Of an ``Outline``: in a program everything moves by itself."""


@dataclass(frozen=True)
class Program:
    """Actions in the order in which they are issued.

    ``slots`` are the device slots in bytes, shared ones and dedicated ones. ``standing`` are the bytes of every tier
    that are there all the time, by kind. ``micro_batches`` forward and backward passes make a step; ``steps`` steps
    are in the program, the last ``round`` of which are like all that would follow: in so many every block is updated
    once (``Streaming.update_every``). ``checksums``: as in ``Streaming``.
    """

    actions: tuple[Action, ...]
    slots: tuple[int, ...]
    standing: Mapping[Tier, Mapping[Kind, int]]
    steps: int
    micro_batches: int
    checksums: bool = CHECKSUMS
    round: int = 1

    @property
    def settled(self) -> range:
        """The steps that are like all that would follow."""
        return range(self.steps - self.round, self.steps)


class Outline(NamedTuple):
    """What of an action its seconds follow from, under the same names. A search makes tens of thousands, and an action
    has twice as many fields. ``pieces`` are the bytes of each, where several transfers are taken for one."""

    lane: Lane
    verb: Verb
    what: str
    step: int
    after: tuple[int, ...]
    nbytes: int = 0
    ops: tuple[int, int] = (0, 0)
    tensor: int = -1
    bits: int = 0
    apart: bool = False
    block: str = ""
    chosen_from: int = 0
    rest: int = 0
    pieces: tuple[int, ...] = ()
    recomputed: bool = False
    treated: bool = False


@dataclass(frozen=True)
class Sketch:
    """A program of which nothing is asked but how long it takes and what it moves: the same actions in outline."""

    actions: tuple[Outline, ...]
    slots: tuple[int, ...]
    steps: int
    micro_batches: int
    checksums: bool
    round: int = 1

    @property
    def settled(self) -> range:
        """As of ``Program``."""
        return range(self.steps - self.round, self.steps)
