"""Which tensors of the step are in memory, op by op, and how many bytes they take. No torch.

Holders of a root
    Python, from the op that makes it until it is dropped; autograd, until it is unsaved. The forward of a block that
    is recomputed is run without autograd's hold on what only that block saves, and it holds its inputs until it
    has been run again (``torch.utils.checkpoint``, non-reentrant). What it then makes is a *remade* root, a copy
    of its own beside the first if that is still there: Python holds it until it is dropped, or the rerun is over;
    autograd, if the block's own backward reads it, until it is unsaved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from forebay.checking.step import Step
from forebay.trace import Phase

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
        self._own, self._others = self._savers()
        self.nbytes = 0
        self.kept = 0
        self._first_pass = True
        self._first: dict[int, int] = {}
        self._remade: dict[int, int] = {}
        self._rerun_holds: dict[int, int] = {}
        self._held_by: dict[int, tuple[int, ...]] = {}
        self._running_again: set[int] = set()

    def _savers(self) -> tuple[set[int], set[int]]:
        """Saved roots of recomputed visits that the block's own backward needs, and that another's does."""
        step, own, others = self._step, set[int](), set[int]()
        for op in step.ops:
            if step.trace.visits[op.visit].phase is Phase.FORWARD:
                continue
            for root in {*op.reads, *op.unsaved}:
                if step.saved[root]:
                    mine = self.partners.get(step.ops[step.birth[root]].visit)
                    (own if mine is not None and op.visit in mine else others).add(root)
        return own, others

    def begin(self, *, first_of_step: bool) -> None:
        """A pass begins: nothing of the one before is left but the gradients that stay."""
        self.nbytes = 0
        self.kept = 0 if first_of_step else self.kept
        self._first_pass = first_of_step
        for table in (self._first, self._remade, self._rerun_holds, self._held_by):
            table.clear()
        self._running_again.clear()

    def start(self, number: int, *, again: bool = False) -> int:
        """Op ``number`` runs; what it makes is there beside all that was. Returns the live bytes.

        Raises ``Missing`` if it reads what is not there.
        """
        step, op = self._step, self._step.ops[number]
        if again:
            self._running_again.add(op.visit)
        elif self._running_again:
            self._end_rerun()
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
        table = self._remade if again else self._first
        for root in op.dropped:
            self._let_go(table, root, PYTHON)
        for root in op.unsaved:
            for copies in (self._first, self._remade):
                self._let_go(copies, root, AUTOGRAD)
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

    def _hold_inputs(self, visit: int) -> None:
        inputs = tuple(root for root in self._step.inputs[visit] if root in self._first)
        self._held_by[visit] = inputs
        for root in inputs:
            self._rerun_holds[root] = self._rerun_holds.get(root, 0) + 1

    def _end_rerun(self) -> None:
        """The rerun is over: its inputs are autograd's alone again, its results and leftovers go."""
        for visit in self._running_again:
            for root in self._held_by.pop(visit, ()):
                self._rerun_holds[root] -= 1
                if root in self._first:
                    self._let_go(self._first, root, 0)
        self._running_again.clear()
        for root in list(self._remade):
            self._let_go(self._remade, root, PYTHON)
