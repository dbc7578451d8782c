"""The ops of a trace with all references resolved, and who needs what again. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, final

from forebay.memory import Kind
from forebay.model import Parameter
from forebay.trace import NO_SAVES, Op, Phase, Trace, Visit
from forebay.units import format_bytes

__all__ = ["FlatOp", "Step"]


class FlatOp(NamedTuple):
    """One op: ``reads``, ``dropped``, ``unsaved``, ``spent`` and ``released`` are roots that the step makes, ``made``
    those that are born here.

    ``parameters`` are ids of the parameters that it reads, ``gradients`` are (parameter, root). A ``view`` touches no
    bytes; ``writes`` are roots that were there before and that it changes in place. ``opens``: it is the first of its
    visit.
    """

    name: str
    visit: int
    backward: bool
    opens: bool
    reads: tuple[int, ...]
    parameters: tuple[int, ...]
    made: tuple[int, ...]
    dropped: tuple[int, ...]
    unsaved: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    spent: tuple[int, ...]
    released: tuple[int, ...]
    view: bool
    writes: tuple[int, ...]


@final
class Step:
    """A trace, made flat: ``nbytes`` and ``saved`` by id, ``ops`` by number, ``birth`` the op that makes a root."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.sources = len(trace.sources)
        tensors = [*trace.sources, *(t for visit in trace.visits for t in trace.segments[visit.segment].tensors)]
        self.nbytes = [t.nbytes for t in tensors]
        self.saved = [t.saved for t in tensors]
        self.kinds = [t.kind for t in tensors]
        self.dtypes = [t.dtype for t in tensors]
        self._root = [t.root for t in trace.sources]
        for visit in trace.visits:
            self._root.extend(visit.resolve(t.root) for t in trace.segments[visit.segment].tensors)
        self._buffers = [t for t in trace.sources if t.kind is Kind.BUFFER]
        self.block_of: dict[int, str] = {}
        self.parameter: dict[int, Parameter] = {}
        for block in trace.model.blocks:
            for parameter in block.parameters:
                self.block_of[len(self.parameter)] = block.name
                self.parameter[len(self.parameter)] = parameter
        self.ids = {p.name: i for i, p in self.parameter.items()}
        self.birth: dict[int, int] = {}
        self.ops: list[FlatOp] = []
        for place, visit in enumerate(trace.visits):
            segment = trace.segments[visit.segment]
            # A reference is a place in this list: those of ports count from its end.
            ids = [*range(visit.first_tensor, visit.first_tensor + len(segment.tensors)), *reversed(visit.ports)]
            roots = [self._root[number] for number in ids]
            backward = visit.phase is Phase.BACKWARD
            for op in segment.ops:
                self.ops.append(self._flat(op, place, backward, ids, roots))
        # Of every visit the roots that it is given, or reads and does not make.
        self.inputs: list[set[int]] = [set() for _ in trace.visits]
        for flat in self.ops:
            self.inputs[flat.visit].update(r for r in flat.reads if self.ops[self.birth[r]].visit != flat.visit)
        for inputs, visit in zip(self.inputs, trace.visits, strict=True):
            given = {self._root[visit.resolve(t)] for t in trace.segments[visit.segment].given}
            inputs.update(root for root in given if root >= self.sources)
        self._remade = [self._saving(visit) for visit in trace.visits]
        self.with_gradient = {p: n for n, op in enumerate(self.ops) for p, _ in op.gradients}
        # Of every root that is a gradient: the last parameter whose gradient it is. And after which op it goes from
        # the account of the step: autograd may hand a gradient on as it is, to ops that read it later.
        self.last_gradient = {root: p for op in self.ops for p, root in op.gradients if root >= self.sources}
        last = {root: n for n, op in enumerate(self.ops) for _, root in op.gradients if root >= self.sources}
        for n, flat in enumerate(self.ops):
            last.update((root, max(last[root], n)) for root in flat.reads if root in last)
        self.ending: dict[int, list[int]] = {}
        for root, n in last.items():
            self.ending.setdefault(n, []).append(root)

    def _flat(self, op: Op, place: int, backward: bool, ids: Sequence[int], root_of: Sequence[int]) -> FlatOp:
        """The next op, one of the visit at ``place``; ``ids`` are those of the tensors by their references, ``root_of``
        those of their roots."""
        number, sources, roots, work = len(self.ops), self.sources, self._root, self.trace.works[op.work]
        reads = sorted({root_of[t] for t in op.inputs})
        parameters: tuple[int, ...] = ()
        if reads and reads[0] < sources:
            parameters = tuple([r for r in reads if r < len(self.parameter)])
            reads = [r for r in reads if r >= sources]
        view = not work.flops and not work.nbytes
        # An op that works in place has for its output what is there already.
        outputs = [ids[t] for t in op.outputs]
        if len(outputs) > 1:
            outputs = list(dict.fromkeys(outputs))
        outputs = [t for t in outputs if t >= sources]
        made = tuple([t for t in outputs if roots[t] == t and t not in self.birth])
        for root in made:
            self.birth[root] = number
        written: tuple[int, ...] = ()
        if not view and len(made) < len(outputs):
            written = tuple(dict.fromkeys([roots[t] for t in outputs if roots[t] not in made]))
        return FlatOp(
            work.op,
            place,
            backward,
            number == self.trace.visits[place].first_op,
            tuple(reads),
            parameters,
            made,
            tuple([ids[t] for t in op.dropped if ids[t] >= sources]) if op.dropped else (),
            tuple([ids[t] for t in op.unsaved if ids[t] >= sources]) if op.unsaved else (),
            tuple([(ids[g.parameter], roots[ids[g.tensor]]) for g in op.gradients]) if op.gradients else (),
            tuple([ids[t] for t in op.spent if ids[t] >= sources]) if op.spent else (),
            tuple([ids[t] for t in op.released if ids[t] >= sources]) if op.released else (),
            view,
            written,
        )

    def remade(self, visit: int) -> range:
        """The ops of a forward visit that run again where it is recomputed: those before its last saved tensor."""
        return self._remade[visit]

    def _saving(self, visit: Visit) -> range:
        """The ops of a visit before its last saved tensor."""
        return range(visit.first_op, visit.first_op + max(0, self.trace.segments[visit.segment].saves_until))

    def last_op(self, visit: int) -> int:
        """The number of the last op of a visit."""
        place = self.trace.visits[visit]
        return place.first_op + len(self.trace.segments[place.segment].ops) - 1

    def copied_nbytes(self, visit: int) -> int:
        """Bytes of the buffers of the module of a visit, of which a recomputation makes a copy to work with."""
        name = self.trace.visits[visit].block
        module = self.trace.model.block(name).module if name else None
        if module is None:
            return 0
        return sum(t.nbytes for t in self._buffers if t.name.startswith(f"{module}."))

    def found_nbytes(self, visit: int) -> int:
        """Bytes of what the forward of a visit finds in its module and changes, a buffer, or replaces, an attribute or
        a buffer: that is kept for as long as its inputs are, where backward asks for what it saves."""
        place = self.trace.visits[visit]
        if place.kept_until == NO_SAVES:
            return 0
        module = self.trace.model.block(place.block).module
        own = (t for t in self._buffers if t.name.startswith(f"{module}."))
        changed = sum(t.nbytes for t in own if t.name in self.trace.changed_buffers)
        return changed + self.trace.segments[place.segment].replaced_nbytes

    def block(self, op: int) -> str:
        """The block of the visit that op number ``op`` belongs to."""
        return self.trace.visits[self.ops[op].visit].block

    def phase(self, op: int) -> Phase:
        """The phase of op number ``op``."""
        return self.trace.visits[self.ops[op].visit].phase

    def op_name(self, op: int) -> str:
        """Op number ``op`` in words."""
        block, name = self.block(op), self.ops[op].name
        return f"{name} of block {block}" if block else name

    def name(self, tensor: int) -> str:
        """A tensor in words: its name, or which op made it."""
        if tensor < self.sources:
            return self.trace.sources[tensor].name
        born = self.birth[tensor]
        kind = Kind.GRADIENT.value if self.kinds[tensor] is Kind.GRADIENT else self.kinds[tensor].value
        where = f" of block {self.block(born)}" if self.block(born) else ""
        size = format_bytes(self.nbytes[tensor])
        return f"tensor {tensor} ({kind} of {size}, made by op {born}, {self.ops[born].name}{where})"

    def partners(self, blocks: Collection[str]) -> dict[int, frozenset[int]]:
        """For every forward visit of ``blocks`` the backward visits that belong to it (places in ``Trace.visits``).

        Calls of the same module go backward in reverse order, one visit each; where there are too many, those that save
        nothing go not. Where the numbers of visits differ, or autograd has let go of what was saved before, every
        backward visit of the block belongs to each of its forward visits.
        """
        pairs: dict[int, frozenset[int]] = {}
        for block in blocks:
            own = [(place, v.phase) for place, v in enumerate(self.trace.visits) if v.block == block]
            forward = [place for place, phase in own if phase is Phase.FORWARD]
            backward = [place for place, phase in own if phase is Phase.BACKWARD]
            going = forward
            if len(forward) > len(backward):
                going = [f for f in forward if self.trace.segments[self.trace.visits[f].segment].saves]
            partner = dict(zip(going, reversed(backward), strict=False))
            if len(going) == len(backward) and not any(self._is_over(f, b) for f, b in partner.items()):
                pairs.update((f, frozenset({partner[f]} if f in partner else ())) for f in forward)
            else:
                pairs.update((f, frozenset(backward)) for f in forward)
        return pairs

    def _is_over(self, forward: int, backward: int) -> bool:
        """Whether what a forward visit has saved is gone before a backward one begins."""
        kept_until = self.trace.visits[forward].kept_until
        return NO_SAVES < kept_until < self.trace.visits[backward].first_op
