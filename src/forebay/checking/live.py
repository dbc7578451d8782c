"""Which tensors of the step are in memory, op by op, and how many bytes they take. No torch.

Holders of a root
    Python, from the op that makes it until it is dropped; autograd, until it is unsaved. The forward of a block that
    is recomputed is run without autograd's hold on what is saved in it, and holds its inputs until backward has let
    go of all that (``torch.utils.checkpoint``, non-reentrant). It runs again up to its last saved tensor. What it then
    makes is a *remade* root, a copy of its own beside the first if that is still there: Python holds it until it is
    dropped, or the rerun is over; autograd, if it is saved there, until it is spent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from forebay.checking.step import Step

__all__ = ["Live", "Missing"]

PYTHON, AUTOGRAD = 1, 2


@final
class Missing(Exception):
    """An op reads a root that is not in memory."""

    def __init__(self, op: int, root: int) -> None:
        super().__init__(f"op {op} reads tensor {root}")
        self.op = op
        self.root = root


@final
class Live:
    """The roots in memory during one forward and backward. ``nbytes`` are those of all of them but for the gradients
    of ``resident`` parameters: those that the first pass of a step completes are ``kept`` until its update, later ones
    are added to them. ``recompute`` are names of blocks."""

    def __init__(self, step: Step, resident: Collection[int], recompute: Collection[str]) -> None:
        self._step = step
        self._resident = resident
        self.recomputed = frozenset(recompute)
        self.partners = step.partners(self.recomputed)
        self._own = {root for op in step.ops for root in op.spent}
        self._others = {root for op in step.ops for root in op.released}
        self._letting_go: dict[int, list[int]] = {}
        for place in self.partners:
            self._letting_go.setdefault(step.trace.visits[place].kept_until, []).append(place)
        self.nbytes = 0
        self.kept = 0
        self._first_pass = True
        self._first: dict[int, int] = {}
        self._remade: dict[int, int] = {}
        self._rerun_holds: dict[int, int] = {}
        self._held_by: dict[int, tuple[int, ...]] = {}
        # The visit that runs again, and the bytes of buffers copied for it.
        self._running_again = -1
        self._copied = 0

    def begin(self, *, first_of_step: bool) -> None:
        """A pass begins: nothing of the one before is left but the gradients that stay."""
        self.nbytes = 0
        self.kept = 0 if first_of_step else self.kept
        self._first_pass = first_of_step
        for table in (self._first, self._remade, self._rerun_holds, self._held_by):
            table.clear()
        self._running_again, self._copied = -1, 0

    def start(self, number: int, *, again: bool = False) -> int:
        """Op ``number`` runs; what it makes is there beside all that was. Returns the live bytes.

        Raises ``Missing`` if it reads what is not there.
        """
        step, op = self._step, self._step.ops[number]
        running = op.visit if again else -1
        if running != self._running_again:
            self._end_rerun()
            self._running_again = running
            self._copied = step.copied_nbytes(running) if again else 0
            self.nbytes += self._copied
        if not again and number == step.trace.visits[op.visit].first_op and op.visit in self.partners:
            self._hold_inputs(op.visit)
        for root in op.reads:
            if root not in self._first and root not in self._remade:
                raise Missing(number, root)
        for root in op.made:
            mask = PYTHON
            if step.saved[root]:
                drops = op.visit in self.partners and root not in self._others
                keeps = root in self._own if again else not drops
                mask |= AUTOGRAD if keeps else 0
            (self._remade if again else self._first)[root] = mask
            self.nbytes += step.nbytes[root]
        return self.nbytes + self.kept

    def finish(self, number: int, *, again: bool = False) -> list[tuple[int, int]]:
        """Op ``number`` has run. Returns (parameter, bytes) of gradients that are complete and leave the account."""
        op = self._step.ops[number]
        self._free(number, again)
        leaving = []
        for parameter, root in op.gradients:
            # Two gradients in one root: the bytes go with the last one.
            there = root in self._first and self._step.last_gradient[root] == parameter
            nbytes = self._step.nbytes[root] if there else 0
            if parameter not in self._resident:
                leaving.append((parameter, nbytes))
            elif self._first_pass:
                self.kept += nbytes
        for root in () if again else self._step.ending.get(number, ()):
            if self._first.pop(root, None) is not None:
                self.nbytes -= self._step.nbytes[root]
        return leaving

    def _free(self, number: int, again: bool) -> None:
        """Lets go of what nobody holds after op ``number``."""
        op = self._step.ops[number]
        table = self._remade if again else self._first
        for root in op.dropped:
            self._let_go(table, root, PYTHON)
        for root in op.unsaved:
            if self._visit(root) not in self.partners:
                self._let_go(self._first, root, AUTOGRAD)
        for root in op.released:
            if self._visit(root) in self.partners:
                self._let_go(self._first, root, AUTOGRAD)
        for root in op.spent:
            self._let_go(self._remade, root, AUTOGRAD)
        for visit in () if again else self._letting_go.get(number, ()):
            self._let_inputs_go(visit)

    def largest(self) -> int | None:
        """The largest root in memory."""
        roots = [*self._first, *self._remade]
        return max(roots, key=lambda r: (self._step.nbytes[r], -r), default=None)

    def _let_go(self, table: dict[int, int], root: int, holder: int) -> None:
        mask = table.get(root)
        if mask is None:
            return
        table[root] = mask & ~holder
        if not table[root] and not (table is self._first and self._rerun_holds.get(root)):
            del table[root]
            self.nbytes -= self._step.nbytes[root]

    def _visit(self, root: int) -> int:
        return self._step.ops[self._step.birth[root]].visit

    def _hold_inputs(self, visit: int) -> None:
        inputs = tuple(root for root in self._step.inputs[visit] if root in self._first)
        self._held_by[visit] = inputs
        for root in inputs:
            self._rerun_holds[root] = self._rerun_holds.get(root, 0) + 1

    def _let_inputs_go(self, visit: int) -> None:
        for root in self._held_by.pop(visit, ()):
            self._rerun_holds[root] -= 1
            if root in self._first:
                self._let_go(self._first, root, 0)

    def _end_rerun(self) -> None:
        """The rerun is over: its leftovers go."""
        self.nbytes -= self._copied
        for root in list(self._remade):
            self._let_go(self._remade, root, PYTHON)
