"""Whether compute runs the trace: every op once in every pass, in order, recomputed where it may be. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.checking.live import Live, Missing
from forebay.checking.step import Step
from forebay.checking.words import fault
from forebay.program import Action, Program, Verb
from forebay.trace import Phase

__all__ = ["Made", "Moment", "Passes", "largest", "walk"]


@dataclass(frozen=True, slots=True)
class Made:
    """A gradient is complete: ``parameter`` (its id) in pass ``number``, by action ``action``; ``nbytes`` of a root."""

    parameter: int
    number: int
    action: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The most that one compute action needs beside what stands: ``nbytes``, while ``op`` runs (-1: no op's).

    Gradients that were complete before the action are not in it.
    """

    action: int
    nbytes: int
    op: int


@dataclass
class Passes:
    """Passes are numbered through all steps. ``first`` and ``last`` are their first and last compute actions,
    ``made`` their gradients that leave or could leave, ``moments`` what compute needs, in order."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


def walk(step: Step, live: Live, program: Program) -> Passes:
    """Runs through the compute actions. Raises ``PlanInvalid`` for an op that is left out, repeated or out of order, or
    that reads a tensor which is not in memory."""
    walker = _Walker(step, live, program)
    for index, action in enumerate(program.actions):
        if action.verb is Verb.COMPUTE:
            walker.run(index, action)
    walker.end()
    return walker.passes


def largest(step: Step, live: Live, program: Program, moment: Moment) -> int | None:
    """The largest root in memory at ``moment``, found by walking there again: it is asked for when there is no room."""
    walker = _Walker(step, live, program, (moment.action, moment.op))
    for index, action in enumerate(program.actions[: moment.action + 1]):
        if action.verb is Verb.COMPUTE:
            walker.run(index, action)
    return walker.largest


class _Walker:
    def __init__(self, step: Step, live: Live, program: Program, wanted: tuple[int, int] = (-1, -1)) -> None:
        self.step = step
        self.live = live
        self.program = program
        self.passes = Passes()
        self.wanted = wanted
        self.largest: int | None = None
        self.next_op = 0
        self.number = 0
        # Of every visit that has run again in this pass, the op that comes next in it; the latest of them.
        self.again: dict[int, int] = {}
        self.rerun = -1
        self.last_forward = max((n for n in range(len(step.ops)) if step.phase(n) is Phase.FORWARD), default=-1)

    def run(self, index: int, action: Action) -> None:
        start, stop = action.ops
        if not 0 <= start <= stop <= len(self.step.ops):
            raise fault(self.program, index, action.what, f"the trace has no ops {start} to {stop}")
        if self.number >= self.program.steps * self.program.micro_batches:
            raise fault(self.program, index, action.what, "it computes after the last pass of the last step")
        if action.step != self.number // self.program.micro_batches:
            if self.next_op:
                raise self._unfinished(index)
            raise fault(
                self.program, index, action.what, f"it says step {action.step} in pass {self.number} of the program"
            )
        if self.next_op == 0 and not action.recomputed:
            self._begin_pass(index)
        if action.recomputed:
            self._expect_rerun(index, start, stop)
        else:
            self._end_rerun(index)
            if start != self.next_op:
                raise self._out_of_order(index, start)
        self._ops(index, start, stop, action.recomputed)
        if not action.recomputed:
            self.next_op = stop
        if self.next_op == len(self.step.ops):
            self._expect_all_rerun(index)
            self.passes.last.append(index)
            self.number += 1
            self.next_op = 0

    def end(self) -> None:
        expected = self.program.steps * self.program.micro_batches
        if self.number < expected or self.next_op:
            raise self._unfinished(len(self.program.actions))

    def _unfinished(self, index: int) -> Exception:
        op, passes = self.next_op, self.program.steps * self.program.micro_batches
        text = f"op {op} ({self._op(op)}) is not run in pass {self.number} of {passes}"
        return fault(self.program, index, self.step.ops[op].name, text)

    def _begin_pass(self, index: int) -> None:
        if len(self.passes.first) == self.number:
            self.passes.first.append(index)
            self.live.begin(first_of_step=self.number % self.program.micro_batches == 0)
            self.again.clear()
            self.rerun = -1

    def _out_of_order(self, index: int, start: int) -> Exception:
        expected = self.next_op
        if start > expected:
            text = f"op {expected} ({self._op(expected)}) is left out: the action begins with op {start}"
        else:
            text = f"op {start} ({self._op(start)}) is run again; the next one is op {expected} ({self._op(expected)})"
        at_fault = expected if start > expected else start
        return fault(self.program, index, self.step.ops[at_fault].name, text)

    def _expect_rerun(self, index: int, start: int, stop: int) -> None:
        """Recomputation belongs to the backward visit that begins next or is under way, and is that of a whole visit
        up to its last saved tensor: torch ends it there, and no earlier."""
        backward = self.step.ops[self.next_op].visit if self.next_op < len(self.step.ops) else -1
        for op in range(start, stop):
            visit = self.step.ops[op].visit
            if visit != self.rerun:
                self._end_rerun(index)
            remade = self.step.remade(visit)
            expected = self.again.get(visit, remade.start)
            if backward not in self.live.partners.get(visit, frozenset()):
                text = f"op {op} ({self._op(op)}) is run again before op {self.next_op}, which is not its backward"
            elif op < expected:
                text = f"op {op} ({self._op(op)}) is recomputed twice in one pass"
            elif op not in remade:
                text = f"op {op} ({self._op(op)}) is run again, and the last tensor of its block is saved before it"
            elif op > expected:
                text = f"op {expected} ({self._op(expected)}) is left out of what is run again before op {self.next_op}"
            else:
                self.again[visit], self.rerun = op + 1, visit
                continue
            raise fault(self.program, index, self.step.block(op) or self.step.ops[op].name, text)

    def _expect_all_rerun(self, index: int) -> None:
        """A pass is over: every recomputed visit that backward asks for something has been run again."""
        for visit in self.live.partners:
            remade = self.step.remade(visit)
            if remade and visit not in self.again:
                op = remade.start
                text = (
                    f"op {op} ({self._op(op)}) is not run again in pass {self.number}, and backward needs what it saves"
                )
                raise fault(self.program, index, self.step.block(op) or self.step.ops[op].name, text)

    def _end_rerun(self, index: int) -> None:
        """What was run again has to have come to the last saved tensor of its visit."""
        if self.rerun >= 0 and self.again[self.rerun] in self.step.remade(self.rerun):
            op = self.again[self.rerun]
            text = f"op {op} ({self._op(op)}) is not run again, and a tensor of its block is saved after it"
            raise fault(self.program, index, self.step.block(op) or self.step.ops[op].name, text)
        self.rerun = -1

    def _ops(self, index: int, start: int, stop: int, again: bool) -> None:
        most, op = self.live.nbytes, start
        held = self.step.trace.held_nbytes if self.number else 0
        left = 0  # gradients that are complete: they have left the account of the step, not yet the device
        for number in range(start, stop):
            try:
                nbytes = self.live.start(number, again=again)
            except Missing as missing:
                raise self._missing(index, missing) from None
            forward = number <= self.last_forward and not again
            nbytes += left + (held if forward else 0)
            if nbytes > most or number == start:
                most, op = nbytes, number
            if (index, number) == self.wanted:
                self.largest = self.live.largest()
            for parameter, size in self.live.finish(number, again=again):
                self.passes.made.append(Made(parameter, self.number, index, size))
                left += size
            if number == self.last_forward and not again:
                # A loss outside of the model, made of what forward leaves.
                most = max(most, self.live.nbytes + left + self.step.trace.unseen_nbytes)
        self.passes.moments.append(Moment(index, most, op))

    def _missing(self, index: int, missing: Missing) -> Exception:
        step, root = self.step, missing.root
        block = step.block(step.birth[root])
        why = f"; block {block} has to be recomputed before" if block in self.live.recomputed else ""
        return fault(
            self.program,
            index,
            block if why else step.name(root),
            f"op {missing.op} ({self._op(missing.op)}) reads {step.name(root)}, which is not in memory{why}",
        )

    def _op(self, number: int) -> str:
        block = self.step.block(number)
        return f"{self.step.ops[number].name} of block {block}" if block else self.step.ops[number].name
