"""What leaves the device of blocks that do not run again, by the order in which autograd saves.

A plan names ops, and a dispatch mode knows which op has made what (``offloading.py``). The result is *noted* then, and
leaves when autograd saves it for the first time: from then on that has a ticket in its place. As nobody reads a tensor
behind autograd's back between the two, backward gets the same bytes.

torch hands every op to such a mode in Python, some 35 microseconds each on a CPU whose caches are full of activations,
and on a GPU all of it is time in which nothing is launched. Passes on batches of one shape save the same tensors in the
same order, mostly. So the first ones are *learned*: which of their saves were the first of a noted storage. Once two
are alike the next ones are *followed*: what is saved at the same place leaves, and no op is seen.

A pass that saves other things than those learned (layers that are left out, routes) is right all the same, since what
leaves comes back as it was; but what the plan moves may stay. It shows at the next block at the latest, whose ops are
seen then, as are those of all blocks behind it and of all passes from then on. So they are where several micro-batches
take turns. Where anything becomes codes (``treatments.seen_by_op``), which changes numbers or asks what else is done
with them, it is treated as soon as it is made, and all this is not for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple, final
from weakref import WeakKeyDictionary

import torch

from forebay.errors import ForebayError
from forebay.runtime.stash import Stash, Ticket
from forebay.treatments import Treatment

__all__ = ["Due", "SaveOrder"]

SHAPES = 64
"""Batches of so many shapes are remembered; another one takes the place of the first."""


class _Pass(Enum):
    """What is known of the pass that runs, or that there is none."""

    SEEN = "seen"  # nothing: its ops are seen, and nobody learns from it
    LEARNED = "learned"
    FOLLOWED = "followed"  # it does what those did from which it was learned
    STRAYED = "strayed"  # it was followed, until it did something else


_NEXT = {
    _Pass.SEEN: {_Pass.SEEN, _Pass.LEARNED, _Pass.FOLLOWED},
    _Pass.LEARNED: {_Pass.SEEN},
    _Pass.FOLLOWED: {_Pass.SEEN, _Pass.STRAYED},
    _Pass.STRAYED: {_Pass.SEEN},
}


class Due(NamedTuple):
    """A storage gets ``treatment``; ``what`` names it in the events."""

    treatment: Treatment
    what: str


Look = tuple[object, ...]
"""What a tensor is like that is saved: enough to tell it from most others."""


class _Learned(NamedTuple):
    """A pass: the saves at which something is ``due``, by place; ``entries`` of blocks, each with how many saves came
    before it; ``saves`` in all. ``twice``: two passes, one after the other, were like this."""

    due: dict[int, tuple[Look, Due]]
    entries: tuple[tuple[str, int], ...]
    saves: int
    twice: bool = False


@final
class SaveOrder:
    """The saves of one session. ``by_op``: what ops make is treated as soon as it is made."""

    def __init__(self, stash: Stash, *, by_op: bool) -> None:
        self._stash = stash
        self._by_op = by_op
        self.treating = False
        """Whether the ops that run are those of a treatment."""
        # By the shape of the batch; None: passes are not learned, or not any more.
        self._known: dict[Hashable, _Learned] | None = None if by_op else {}
        # Storages that named ops have made and nobody has saved yet.
        self._noted = WeakKeyDictionary[torch.UntypedStorage, Due]()
        # Of the pass that runs; ``_like`` is the one that it follows.
        self._pass = _Pass.SEEN
        self._like = _Learned({}, (), 0)
        self._shape: Hashable = None
        self._place = self._kept = 0
        self._due: dict[int, tuple[Look, Due]] = {}
        self._entries: list[tuple[str, int]] = []

    def forget(self) -> None:
        """A pass begins, or several that take turns: what was noted before is of no use any more."""
        self._noted.clear()

    def begin(self, shape: Hashable, *, alone: bool) -> None:
        """A training pass begins, on a batch of ``shape``; ``alone``: no other takes turns with it."""
        self._go_to(_Pass.SEEN)
        self._shape, self._place, self._kept = shape, 0, self._stash.kept
        self._due, self._entries = {}, []
        if self._known is None or not alone:
            return
        known = self._known.get(shape)
        if known is not None and known.twice:
            self._like = known
            self._go_to(_Pass.FOLLOWED)
        else:
            self._go_to(_Pass.LEARNED)

    def enter(self, block: str) -> bool:
        """The forward of ``block`` begins. Returns whether its ops have to be seen."""
        entry, number = (block, self._place), len(self._entries)
        self._entries.append(entry)
        if self._pass is _Pass.FOLLOWED and self._like.entries[number : number + 1] != (entry,):
            self._go_to(_Pass.STRAYED)
        return self._pass is not _Pass.FOLLOWED

    def made(self, tensor: torch.Tensor, due: Due, *, signs: bool) -> None:
        """A named op has made the storage of ``tensor``. ``signs``: see ``Stash.treat``."""
        if self._by_op:
            self._stash.treat(tensor, due.treatment, due.what, signs=signs)
        else:
            self._noted[tensor.untyped_storage()] = due

    def saved(self, tensor: torch.Tensor) -> Ticket | None:
        """``tensor``, which is no parameter that streams, is saved; its ticket, if its storage is treated."""
        place = self._place
        self._place = place + 1
        if self._pass is not _Pass.FOLLOWED:
            due = self._noted.pop(tensor.untyped_storage(), None)
            return self._stash.ticket_of(tensor) if due is None else self._treated(tensor, due, place)
        entry = self._like.due.get(place)
        if entry is None:
            return self._stash.ticket_of(tensor)
        look, due = entry
        if look != _look(tensor):
            self._go_to(_Pass.STRAYED)
            return self._stash.ticket_of(tensor)
        return self._stash.treat(tensor, due.treatment, due.what)

    def _treated(self, tensor: torch.Tensor, due: Due, place: int) -> Ticket | None:
        """The ticket of what was noted, which is saved for the first time."""
        # A mode may be on, which is to see the model's ops only.
        self.treating = True
        try:
            ticket = self._stash.treat(tensor, due.treatment, due.what)
        finally:
            self.treating = False
        if self._pass is _Pass.LEARNED and ticket is not None:
            self._due[place] = _look(tensor), due
        return ticket

    def end(self, *, whole: bool) -> None:
        """The pass is over; ``whole``: it came to its end."""
        like = self._like
        short = (self._place, len(self._entries)) != (like.saves, len(like.entries))
        if whole and (self._pass is _Pass.STRAYED or (self._pass is _Pass.FOLLOWED and short)):
            self._known = None
        # What found no room may find some another time.
        if whole and self._pass is _Pass.LEARNED and self._stash.kept == self._kept:
            self._remember(_Learned(self._due, tuple(self._entries), self._place))
        self._go_to(_Pass.SEEN)

    def _remember(self, learned: _Learned) -> None:
        known = self._known
        if known is None:
            return
        before = known.pop(self._shape, None)
        if len(known) == SHAPES:
            del known[next(iter(known))]
        known[self._shape] = learned._replace(twice=before == learned)

    def _go_to(self, state: _Pass) -> None:
        if state not in _NEXT[self._pass]:
            raise ForebayError(f"a pass that is {self._pass.value} cannot be {state.value}")
        self._pass = state


def _look(tensor: torch.Tensor) -> Look:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.untyped_storage().nbytes()
