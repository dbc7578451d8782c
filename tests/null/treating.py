"""A lowering of treated ops that is as plain as can be, for the checker to judge. No torch.

It takes the plain program of the same plan without treatments. Everything is moved to the host as soon as it is made,
and compute waits for it at once; it is brought back when somebody reads it, and not before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from forebay.plans import Fate, Plan, Treatment
from forebay.program import Action, Program, Verb
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from tests.null.programs import plain_program

__all__ = ["TreatedOps", "treated_program"]


def treated_program(trace: Trace, plan: Plan, steps: int = 2, micro_batches: int = 1) -> Program:
    """``plan`` as a program, treatments included."""
    bare = replace(plan, activations=())
    return _Rewriter(trace, plan, plain_program(trace, bare, steps, micro_batches)).program()


class TreatedOps:
    """What a plan names in a trace: ``named`` ops of blocks that recompute, ``moved`` roots by the op that makes
    them. ``reads`` and ``made`` are roots by op, ``inputs`` those that a forward visit is given, by its first op."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        roots = {i: t.root for i, t in trace.tensors()}
        sizes = {i: t.nbytes for i, t in trace.tensors()}
        self.nbytes = sizes
        self.named: set[int] = set()
        self.moved: dict[int, list[int]] = {}
        self.reads: list[set[int]] = []
        self.made: list[list[int]] = []
        self.inputs: dict[int, set[int]] = {}
        runs: dict[tuple[int, str], int] = {}
        for number, visit, op in trace.ops():
            self.reads.append({roots[visit.resolve(t)] for t in op.inputs})
            self.made.append([t for t in map(visit.resolve, op.outputs) if roots[t] == t])
            given = self.inputs.setdefault(visit.first_op, set())
            given |= {root for root in self.reads[-1] if root < visit.first_tensor}
            given |= {roots[visit.resolve(t)] for t in trace.segments[visit.segment].given}
            name = trace.works[op.work].op
            occurrence = runs.get((visit.first_op, name), 0)
            runs[visit.first_op, name] = occurrence + 1
            fate = _fate(plan.treatments(visit.block), name, occurrence)
            if fate is None or visit.phase is Phase.BACKWARD:
                continue
            if visit.block in plan.recompute:
                self.named.add(number)
            if fate is Fate.OFFLOAD:
                self.moved[number] = [root for root in self.made[-1] if sizes[root] >= 4096]
        self.roots = {root for made in self.moved.values() for root in made}


def _fate(treatments: Iterable[Treatment], op: str, occurrence: int) -> Fate | None:
    return next((t.fate for t in treatments if (t.op, t.occurrence) == (op, occurrence)), None)


class _Rewriter:
    def __init__(self, trace: Trace, plan: Plan, plain: Program) -> None:
        self.plain = plain
        self.ops = TreatedOps(trace, plan)
        self.backward = min((n for n, v, _ in trace.ops() if v.phase is Phase.BACKWARD), default=0)
        self.actions: list[Action] = []
        self.place: list[int] = []  # of every action of the plain program, where it is now
        self.compute = -1
        self.out: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.hold: list[int] = []

    def program(self) -> Program:
        for action in self.plain.actions:
            moved = replace(action, after=tuple(self.place[a] for a in action.after))
            if action.verb is Verb.COMPUTE:
                self._compute(moved)
            else:
                self.actions.append(moved)
                self.compute = len(self.actions) - 1 if action.lane is Lane.COMPUTE else self.compute
            self.place.append(self.compute if action.verb is Verb.COMPUTE else len(self.actions) - 1)
        return replace(self.plain, actions=tuple(self.actions))

    def _compute(self, action: Action) -> None:
        start, stop = action.ops
        if not start and not action.recomputed:
            self.out.clear()
            self.back.clear()
        wanted: set[int] = set()
        if action.recomputed:
            wanted |= self.ops.inputs[start]
            wanted.update(root for n in range(start, stop) for root in self.ops.moved.get(n, ()))
        if action.recomputed or start >= self.backward:
            wanted.update(root for n in range(start, stop) for root in self.ops.reads[n])
        waits = (*action.after, *self._reload(action, wanted & self.ops.roots), *self.hold)
        self.hold = []
        for ops in self._pieces(action):
            self.actions.append(replace(action, after=tuple(sorted(set(waits))), ops=ops))
            self.compute, waits = len(self.actions) - 1, ()
        self.hold += waits  # nothing of it runs: who comes next waits
        for number in () if action.recomputed else range(start, stop):
            for root in self.ops.moved.get(number, ()):
                self._offload(action, root)

    def _pieces(self, action: Action) -> list[tuple[int, int]]:
        if not action.recomputed:
            return [action.ops]
        pieces: list[tuple[int, int]] = []
        for number in range(*action.ops):
            if number not in self.ops.named:
                joined = pieces and pieces[-1][1] == number
                pieces[-1:] = [(pieces[-1][0], number + 1)] if joined else [*pieces[-1:], (number, number + 1)]
        return pieces

    def _offload(self, action: Action, root: int) -> None:
        self._move(Lane.D2H, Verb.OFFLOAD, action, root, (self.compute,))
        self.out[root] = len(self.actions) - 1
        self.hold.append(self.out[root])

    def _reload(self, action: Action, roots: set[int]) -> list[int]:
        for root in sorted(roots - self.back.keys()):
            self._move(Lane.H2D, Verb.RELOAD, action, root, (self.out[root], self.compute))
            self.back[root] = len(self.actions) - 1
        return [self.back[root] for root in sorted(roots)]

    def _move(self, lane: Lane, verb: Verb, action: Action, root: int, after: tuple[int, ...]) -> None:
        nbytes = self.ops.nbytes[root]
        peak = nbytes if verb is Verb.RELOAD else 0
        what = f"{verb.value} {root}"
        self.actions.append(
            Action(lane, verb, what, action.step, action.block, tuple(sorted(after)), nbytes, peak=peak, tensor=root)
        )
