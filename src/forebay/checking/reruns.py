"""What runs again in a pass: which forward visit, how far it has come, and what its named ops are given. No torch.

A named op of a block that recomputes does not run again: when the rerun comes to it, it is *passed over*. It is given
what it has made, after which what it would have read may go. No action of the program says so: it happens on the host,
between two compute actions, in the order of the ops. What it takes and frees is so for certain

    when the compute comes that runs the op after it;
    when something is brought back, or decoded, that says which op comes next (``Action.ops``): the named ops before
    that one have been passed over when it is issued, and it starts no earlier.

The second is what makes room for many named ops in a row, each of which has its result back when that of the one before
it is gone. It is all that is believed of ``Action.ops``, and it cannot be believed too much: only named ops are passed
over so, only those before the op that runs next anyway, and only as far as what they have made is on the device for
certain (``computing``). Which of them comes before which transfer is the order in which the host issues things; that
order is the program's own, as it is for everything else in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from forebay.checking.live import Live, Missing
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.program import Program

__all__ = ["Reruns"]


@final
class Reruns:
    """The reruns of one pass after the other. ``next_op`` is everywhere the op that runs next for the first time."""

    def __init__(self, step: Step, live: Live, program: Program) -> None:
        self._step = step
        self._live = live
        self._program = program
        self._named = live.treated.named
        # Of every visit that has run again in this pass, the op that comes next in it; the latest of them, while it may
        # go on.
        self._again: dict[int, int] = {}
        self._latest: int | None = None
        # Of every backward visit the forward visits that do not run again for it because all of their ops are named.
        self._spared: dict[int, list[int]] = {}
        for forward, partners in live.partners.items():
            if step.remade(forward) and self._named.issuperset(step.remade(forward)):
                self._spared.setdefault(min(partners, default=-1), []).append(forward)

    def begin(self) -> None:
        """A pass begins."""
        self._again.clear()
        self._latest = None

    # Named ops.

    def before(self, op: int, next_op: int) -> Sequence[int]:
        """The named ops that come, in what runs again, between what was run last and ``op``, with which backward or a
        rerun goes on; none if others do."""
        step = self._step
        if not 0 < op < len(step.ops):
            return ()
        visit, backward, passing = step.ops[op].visit, step.ops[next_op].visit, list[int]()
        if self._latest is not None and self._latest != visit:
            passing += self._to_come(self._latest)
        if backward in self._live.partners.get(visit, frozenset()):
            passing += (n for n in self._to_come(visit) if n < op)
        elif op != next_op:
            return ()
        elif op == step.trace.visits[visit].first_op:
            passing += (n for forward in self._spared.get(visit, ()) for n in self._to_come(forward))
        return passing if self._named.issuperset(passing) else ()

    def pass_over(self, ops: Iterable[int]) -> None:
        """Passes over ``ops`` (``before``), up to the first for which what it has made is not there: the compute that
        comes next finds out whether that is too late."""
        try:
            for op in ops:
                self._pass_over(op)
        except Missing:
            return

    def pass_over_spared(self, visit: int) -> None:
        """Backward visit ``visit`` begins, whatever runs again for it is over: forwards of which nothing does are given
        what they have made. Raises ``Missing``."""
        for forward in self._spared.get(visit, ()):
            for op in self._to_come(forward):
                self._pass_over(op)
        self._latest = None

    def _to_come(self, visit: int) -> range:
        """The ops of a visit that runs again which come next in it."""
        remade = self._step.remade(visit)
        return range(self._again.get(visit, remade.start), remade.stop)

    def _pass_over(self, op: int) -> None:
        """A named op is given what it has made. Raises ``Missing`` where that is not there."""
        visit = self._step.ops[op].visit
        if visit not in self._again:
            self._live.expect_inputs(visit)
        self._live.pass_over(op)
        self._again[visit], self._latest = op + 1, visit

    # Ops that run again.

    def run(self, index: int, op: int, next_op: int) -> None:
        """Action ``index`` runs ``op`` again. Recomputation belongs to the backward visit that begins next or is under
        way, and is that of a whole visit up to its last saved tensor, but for named ops: torch ends it there, and no
        earlier. Raises ``PlanInvalid``, and ``Missing`` for what a named op before it is given, or the visit."""
        step = self._step
        backward = step.ops[next_op].visit if next_op < len(step.ops) else -1
        visit = step.ops[op].visit
        if visit != self._latest:
            self.end(index)
        remade = step.remade(visit)
        expected = self._again.get(visit, remade.start)
        between = range(expected, op)  # mostly empty
        left_out = next((n for n in between if n not in self._named), None) if between else None
        if backward not in self._live.partners.get(visit, frozenset()):
            text = f"op {op} ({step.op_name(op)}) is run again before op {next_op}, which is not its backward"
        elif op < expected:
            text = f"op {op} ({step.op_name(op)}) is recomputed twice in one pass"
        elif op in self._named:
            text = f"op {op} ({step.op_name(op)}) is run again, and the plan keeps or moves what it has made"
        elif op not in remade:
            text = f"op {op} ({step.op_name(op)}) is run again, and the last tensor of its block is saved before it"
        elif left_out is not None:
            text = f"op {left_out} ({step.op_name(left_out)}) is left out of what is run again before op {next_op}"
        else:
            for number in between:
                self._pass_over(number)
            if visit not in self._again:
                self._live.expect_inputs(visit)
            self._again[visit], self._latest = op + 1, visit
            return
        raise self._fault(index, op, text)

    def end(self, index: int) -> None:
        """At action ``index`` something else goes on: what was run again has to have come to the last saved tensor of
        its visit. Raises ``PlanInvalid``, and ``Missing`` for what a named op at its end is given."""
        for op in () if self._latest is None else self._to_come(self._latest):
            if op not in self._named:
                name = self._step.op_name(op)
                text = f"op {op} ({name}) is not run again, and a tensor of its block is saved after it"
                raise self._fault(index, op, text)
            self._pass_over(op)
        self._latest = None

    def expect_all(self, index: int, number: int) -> None:
        """Pass ``number`` is over with action ``index``: every recomputed visit that saves something which backward
        asks for has been run again, whether an op reads that or not. Raises ``PlanInvalid``."""
        for visit in (forward for forward, partners in self._live.partners.items() if partners):
            op = next((n for n in self._step.remade(visit) if n not in self._named), None)
            if op is not None and visit not in self._again:
                name = self._step.op_name(op)
                text = f"op {op} ({name}) is not run again in pass {number}, and backward needs what it saves"
                raise self._fault(index, op, text)

    def _fault(self, index: int, op: int, text: str) -> Exception:
        return fault(self._program, index, self._step.block(op) or self._step.ops[op].name, text)
