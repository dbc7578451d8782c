"""Whether what a plan moves off the device, or makes into codes, as a whole or in part, gets there, once in every pass,
and comes back in time. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from forebay.checking.live import Live
from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.layout import PAGE
from forebay.program import Action, Program, Verb
from forebay.treatments import Fate, StandIn

__all__ = ["Transfers"]


@final
class Transfers:
    """Every action on a single activation, in the order of the program; told of compute by whoever runs through it.

    ``offloads`` are the actions by root and pass, ``reloads`` all of them with their bytes. Every pass has the arena on
    the host, and the file, to itself (``treated.check_room``), so that nothing may be under way from one to the next.
    """

    def __init__(self, step: Step, live: Live, program: Program, order: Order) -> None:
        self.offloads: dict[tuple[int, int], int] = {}
        self.reloads: list[tuple[int, int]] = []
        self._step = step
        self._live = live
        self._program = program
        self._order = order
        self._number = 0
        # In this pass, by root: the action that makes it, that which did something with it last, of each verb; and what
        # is not back for certain.
        self._made: dict[int, int] = {}
        self._done: dict[Verb, dict[int, int]] = {verb: {} for verb in Verb}
        self._coming: list[int] = []

    # Compute.

    def begin(self, number: int) -> None:
        """Pass ``number`` begins."""
        self._number = number
        self._made.clear()
        for table in self._done.values():
            table.clear()

    def end(self, index: int) -> None:
        """The pass is over at action ``index``. Raises ``PlanInvalid`` for a root that was not treated in it as the
        plan says, or that may be on its way back: the next pass may write to its bytes on the host."""
        for root, way in self._live.treated.ways.items():
            if way.is_made and root not in self._done[Verb.ENCODE]:
                what = "in parts" if way.codes is None else "codes"
                raise self._fault(index, root, f"has to be {what} and is not encoded in pass {self._number}")
            if way.leaves and root not in self._done[Verb.OFFLOAD]:
                raise self._fault(index, root, f"has to be on the host and is not moved there in pass {self._number}")
            if way.fate is Fate.DISK and root not in self._done[Verb.WRITE]:
                raise self._fault(index, root, f"has to be on disk and is not written there in pass {self._number}")
        for root in self._coming:
            text = f"may not be back when pass {self._number} is over"
            raise self._fault(self._done[Verb.RELOAD][root], root, text)

    def made(self, number: int, index: int) -> None:
        """Op ``number`` ran for the first time in the pass, in action ``index``."""
        for root in self._step.ops[number].made:
            if root in self._live.treated.ways:
                self._made[root] = index

    def arrived(self, *actions: int) -> Iterator[int]:
        """Roots, or codes, that are on the device again for certain when each of ``actions`` starts, and were not
        before."""
        back = self._done[Verb.RELOAD]
        while self._coming and all(self._order.before(back[self._coming[0]], index) for index in actions):
            yield self._coming.pop(0)

    def is_out(self, root: int, index: int) -> bool:
        """Whether ``root`` is on the host for certain when action ``index`` starts."""
        return self._is_done(Verb.OFFLOAD, root, index)

    # Single activations.

    def act(self, index: int, action: Action) -> None:
        """Raises ``PlanInvalid`` for an action on an activation that is too early, too late, not once, or not what the
        plan asks for."""
        root = action.tensor
        way = self._live.treated.ways.get(root)
        if way is None:
            raise fault(self._program, index, f"tensor {root}", f"the plan does not treat tensor {root}")
        match action.verb:
            case Verb.ENCODE:
                self._encode(index, action, way)
            case Verb.DECODE:
                self._decode(index, action, way)
            case Verb.OFFLOAD:
                self._offload(index, action, way)
            case Verb.WRITE:
                self._write(index, action, way)
            case Verb.READ:
                self._read(index, action, way)
            case Verb.RELOAD:
                self._reload(index, action, way)
        self._done[action.verb][root] = index

    def _encode(self, index: int, action: Action, way: StandIn) -> None:
        root = action.tensor
        self._expect_codes(index, action, way)
        self._expect_first(Verb.ENCODE, "is encoded", index, root)
        if root not in self._made:
            raise self._fault(index, root, "is encoded before it is made")
        if not self._live.holds_first(root):
            raise self._fault(index, root, "is encoded when it is not in memory any more")

    def _decode(self, index: int, action: Action, way: StandIn) -> None:
        root = action.tensor
        self._expect_codes(index, action, way)
        if not self._live.is_complete(root):
            what = "again" if way.codes is None else "as codes"
            raise self._fault(index, root, f"may not be on the device {what} when it is decoded")
        if not self._live.is_wanted(root):
            raise self._fault(index, root, "is not read again")

    def _offload(self, index: int, action: Action, way: StandIn) -> None:
        root = action.tensor
        self._expect_bytes(index, action, way, 1)
        self._expect_first(Verb.OFFLOAD, "is on the host", index, root)
        if way.codes is not None and not self._is_done(Verb.ENCODE, root, index):
            raise self._fault(index, root, "may not be encoded when it starts")
        if root not in self._made or not self._order.before(self._made[root], index):
            raise self._fault(index, root, "may not be complete when it starts")
        freed = -sum(change.nbytes for change in action.changes)
        if not 0 <= freed <= way.in_transit:
            raise self._fault(index, root, f"has other bytes than the {freed} that this frees")
        self.offloads[root, self._number] = index

    def _write(self, index: int, action: Action, way: StandIn) -> None:
        root = action.tensor
        self._expect_disk(index, action, way)
        self._expect_first(Verb.WRITE, "is on disk", index, root)
        if not self.is_out(root, index):
            raise self._fault(index, root, "may not be in the ring yet when it is written to disk")
        self._expect_ring(index, action, Verb.OFFLOAD)

    def _read(self, index: int, action: Action, way: StandIn) -> None:
        """May be read more than once, if its bytes in the ring were given away before it came further."""
        root = action.tensor
        self._expect_disk(index, action, way)
        if not self._is_done(Verb.WRITE, root, index):
            raise self._fault(index, root, "may not be on disk yet when it is read")
        if root in self._done[Verb.RELOAD]:
            raise self._fault(index, root, "is on the device again already")

    def _reload(self, index: int, action: Action, way: StandIn) -> None:
        root = action.tensor
        self._expect_bytes(index, action, way, 1)
        if root not in self._done[Verb.OFFLOAD]:
            raise self._fault(index, root, "is not on the host in this pass")
        self._expect_first(Verb.RELOAD, "is on the device again", index, root)
        if way.fate is Fate.DISK:
            if not self._is_done(Verb.READ, root, index):
                raise self._fault(index, root, "may not be read from disk yet")
            self._expect_ring(index, action, Verb.READ)
        elif not self.is_out(root, index):
            out = self._done[Verb.OFFLOAD][root]
            raise self._fault(index, root, f"may not be on the host yet: action {out} moves it")
        if not self._live.is_wanted(root):
            raise self._fault(index, root, "is not read again")
        self._coming.append(root)
        self.reloads.append((index, way.in_transit))

    # What each of them has to be like.

    def _is_done(self, verb: Verb, root: int, index: int) -> bool:
        return root in self._done[verb] and self._order.before(self._done[verb][root], index)

    def _expect_first(self, verb: Verb, what: str, index: int, root: int) -> None:
        if root in self._done[verb]:
            raise self._fault(index, root, f"{what} already: action {self._done[verb][root]} did that in this pass")

    def _expect_bytes(self, index: int, action: Action, way: StandIn, to: int) -> None:
        if not way.leaves:
            raise self._fault(index, action.tensor, "stays on the device: the plan does not move it")
        if action.nbytes != -(-way.moved // to) * to:
            raise self._fault(index, action.tensor, f"has other bytes than the {action.nbytes} that this moves")

    def _expect_disk(self, index: int, action: Action, way: StandIn) -> None:
        if way.fate is not Fate.DISK:
            raise self._fault(index, action.tensor, "has no place on disk: the plan does not move it there")
        self._expect_bytes(index, action, way, PAGE)

    def _expect_ring(self, index: int, action: Action, verb: Verb) -> None:
        earlier = self._done[verb][action.tensor]
        place = self._program.actions[earlier].ring
        if action.ring != place:
            text = f"is at byte {place} of the ring, where action {earlier} put it, not at {action.ring}"
            raise self._fault(index, action.tensor, text)

    def _expect_codes(self, index: int, action: Action, way: StandIn) -> None:
        bits = way.codes.bits if way.codes else 0
        if not way.is_made or bits != action.bits:
            raise self._fault(index, action.tensor, f"is kept as {bits} bits an element, not as {action.bits}")
        if way.rest != action.rest:
            raise self._fault(index, action.tensor, f"has other bytes that stay as they are than these {action.rest}")

    def _fault(self, index: int, root: int, text: str) -> Exception:
        return fault(self._program, index, self._step.name(root), f"{self._step.name(root)} {text}")
