"""Whether compute runs the trace: every op once in every pass, in order, recomputed where it may be. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forebay.checking.live import Gone, Live, Missing
from forebay.checking.order import Order
from forebay.checking.step import Step
from forebay.checking.transfers import Transfers
from forebay.checking.transit import computes_around
from forebay.checking.words import fault
from forebay.program import Action, Program, Verb
from forebay.trace import Phase

__all__ = ["Left", "Made", "Moment", "Passes", "largest", "walk"]


@dataclass(frozen=True, slots=True)
class Made:
    """A gradient is complete: ``parameter`` (its id) in pass ``number``, by action ``action``; ``nbytes`` of a root."""

    parameter: int
    number: int
    action: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Left:
    """From action ``action`` of pass ``number`` on, only its way to the host keeps ``root`` on the device."""

    root: int
    number: int
    action: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The most that one action needs beside what stands: ``nbytes``, while ``op`` runs (-1: no op's).

    Gradients that were complete before the action are not in it, nor moved roots that were on their way before it, in
    either direction. ``before`` are the bytes when it waits to start. Of a reload, ``then`` is the compute that comes
    next, and the reload itself is on its way.
    """

    action: int
    nbytes: int
    op: int
    before: int
    then: int = -1


@dataclass
class Passes:
    """Passes are numbered through all steps. ``first`` and ``last`` are their first and last compute actions,
    ``made`` their gradients that leave or could leave, ``left`` their moved roots, ``moments`` what compute needs, in
    order. ``offloads`` are actions by root and pass, ``reloads`` actions with their bytes, in order."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    offloads: Mapping[tuple[int, int], int] = field(default_factory=dict)
    reloads: Sequence[tuple[int, int]] = ()


def walk(step: Step, live: Live, program: Program, order: Order) -> Passes:
    """Runs through compute and what moves activations. Raises ``PlanInvalid`` for an op that is left out, repeated or
    out of order, or that reads a tensor which is not in memory, and for a tensor that is not moved as the plan says."""
    walker = _Walker(step, live, program, order)
    for index, action in enumerate(program.actions):
        walker.act(index, action)
    walker.end()
    return walker.passes


def largest(step: Step, live: Live, program: Program, order: Order, moment: Moment) -> int | None:
    """The largest root in memory at ``moment``, found by walking there again: it is asked for when there is no room."""
    walker = _Walker(step, live, program, order, (moment.action, moment.op))
    for index, action in enumerate(program.actions[: moment.action + 1]):
        walker.act(index, action)
    return walker.largest


class _Walker:
    def __init__(
        self,
        step: Step,
        live: Live,
        program: Program,
        order: Order,
        wanted: tuple[int, int] = (-1, -1),
    ) -> None:
        self.step = step
        self.live = live
        self.program = program
        self.order = order
        self.around = computes_around(program)
        self.named = live.treated.named
        self.transfers = Transfers(step, live, program, order)
        self.passes = Passes(offloads=self.transfers.offloads, reloads=self.transfers.reloads)
        self.wanted = wanted
        self.largest: int | None = None
        self.next_op = 0
        self.number = 0
        self.dropping = 0  # bytes that went with the last op
        # Of every visit that has run again in this pass, the op that comes next in it; the latest of them.
        self.again: dict[int, int] = {}
        self.rerun = -1
        self.last_forward = max((n for n in range(len(step.ops)) if step.phase(n) is Phase.FORWARD), default=-1)
        # Of every backward visit the forward visits that do not run again for it because all of their ops are named.
        self.spared: dict[int, list[int]] = {}
        for forward, partners in live.partners.items():
            if step.remade(forward) and self.named.issuperset(step.remade(forward)):
                self.spared.setdefault(min(partners, default=-1), []).append(forward)

    def act(self, index: int, action: Action) -> None:
        if action.verb is Verb.COMPUTE:
            self.run(index, action)
        elif action.verb in (Verb.ENCODE, Verb.DECODE):
            self._code(index, action)
        elif action.verb in (Verb.OFFLOAD, Verb.RELOAD) or action.tensor >= 0:
            if action.verb is Verb.RELOAD:
                self._foresee(index, action)
            self.transfers.act(index, action)

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
        before = self._arrive(self._held(again=action.recomputed), index)
        if not action.recomputed:
            self._end_rerun(index)
            if start != self.next_op:
                raise self._out_of_order(index, start)
        self._ops(index, start, stop, action.recomputed, before)
        if not action.recomputed:
            self.next_op = stop
        if self.next_op == len(self.step.ops):
            self._expect_all_rerun(index)
            self.passes.last.append(index)
            self.number += 1
            self.next_op = 0

    def _arrive(self, held: int, *actions: int) -> int:
        """Notes what is on the device again when each of ``actions`` starts. Returns the bytes before that."""
        before = self.live.nbytes + self.live.kept + held
        for root in self.transfers.arrived(*actions):
            if self.live.treated.ways[root].codes is None:
                self.live.arrive(root)
            else:
                self.live.encode(root)  # as codes
        return before

    def _code(self, index: int, action: Action) -> None:
        """Codes are made of a root, or read."""
        held, root = self._held(again=False), action.tensor
        before = self._arrive(held, index)
        self._give(self._passed_over(action.ops[0]))
        self.transfers.act(index, action)
        codes, live = self.live.treated.ways[root].codes, self.live
        workspace = 0 if codes is None else codes.workspace
        op = self.next_op
        if action.verb is Verb.ENCODE:
            live.encode(root)
            op = self.step.birth[root]
            # What the op has read is there until it returns, and it has not yet.
            workspace += self.dropping if op == self.next_op - 1 else 0
            made = live.nbytes + live.kept + workspace
            if live.treated.ways[root].leaves:
                live.give_away(root)
                self.passes.left.append(Left(root, self.number, index, live.treated.ways[root].nbytes))
        else:
            made = live.nbytes + live.kept + self.step.nbytes[root] + workspace
            live.arrive(root)
        self.passes.moments.append(Moment(index, made + held, op, before))
        if index == self.wanted[0]:
            self.largest = live.largest()

    def _foresee(self, index: int, action: Action) -> None:
        """A reload that is issued before op ``action.ops`` of what runs again: ops before that which do not were given
        what they have made, and what they drop is gone. That counts as far as it is certain when the reload starts, and
        when compute goes on; the compute that comes next finds out whether the rest is there."""
        latest, then = self.around[index]
        passing = self._passed_over(action.ops[0])
        if passing and latest >= 0 and then >= 0 and self.order.before(latest, index):
            before = self._arrive(0, index, then)
            self._give(passing)
            live = self.live.nbytes + self.live.kept
            self.passes.moments.append(Moment(index, live, action.ops[0], before, then))
            if index == self.wanted[0]:
                self.largest = self.live.largest()

    def _passed_over(self, op: int) -> list[int]:
        """The named ops that come, in what runs again, between what was run last and ``op``, which runs next."""
        step = self.step
        if not self.last_forward < self.next_op < len(step.ops) or not 0 < op < len(step.ops):
            return []
        visit, backward, passing = step.ops[op].visit, step.ops[self.next_op].visit, list[int]()
        if self.rerun not in (-1, visit):
            passing += self._to_come(self.rerun)
        if backward in self.live.partners.get(visit, frozenset()):
            passing += (n for n in self._to_come(visit) if n < op)
        elif op != self.next_op:
            return []
        elif op == step.trace.visits[visit].first_op:
            passing += (n for forward in self.spared.get(visit, ()) for n in self._to_come(forward))
        return passing if self.named.issuperset(passing) else []

    def _to_come(self, visit: int) -> range:
        """The ops of a visit that runs again which come next in it."""
        remade = self.step.remade(visit)
        return range(self.again.get(visit, remade.start), remade.stop)

    def _give(self, passing: Sequence[int]) -> None:
        """Named ops are given what they have made, up to the first for which that is not there."""
        try:
            for op in passing:
                self._pass_over(op)
        except Missing:
            return  # for the compute that comes next to find out

    def _pass_over(self, op: int) -> None:
        """A named op is given what it has made. Raises ``Missing`` where that is not there."""
        visit = self.step.ops[op].visit
        if visit not in self.again:
            self.live.expect_inputs(visit)
        self.live.pass_over(op)
        self.again[visit], self.rerun = op + 1, visit

    def end(self) -> None:
        expected = self.program.steps * self.program.micro_batches
        if self.number < expected or self.next_op:
            raise self._unfinished(len(self.program.actions))
        self.transfers.end(len(self.program.actions))

    def _unfinished(self, index: int) -> Exception:
        op, passes = self.next_op, self.program.steps * self.program.micro_batches
        text = f"op {op} ({self._op(op)}) is not run in pass {self.number} of {passes}"
        return fault(self.program, index, self.step.ops[op].name, text)

    def _begin_pass(self, index: int) -> None:
        if len(self.passes.first) == self.number:
            if self.number:
                self.transfers.end(index)
            self.transfers.begin(self.number)
            self.passes.first.append(index)
            self.live.begin(first_of_step=self.number % self.program.micro_batches == 0)
            self.again.clear()
            self.rerun = -1

    def _held(self, *, again: bool) -> int:
        """Bytes of the outputs of the pass before that are there before an op runs."""
        forward = self.next_op <= self.last_forward and not again
        return self.step.trace.held_nbytes if self.number and forward else 0

    def _out_of_order(self, index: int, start: int) -> Exception:
        expected = self.next_op
        if start > expected:
            text = f"op {expected} ({self._op(expected)}) is left out: the action begins with op {start}"
        else:
            text = f"op {start} ({self._op(start)}) is run again; the next one is op {expected} ({self._op(expected)})"
        at_fault = expected if start > expected else start
        return fault(self.program, index, self.step.ops[at_fault].name, text)

    def _expect_rerun(self, index: int, op: int) -> None:
        """Recomputation belongs to the backward visit that begins next or is under way, and is that of a whole visit
        up to its last saved tensor, but for named ops: torch ends it there, and no earlier."""
        backward = self.step.ops[self.next_op].visit if self.next_op < len(self.step.ops) else -1
        visit = self.step.ops[op].visit
        if visit != self.rerun:
            self._end_rerun(index)
        remade = self.step.remade(visit)
        expected = self.again.get(visit, remade.start)
        left_out = next((n for n in range(expected, op) if n not in self.named), None)
        if backward not in self.live.partners.get(visit, frozenset()):
            text = f"op {op} ({self._op(op)}) is run again before op {self.next_op}, which is not its backward"
        elif op < expected:
            text = f"op {op} ({self._op(op)}) is recomputed twice in one pass"
        elif op in self.named:
            text = f"op {op} ({self._op(op)}) is run again, and the plan keeps or moves what it has made"
        elif op not in remade:
            text = f"op {op} ({self._op(op)}) is run again, and the last tensor of its block is saved before it"
        elif left_out is not None:
            text = f"op {left_out} ({self._op(left_out)}) is left out of what is run again before op {self.next_op}"
        else:
            for number in range(expected, op):
                self._pass_over(number)
            if visit not in self.again:
                self.live.expect_inputs(visit)
            self.again[visit], self.rerun = op + 1, visit
            return
        raise fault(self.program, index, self.step.block(op) or self.step.ops[op].name, text)

    def _expect_all_rerun(self, index: int) -> None:
        """A pass is over: every recomputed visit that backward asks for something has been run again."""
        for visit in self.live.partners:
            op = next((n for n in self.step.remade(visit) if n not in self.named), None)
            if op is not None and visit not in self.again:
                text = (
                    f"op {op} ({self._op(op)}) is not run again in pass {self.number}, and backward needs what it saves"
                )
                raise fault(self.program, index, self.step.block(op) or self.step.ops[op].name, text)

    def _end_rerun(self, index: int) -> None:
        """What was run again has to have come to the last saved tensor of its visit."""
        if self.rerun >= 0:
            for op in self._to_come(self.rerun):
                if op not in self.named:
                    text = f"op {op} ({self._op(op)}) is not run again, and a tensor of its block is saved after it"
                    raise fault(self.program, index, self.step.block(op) or self.step.ops[op].name, text)
                try:
                    self._pass_over(op)
                except Missing as missing:
                    raise self._missing(index, missing) from None
        self.rerun = -1

    def _ops(self, index: int, start: int, stop: int, again: bool, before: int) -> None:
        most, op = self.live.nbytes, start
        left = 0  # what has left the account of the step, not yet the device
        for number in range(start, stop):
            nbytes = self._start(index, number, again)
            forward = number <= self.last_forward and not again
            nbytes += left + (self.step.trace.held_nbytes if self.number and forward else 0)
            if nbytes > most or number == start:
                most, op = nbytes, number
            if (index, number) == self.wanted:
                self.largest = self.live.largest()
            live = self.live.nbytes + self.live.kept
            leaves = self._leave(index, self.live.finish(number, again=again))
            left += leaves
            self.dropping = live - self.live.nbytes - self.live.kept - leaves
            if number == self.last_forward and not again:
                # A loss outside of the model, made of what forward leaves.
                most = max(most, self.live.nbytes + left + self.step.trace.unseen_nbytes)
                self.live.forward_is_over()
        self.passes.moments.append(Moment(index, most, op, before))

    def _start(self, index: int, number: int, again: bool) -> int:
        """An op runs. Returns the live bytes."""
        visit = self.step.ops[number].visit
        try:
            if again:
                self._expect_rerun(index, number)
            elif number == self.step.trace.visits[visit].first_op:
                for forward in self.spared.get(visit, ()):
                    for spared in self._to_come(forward):
                        self._pass_over(spared)
                self.rerun = -1
            nbytes = self.live.start(number, again=again)
        except Missing as missing:
            raise self._missing(index, missing) from None
        if not again:
            self.transfers.made(number, index)
        return nbytes

    def _leave(self, index: int, gone: Gone) -> int:
        """Notes what an op of action ``index`` leaves on its way to the host. Returns the bytes."""
        left = 0
        for parameter, nbytes in gone.gradients:
            self.passes.made.append(Made(parameter, self.number, index, nbytes))
            left += nbytes
        for root in gone.moved:
            if not self.transfers.is_out(root, index):
                nbytes = self.step.nbytes[root]
                self.passes.left.append(Left(root, self.number, index, nbytes))
                left += nbytes
        return left

    def _missing(self, index: int, missing: Missing) -> Exception:
        step, root = self.step, missing.root
        block = step.block(step.birth[root])
        subject, why = step.name(root), ""
        if root in self.live.treated.ways:
            moved = self.live.treated.ways[root].leaves
            why = f"; it was {'moved off the device' if moved else 'made into codes'} and may not be back by then"
        elif block in self.live.recomputed:
            subject, why = block, f"; block {block} has to be recomputed before"
        asks = "is given" if missing.op in self.named else "reads"
        text = f"op {missing.op} ({self._op(missing.op)}) {asks} {step.name(root)}, which is not in memory{why}"
        return fault(self.program, index, subject, text)

    def _op(self, number: int) -> str:
        block = self.step.block(number)
        return f"{self.step.ops[number].name} of block {block}" if block else self.step.ops[number].name
