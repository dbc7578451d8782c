"""Which tensors of the step are in memory, op by op, and how many bytes they take. No torch.

Holders of a root
    Python, from the op that makes it until it is dropped; autograd, until it is unsaved. The forward of a block that
    is recomputed is run without autograd's hold on what is saved in it, and holds its inputs until backward has let
    go of all that (``torch.utils.checkpoint``, non-reentrant). It runs again up to its last saved tensor. What it then
    makes is a *remade* root, a copy of its own beside the first if that is still there: Python holds it until it is
    dropped, or the rerun is over; autograd, if it is saved there, until it is spent.

Named ops (``treated``) of such a block do not run again. A record holds what they have made from then until the rerun
comes to where the op would run (or, where it never comes there, until the end of the forward). From then on it is held
as if it had been remade, but it is the same root.

Roots that are moved or encoded are on the device twice. First, while Python holds them, and (moved as they are) until
they are on the host: that is the program's to say (``transfers``). All other holders hold what stands for them. Then
again, from when they ``arrive``, until none of those holders is left. Codes, and the rest of what is treated in part,
are there from when they are made until the root arrives, but for codes that are on the host in between; what nobody
holds goes when forward is over. A root of which a part was moved as it is comes back to a storage of its whole size,
and has arrived when the rest has been put there too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

from forebay.checking.step import Step
from forebay.checking.treated import NOTHING, Treated

__all__ = ["Gone", "Live", "Missing"]

PYTHON, AUTOGRAD, RECORD, PYTHON_AGAIN, AUTOGRAD_AGAIN = 1, 2, 4, 8, 16


@final
class Missing(Exception):
    """An op needs a root that is not in memory."""

    def __init__(self, op: int, root: int) -> None:
        super().__init__(f"op {op} reads tensor {root}")
        self.op = op
        self.root = root


@dataclass(frozen=True, slots=True)
class Gone:
    """What leaves the account when an op has run: ``gradients`` (parameter, bytes) that are complete, and roots that
    are on the device only if they are not yet on the host (``moved``)."""

    gradients: Sequence[tuple[int, int]]
    moved: Sequence[int]


@final
class Live:
    """The roots in memory during one forward and backward. ``nbytes`` are those of all of them but for the gradients
    of ``resident`` parameters: those that the first pass of a step completes are ``kept`` until their update, later
    ones are added to them. ``recompute`` are names of blocks."""

    def __init__(
        self, step: Step, resident: Collection[int], recompute: Collection[str], treated: Treated = NOTHING
    ) -> None:
        self._step = step
        self._resident = resident
        self.treated = treated
        self.recomputed = frozenset(recompute)
        self.partners = step.partners(self.recomputed)
        # A run that saves nothing (without gradients, say) has nothing that would want its inputs again.
        segments, visits = step.trace.segments, step.trace.visits
        self._saving = {p for p in self.partners if segments[visits[p].segment].saves}
        self._own = {root for op in step.ops for root in op.spent}
        self._others = {root for op in step.ops for root in op.released}
        self._letting_go: dict[int, list[int]] = {}
        for place in self.partners:
            self._letting_go.setdefault(step.trace.visits[place].kept_until, []).append(place)
        # Of the last op of a visit: what its record holds for nothing, made after the last saved tensor.
        self._late: dict[int, list[int]] = {}
        for op in sorted(treated.named):
            visit = step.ops[op].visit
            if op not in step.remade(visit):
                self._late.setdefault(step.last_op(visit), []).extend(step.ops[op].made)
        self.nbytes = 0
        self.kept = 0
        # Of those, by parameter: the bytes that go when it is used up.
        self._kept_of: dict[int, int] = {}
        self._first_pass = True
        self._first: dict[int, int] = {}
        self._remade: dict[int, int] = {}
        # Of moved roots: who holds what stands for them; those that are on the device again.
        self._away: dict[int, int] = {}
        self._back: set[int] = set()
        # Of those that are not as they were: bytes on the device that stand for them.
        self._codes: dict[int, int] = {}
        self._forward_goes_on = True
        # Of moved roots: those that Python has let go behind the op that ran last, which may not have returned.
        self._going: set[int] = set()
        self._rerun_holds: dict[int, int] = {}
        self._held_by: dict[int, tuple[int, ...]] = {}
        # The visit that runs again, the bytes of buffers copied for it, what it was given in the place of named ops.
        self._running_again = -1
        self._copied = 0
        self._given: set[int] = set()

    def begin(self, *, first_of_step: bool) -> None:
        """A pass begins: nothing of the one before is left but the gradients that stay."""
        self.nbytes = 0
        self.kept = 0 if first_of_step else self.kept
        if first_of_step:
            self._kept_of.clear()
        self._first_pass = first_of_step
        for table in (self._first, self._remade, self._away, self._back, self._codes, self._going):
            table.clear()
        for holders in (self._rerun_holds, self._held_by, self._given):
            holders.clear()
        self._forward_goes_on = True
        self._running_again, self._copied = -1, 0

    def start(self, number: int, *, again: bool = False) -> int:
        """Op ``number`` runs; what it makes is there beside all that was. Returns the live bytes.

        Raises ``Missing`` if it reads what is not there.
        """
        step, op = self._step, self._step.ops[number]
        self._going.clear()
        running = op.visit if again else -1
        if running != self._running_again:
            self._turn(running)
        if op.opens and not again and op.visit in self._saving:
            self._hold_inputs(op.visit)
        first, remade, away = self._first, self._remade, self._away
        for root in op.reads:
            if root in away:
                # Backward asks for what stands for a moved one, whoever holds that beside.
                there = root in (self._back if again or op.backward else first)
            else:
                there = root in first or root in remade
            if not there:
                raise Missing(number, root)
        for root in op.made:
            if again:
                self._remade[root] = PYTHON | (AUTOGRAD if step.saved[root] and root in self._own else 0)
            else:
                self._make(number, root)
            self.nbytes += step.nbytes[root]
        return self.nbytes + self.kept

    def finish(self, number: int, *, again: bool = False) -> Gone | None:
        """Op ``number`` has run. None: nothing leaves."""
        moved = self._free(number, again)
        gradients = self._complete(number) if self._step.ops[number].gradients else ()
        if not again and number in self._step.ending:
            for root in self._step.ending[number]:
                if self._first.pop(root, None) is not None:
                    self.nbytes -= self._step.nbytes[root]
        return Gone(gradients, moved) if gradients or moved else None

    def _complete(self, number: int) -> list[tuple[int, int]]:
        """The gradients that leave when op ``number`` has completed them; others stay."""
        leaving = []
        for parameter, root in self._step.ops[number].gradients:
            # Two gradients in one root: the bytes go with the last one.
            there = root in self._first and self._step.last_gradient[root] == parameter
            nbytes = self._step.nbytes[root] if there else 0
            if parameter not in self._resident:
                leaving.append((parameter, nbytes))
            elif self._first_pass:
                self.kept += nbytes
                self._kept_of[parameter] = nbytes
        return leaving

    def use_up(self, parameter: int) -> bool:
        """An update in backward lets go of the gradient of a resident parameter. Returns whether it was there."""
        nbytes = self._kept_of.pop(parameter, None)
        self.kept -= nbytes or 0
        return nbytes is not None

    def pass_over(self, number: int) -> None:
        """A rerun comes to op ``number``, which is named: it is given what the op has made. Raises ``Missing`` for a
        moved root that is not on the device again."""
        step, op = self._step, self._step.ops[number]
        for root in op.made:
            if root in self._away and root not in self._back:
                raise Missing(number, root)
        self._turn(op.visit)
        for root in op.made:
            table = self._away if root in self._away else self._first
            held = PYTHON_AGAIN | (AUTOGRAD_AGAIN if step.saved[root] and root in self._own else 0)
            table[root] = table[root] & ~RECORD | held
            self._given.add(root)
        self._free(number, again=True)

    def expect_inputs(self, visit: int) -> None:
        """A visit runs again. Raises ``Missing`` for a moved input of it that is not on the device again."""
        for root in self._held_by.get(visit, ()):
            if root in self._away and root not in self._back:
                raise Missing(self._step.trace.visits[visit].first_op, root)

    def is_wanted(self, root: int) -> bool:
        """Whether somebody holds what stands for a moved root on the host."""
        return bool(self._away.get(root) or self._rerun_holds.get(root))

    def forward_is_over(self) -> None:
        """Codes that nobody holds are let go."""
        self._forward_goes_on = False
        for root in [root for root in self._codes if not self.is_wanted(root)]:
            self.nbytes -= self._codes.pop(root)

    def holds_first(self, root: int) -> bool:
        """Whether ``root`` is there as it was made: Python holds it, or lets go of it behind the op that was the last
        to run: what an op saves it saves before it returns (a dropout what nobody else ever has)."""
        return root in self._first or root in self._going

    def is_complete(self, root: int) -> bool:
        """Whether all that ``root`` is made of again is on the device: its codes, or its first part, and the rest."""
        way = self.treated.ways[root]
        return self._codes.get(root) == way.rest + way.in_transit

    def encode(self, root: int) -> None:
        """The codes of ``root``, and its rest, are on the device."""
        self._codes[root] = self.treated.ways[root].made
        self.nbytes += self._codes[root]

    def give_away(self, root: int) -> None:
        """Only the way off the device keeps the codes of ``root`` there."""
        self._codes[root] -= self.treated.ways[root].in_transit
        self.nbytes -= self.treated.ways[root].in_transit

    def bring_back(self, root: int) -> None:
        """The codes of ``root``, or the storage of which its first part fills its own, are on the device again."""
        self._codes[root] = self._codes.get(root, 0) + self.treated.ways[root].in_transit
        self.nbytes += self.treated.ways[root].in_transit

    def arrive(self, root: int) -> None:
        """A root is on the device again, in the place of what stood for it there; it is let go at once if nobody holds
        what stands for it."""
        self.nbytes -= self._codes.pop(root, 0)
        if self.is_wanted(root):
            self._back.add(root)
            self.nbytes += self._step.nbytes[root]

    def largest(self) -> int | None:
        """The largest root in memory."""
        roots = [*self._first, *self._remade, *self._back]
        return max(roots, key=lambda r: (self._step.nbytes[r], -r), default=None)

    def _make(self, number: int, root: int) -> None:
        drops = self._step.ops[number].visit in self._saving and root not in self._others
        others = AUTOGRAD if self._step.saved[root] and not drops else 0
        others |= RECORD if number in self.treated.named else 0
        if root in self.treated.ways:
            self._away[root] = others
            others = 0
        self._first[root] = PYTHON | others

    def _free(self, number: int, again: bool) -> Sequence[int]:
        """Lets go of what nobody holds after op ``number``. Returns the roots that only their way to the host keeps."""
        op = self._step.ops[number]
        moved = self._drop_all(op.dropped, again) if op.dropped else ()
        for root in op.unsaved:
            self._let_saved_go(root)
        for root in op.released:
            if self._visit(root) in self.partners:
                self._let_saved_go(root)
        for root in op.spent:
            self._let_go(self._remade, root, AUTOGRAD)
            self._let_given_go(root, AUTOGRAD_AGAIN)
        if again:
            return moved
        if number in self._letting_go:
            for visit in self._letting_go[number]:
                self._let_inputs_go(visit)
        if number in self._late:
            for root in self._late[number]:
                self._let_given_go(root, RECORD)
        return moved

    def _drop_all(self, roots: Sequence[int], again: bool) -> Sequence[int]:
        """Python lets go of ``roots``. Returns those that only their way to the host keeps."""
        first, moved = self._first, []
        for root in roots:
            alone = first.get(root) == PYTHON and not again and root not in self._away and root not in self._given
            if alone and not self._rerun_holds.get(root):  # the usual case of ``_drop``
                del first[root]
                self.nbytes -= self._step.nbytes[root]
            elif self._drop(root, again):
                moved.append(root)
        return moved

    def _drop(self, root: int, again: bool) -> bool:
        """Python lets go of ``root``; whether only its way to the host keeps it now."""
        if root in self._given:
            self._let_given_go(root, PYTHON_AGAIN)
        elif again:
            self._let_go(self._remade, root, PYTHON)
        elif root not in self._away:
            self._let_go(self._first, root, PYTHON)
        elif self._first.pop(root, None) is not None:
            self._going.add(root)
            self.nbytes -= self._step.nbytes[root]
            return self.treated.ways[root].codes is None
        return False

    def _let_saved_go(self, root: int) -> None:
        self._let_go(self._away if root in self._away else self._first, root, AUTOGRAD)

    def _let_given_go(self, root: int, holder: int) -> None:
        """A holder of what named ops have made lets go of it."""
        self._let_go(self._away if root in self._away else self._first, root, holder)

    def _let_go(self, table: dict[int, int], root: int, holder: int) -> None:
        mask = table.get(root)
        if mask is None:
            return
        table[root] = mask & ~holder
        if table[root] or (table is not self._remade and self._rerun_holds.get(root)):
            return
        if table is self._away:
            # What stands for it is gone, on the host and on the device; Python may still hold the first copy.
            if root in self._back:
                self._back.discard(root)
                self.nbytes -= self._step.nbytes[root]
            if not self._forward_goes_on:
                self.nbytes -= self._codes.pop(root, 0)
        else:
            del table[root]
            self.nbytes -= self._step.nbytes[root]

    def _visit(self, root: int) -> int:
        return self._step.ops[self._step.birth[root]].visit

    def _hold_inputs(self, visit: int) -> None:
        inputs = tuple(root for root in self._step.inputs[visit] if root in self._first)
        self._held_by[visit] = inputs
        self.nbytes += self._step.found_nbytes(visit)
        for root in inputs:
            self._rerun_holds[root] = self._rerun_holds.get(root, 0) + 1

    def _let_inputs_go(self, visit: int) -> None:
        if visit in self._held_by:
            self.nbytes -= self._step.found_nbytes(visit)
        for root in self._held_by.pop(visit, ()):
            self._rerun_holds[root] -= 1
            self._let_go(self._away if root in self._away else self._first, root, 0)

    def _turn(self, running: int) -> None:
        """Visit ``running`` runs again, or (below 0) none does."""
        if running != self._running_again:
            self._end_rerun()
            self._running_again = running
            self._copied = self._step.copied_nbytes(running) if running >= 0 else 0
            self.nbytes += self._copied

    def _end_rerun(self) -> None:
        """The rerun is over: its leftovers go."""
        self.nbytes -= self._copied
        for root in list(self._remade):
            self._let_go(self._remade, root, PYTHON)
        for root in self._given:
            self._let_given_go(root, PYTHON_AGAIN)
        self._given.clear()
