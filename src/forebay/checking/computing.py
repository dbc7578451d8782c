"""Whether compute runs the trace: every op once in every pass, in order, recomputed where it may be. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forebay.checking.in_backward import InBackward
from forebay.checking.live import Gone, Live, Missing
from forebay.checking.order import Order
from forebay.checking.reruns import Reruns
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
    """Passes are numbered through all steps. ``first`` are their first compute actions, ``ends`` the last ones of the
    steps, ``made`` their gradients that leave or could leave, ``left`` their moved roots, ``moments`` what compute
    needs, in order. ``offloads`` are actions by root and pass, ``reloads`` actions with their bytes, in order.
    ``around`` are those of ``transit.computes_around``."""

    first: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    offloads: Mapping[tuple[int, int], int] = field(default_factory=dict)
    reloads: Sequence[tuple[int, int]] = ()
    around: Sequence[tuple[int, int]] = ()


def walk(step: Step, live: Live, program: Program, order: Order, in_backward: InBackward) -> Passes:
    """Runs through compute, updates of it in backward, and what moves activations. Raises ``PlanInvalid`` for an op
    that is left out, repeated or out of order, or that reads a tensor which is not in memory, for a tensor that is not
    moved as the plan says, and for an update that comes before its gradients."""
    walker = _Walker(step, live, program, order, in_backward)
    for index, action in enumerate(program.actions):
        walker.act(index, action)
    walker.end()
    return walker.passes


def largest(
    step: Step, live: Live, program: Program, order: Order, in_backward: InBackward, moment: Moment
) -> int | None:
    """The largest root in memory at ``moment``, found by walking there again: it is asked for when there is no room."""
    walker = _Walker(step, live, program, order, in_backward, (moment.action, moment.op))
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
        in_backward: InBackward,
        wanted: tuple[int, int] = (-1, -1),
    ) -> None:
        self.step = step
        self.live = live
        self.program = program
        self.order = order
        self.in_backward = in_backward
        self.named = live.treated.named
        self.transfers = Transfers(step, live, program, order)
        self.reruns = Reruns(step, live, program)
        self.passes = Passes(
            offloads=self.transfers.offloads, reloads=self.transfers.reloads, around=computes_around(program)
        )
        self.makes_treated = {step.birth[root] for root in live.treated.ways}
        self.wanted = wanted
        self.largest: int | None = None
        self.next_op = 0
        self.number = 0
        self.dropping = 0  # bytes that went with the last op
        self.last_forward = max((n for n in range(len(step.ops)) if step.phase(n) is Phase.FORWARD), default=-1)

    def act(self, index: int, action: Action) -> None:
        if action.verb is Verb.COMPUTE:
            self.run(index, action)
        elif action.verb in (Verb.ENCODE, Verb.DECODE):
            self._code(index, action)
        elif self.in_backward.is_update(action):
            self._update(index, action)
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
        else:
            self.in_backward.run_again(index, start, stop)
        self._ops(index, start, stop, action.recomputed, before)
        if not action.recomputed:
            self.next_op = stop
        if self.next_op == len(self.step.ops):
            self.reruns.expect_all(index, self.number)
            self.number += 1
            if self.number % self.program.micro_batches == 0:
                self.passes.ends.append(index)
            self.next_op = 0

    def _update(self, index: int, action: Action) -> None:
        """A resident block is updated in backward, or behind its last op."""
        over = self.next_op == 0
        number = self.number - over
        if not self.passes.first or action.step != number // self.program.micro_batches:
            raise fault(self.program, index, action.block, f"it says step {action.step} in pass {number}")
        before = self._arrive(0, index)
        during = self.in_backward.update(index, self.live, len(self.step.ops) if over else self.next_op)
        self.passes.moments.append(Moment(index, during, -1, before))

    def _arrive(self, held: int, *actions: int) -> int:
        """Notes what is on the device again when each of ``actions`` starts. Returns the bytes before that."""
        before = self.live.nbytes + self.live.kept + held
        for root in self.transfers.arrived(*actions):
            if self.live.treated.ways[root].is_made:
                self.live.bring_back(root)
            else:
                self.live.arrive(root)
        return before

    def _code(self, index: int, action: Action) -> None:
        """Codes are made of a root, or its rest is copied; or it is made whole again."""
        held, root = self._held(again=False), action.tensor
        before = self._arrive(held, index)
        self.reruns.pass_over(self.reruns.before(action.ops[0], self.next_op))
        self.transfers.act(index, action)
        way, live = self.live.treated.ways[root], self.live
        workspace = 0 if way.codes is None else way.codes.workspace
        op = self.next_op
        if action.verb is Verb.ENCODE:
            live.encode(root)
            op = self.step.birth[root]
            # What the last op has read is there until it returns, and it has not yet.
            workspace += self.dropping
            made = live.nbytes + live.kept + workspace
            if way.leaves and way.codes is not None:
                live.give_away(root)
                self.passes.left.append(Left(root, self.number, index, way.in_transit))
        else:
            # Codes are read into a storage of its own; what has come back as it is has one already.
            taken = 0 if way.codes is None else self.step.nbytes[root]
            made = live.nbytes + live.kept + taken + workspace
            live.arrive(root)
        self.passes.moments.append(Moment(index, made + held, op, before))
        if index == self.wanted[0]:
            self.largest = live.largest()

    def _foresee(self, index: int, action: Action) -> None:
        """A reload that says before which op it is issued: named ops before that were passed over (``reruns``), and
        what they drop is gone, though no compute has gone on since.

        Why this promises nothing that may not be so. The bytes are gone when the reload starts: the host has let go of
        them before it issued the reload, the compute that may have read them is over (``order`` says so, or nothing is
        counted here), and so are the reloads that brought them. The compute that comes next may start before the reload
        does: what is counted as back is what is back for certain by either, and all else is on its way at both
        (``transit.Coming.at``). Until the reload starts there is all that was before; that is ``before``. What is not
        back in time stays uncounted and not passed over, for the compute that comes next to find missing.
        """
        latest, then = self.passes.around[index]
        passing = self.reruns.before(action.ops[0], self.next_op)
        if passing and latest >= 0 and then >= 0 and self.order.before(latest, index):
            before = self._arrive(0, index, then)
            self.reruns.pass_over(passing)
            live = self.live.nbytes + self.live.kept
            self.passes.moments.append(Moment(index, live, action.ops[0], before, then))
            if index == self.wanted[0]:
                self.largest = self.live.largest()

    def end(self) -> None:
        expected = self.program.steps * self.program.micro_batches
        if self.number < expected or self.next_op:
            raise self._unfinished(len(self.program.actions))
        self.transfers.end(len(self.program.actions))

    def _unfinished(self, index: int) -> Exception:
        op, passes = self.next_op, self.program.steps * self.program.micro_batches
        text = f"op {op} ({self.step.op_name(op)}) is not run in pass {self.number} of {passes}"
        return fault(self.program, index, self.step.ops[op].name, text)

    def _begin_pass(self, index: int) -> None:
        if len(self.passes.first) == self.number:
            if self.number:
                self.transfers.end(index)
            self.transfers.begin(self.number)
            self.passes.first.append(index)
            self.live.begin(first_of_step=self.number % self.program.micro_batches == 0)
            self.in_backward.begin()
            self.reruns.begin()

    def _held(self, *, again: bool) -> int:
        """Bytes of the outputs of the pass before that are there before an op runs."""
        forward = self.next_op <= self.last_forward and not again
        return self.step.trace.held_nbytes if self.number and forward else 0

    def _out_of_order(self, index: int, start: int) -> Exception:
        expected, name = self.next_op, self.step.op_name
        if start > expected:
            text = f"op {expected} ({name(expected)}) is left out: the action begins with op {start}"
        else:
            text = f"op {start} ({name(start)}) is run again; the next one is op {expected} ({name(expected)})"
        at_fault = expected if start > expected else start
        return fault(self.program, index, self.step.ops[at_fault].name, text)

    def _end_rerun(self, index: int) -> None:
        try:
            self.reruns.end(index)
        except Missing as missing:
            raise self._missing(index, missing) from None

    def _ops(self, index: int, start: int, stop: int, again: bool, before: int) -> None:
        most, op, ops = self.live.nbytes, start, self.step.ops
        left = 0  # what has left the account of the step, not yet the device
        held = self.step.trace.held_nbytes if self.number and not again else 0  # in forward
        wanted = self.wanted[1] if index == self.wanted[0] else -1
        live, last_forward = self.live, self.last_forward
        for number in range(start, stop):
            nbytes = left + (held if number <= last_forward else 0)
            try:
                if again:
                    self.reruns.run(index, number, self.next_op)
                elif ops[number].opens:
                    self.reruns.pass_over_spared(ops[number].visit)
                nbytes += live.start(number, again=again)
            except Missing as missing:
                raise self._missing(index, missing) from None
            if not again and number in self.makes_treated:
                self.transfers.made(number, index)
            if nbytes > most or number == start:
                most, op = nbytes, number
            if number == wanted:
                self.largest = live.largest()
            there = live.nbytes + live.kept
            gone = live.finish(number, again=again)
            leaves = 0 if gone is None else self._leave(index, gone)
            left += leaves
            self.dropping = there - live.nbytes - live.kept - leaves
            if number == last_forward and not again:
                live.forward_is_over()
                # A loss outside of the model, made of what forward leaves.
                most = max(most, live.nbytes + left + self.step.trace.unseen_nbytes)
        self.passes.moments.append(Moment(index, most, op, before))

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
        text = (
            f"op {missing.op} ({self.step.op_name(missing.op)}) {asks} {step.name(root)}, which is not in memory{why}"
        )
        return fault(self.program, index, subject, text)
