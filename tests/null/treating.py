"""A lowering of treated ops that is as plain as can be, for the checker to judge. No torch.

It takes the plain program of the same plan without treatments. Everything is encoded and moved as soon as it is made,
and compute waits for it at once; it is brought back when somebody reads it, and not before. What goes to disk has the
ring on the way to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from forebay.memory import Kind
from forebay.plans import Plan
from forebay.program import Action, Change, Program, Verb
from forebay.timeline import Lane
from forebay.trace import Phase, Trace
from forebay.treatments import Fate, Treatment
from tests.null.programs import plain_program
from tests.null.treated_bytes import codes_nbytes, part_nbytes

__all__ = ["TreatedOps", "treated_program"]


def treated_program(trace: Trace, plan: Plan, steps: int = 2, micro_batches: int = 1) -> Program:
    """``plan`` as a program, treatments included."""
    bare = replace(plan, activations=())
    return _Rewriter(trace, plan, plain_program(trace, bare, steps, micro_batches)).program()


class TreatedOps:
    """What a plan names in a trace: ``named`` ops of blocks that recompute, ``moved`` roots (or codes) by the op that
    makes them, their treatments (``ways``), bytes (``moves``) and those that stay as they are (``rests``).
    ``reads`` and ``made`` are roots by op, ``inputs`` those that a forward visit is given, by its first op."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        roots = {i: t.root for i, t in trace.tensors()}
        sizes = {i: t.nbytes for i, t in trace.tensors()}
        self.nbytes = sizes
        self.named: set[int] = set()
        self.moved: dict[int, list[int]] = {}
        self.ways: dict[int, Treatment] = {}
        itemsize = {"bfloat16": 2, "float32": 4}
        dtypes = {i: t.dtype for i, t in trace.tensors()}
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
            way = _way(plan.treatments(visit.block), name, occurrence)
            if way is None or visit.phase is Phase.BACKWARD:
                continue
            if visit.block in plan.recompute:
                self.named.add(number)
            if way.fate is not Fate.KEEP or way.bits:
                self.moved[number] = [root for root in self.made[-1] if sizes[root] >= 4096]
                self.ways.update(dict.fromkeys(self.moved[number], way))
        parts = {r: part_nbytes(sizes[r], way.split) for r, way in self.ways.items()}
        self.moves = {r: codes_nbytes(parts[r], itemsize[dtypes[r]], way.bits) for r, way in self.ways.items()}
        self.rests = {r: sizes[r] - part for r, part in parts.items()}
        self.coded = {r for r, way in self.ways.items() if way.bits or self.rests[r]}
        self.roots = {root for made in self.moved.values() for root in made}


def _way(treatments: Iterable[Treatment], op: str, occurrence: int) -> Treatment | None:
    return next((t for t in treatments if (t.op, t.occurrence) == (op, occurrence)), None)


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
        self.ring: tuple[int, ...] = ()

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
            # What was held up meanwhile is for the next op to wait for.
            after = tuple(sorted({*waits, *self.hold}))
            self.actions.append(replace(action, after=after, ops=ops))
            self.compute, waits, self.hold = len(self.actions) - 1, (), []
            for number in () if action.recomputed else range(*ops):
                for root in self.ops.moved.get(number, ()):
                    self._offload(action, root)
        self.hold += waits  # nothing of it runs: who comes next waits

    def _pieces(self, action: Action) -> list[tuple[int, int]]:
        if not action.recomputed:
            # Codes and rests are made before Python lets go of what they are made of.
            coded = [n + 1 for n in range(*action.ops) if self.ops.coded.intersection(self.ops.moved.get(n, ()))]
            cuts = sorted({action.ops[0], *coded, action.ops[1]})
            return list(pairwise(cuts)) or [action.ops]
        pieces: list[tuple[int, int]] = []
        for number in range(*action.ops):
            if number not in self.ops.named:
                joined = pieces and pieces[-1][1] == number
                pieces[-1:] = [(pieces[-1][0], number + 1)] if joined else [*pieces[-1:], (number, number + 1)]
        return pieces

    def _offload(self, action: Action, root: int) -> None:
        way, nbytes, compute = self.ops.ways[root], self.ops.moves[root], self.compute
        self.out[root] = compute
        if root in self.ops.coded:
            made = self.ops.rests[root] + (nbytes if way.bits else 0)
            claim = replace(action, peak=action.peak + 200_000, changes=(Change(Kind.ACTIVATION, made),))
            self._move(Lane.COMPUTE, Verb.ENCODE, claim, root, tuple(self.hold), bits=way.bits)
            self.compute, self.hold = len(self.actions) - 1, []
        if way.fate is Fate.KEEP:
            return
        ring = 0 if way.fate is Fate.DISK else -1
        frees = replace(action, changes=(Change(Kind.ACTIVATION, -nbytes if way.bits else 0),), peak=0)
        after = (self.compute, *(self.ring if ring == 0 else ()))
        self._move(Lane.D2H, Verb.OFFLOAD, frees, root, after, ring=ring)
        self.out[root] = len(self.actions) - 1
        self.hold.append(self.out[root])
        if ring == 0:
            self._move(Lane.DISK_WRITE, Verb.WRITE, frees, root, (self.out[root],), ring=0)
            self.out[root] = len(self.actions) - 1
            self.ring = (self.out[root],)

    def _reload(self, action: Action, roots: set[int]) -> list[int]:
        for root in sorted(roots - self.back.keys()):
            way, after = self.ops.ways[root], (self.out[root], self.compute)
            # What comes back as it is has the room of the whole.
            peak = self.ops.moves[root] if way.bits else self.ops.nbytes[root]
            plain = replace(action, peak=peak, changes=())
            if way.fate is Fate.DISK:
                self._move(Lane.DISK_READ, Verb.READ, plain, root, (*after, *self.ring), ring=0)
                after = (len(self.actions) - 1, self.compute)
            if way.fate is not Fate.KEEP:
                if way.bits:
                    plain = replace(plain, changes=(Change(Kind.ACTIVATION, self.ops.moves[root]),))
                self._move(Lane.H2D, Verb.RELOAD, plain, root, after, ring=0 if way.fate is Fate.DISK else -1)
                after = (len(self.actions) - 1,)
            if way.fate is Fate.DISK:
                self.ring = after
            if root in self.ops.coded:
                made = self.ops.rests[root] + (self.ops.moves[root] if way.bits else 0)
                claim = replace(action, peak=action.peak + 200_000, changes=(Change(Kind.ACTIVATION, -made),))
                self._move(Lane.COMPUTE, Verb.DECODE, claim, root, after, bits=way.bits)
                self.compute = len(self.actions) - 1
            self.back[root] = len(self.actions) - 1
        return [self.back[root] for root in sorted(roots)]

    def _move(
        self, lane: Lane, verb: Verb, like: Action, root: int, after: tuple[int, ...], ring: int = -1, bits: int = 0
    ) -> None:
        nbytes = self.ops.moves[root]
        nbytes = -(-nbytes // 4096) * 4096 if verb in (Verb.READ, Verb.WRITE) else nbytes
        peak = like.peak if verb in (Verb.RELOAD, Verb.ENCODE, Verb.DECODE) else 0
        self.actions.append(
            Action(
                lane,
                verb,
                f"{verb.value} {root}",
                like.step,
                like.block,
                tuple(sorted(set(after))),
                nbytes,
                peak=peak,
                changes=tuple(c for c in like.changes if c.nbytes and verb not in (Verb.READ, Verb.WRITE)),
                tensor=root,
                ring=ring,
                bits=bits,
                rest=self.ops.rests[root] if verb in (Verb.ENCODE, Verb.DECODE) else 0,
            )
        )
