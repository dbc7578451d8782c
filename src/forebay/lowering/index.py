"""A trace turned round: of every root when it is made, dropped and let go, of every visit what it reads. No torch.

All that is equal in visits of the same segment is looked up once for the segment (``patterns``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import final

from forebay.lowering.patterns import Pattern
from forebay.memory import Kind
from forebay.trace import NO_SAVES, Phase, Trace, Visit

__all__ = ["NEVER", "Completed", "Root", "TraceIndex", "are_apart"]

NEVER = -1
"""In the place of the number of an op: there is none."""


@dataclass(slots=True)
class Root:
    """A root that the step makes, in numbers of ops: made by ``birth``, held until after ``drop`` and ``unsave``.
    ``spent`` and ``released`` are the parts of ``unsave``, as in ``trace.Op``. After ``pack`` autograd has first saved
    it, as the ``turn``-th root of its visit.

    ``visit`` is the place of the visit that makes it. ``completes`` is the last op after which it is a gradient's, or a
    later one that still reads it: a gradient that autograd hands on as it is has more readers than its parameter.
    """

    nbytes: int
    kind: Kind
    saved: bool
    visit: int
    birth: int
    drop: int = NEVER
    unsave: int = NEVER
    spent: int = NEVER
    released: int = NEVER
    pack: int = NEVER
    turn: int = NEVER
    completes: int = NEVER


@dataclass(frozen=True, slots=True)
class Completed:
    """After op ``op``, the gradient of parameter ``parameter`` (its id) is complete; ``root`` holds its bytes."""

    op: int
    parameter: int
    root: int


def are_apart(trace: Trace, places: Sequence[int]) -> bool:
    """Whether no two of ``places``, forward visits of a block in their order, are parts of one call of its module.
    Where another block runs in the middle of a call, autograd lets go of what was saved before and behind it after the
    same op."""
    visits = trace.visits
    return all(b == a + 1 or visits[a].kept_until != visits[b].kept_until for a, b in pairwise(places))


@final
class TraceIndex:
    """The trace by roots and by visits. ``names``, ``blocks`` and ``places`` are the name, the block and the place in
    its block of every parameter, by its id."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.names = tuple(p.name for b in trace.model.blocks for p in b.parameters)
        self.blocks = tuple(b.name for b in trace.model.blocks for _ in b.parameters)
        self.places = tuple(i for b in trace.model.blocks for i in range(len(b.parameters)))
        self.ops = sum(len(trace.segments[v.segment].ops) for v in trace.visits)
        self._patterns = tuple(Pattern(s, trace.works) for s in trace.segments)
        self._root_of = list(range(len(trace.sources)))
        self._buffers = tuple((t.name, t.nbytes) for t in trace.sources if t.kind is Kind.BUFFER)
        # By visit: what plan after plan asks for.
        self._named: dict[int, Mapping[tuple[str, int], int]] = {}
        self._port_roots: dict[int, Mapping[int, tuple[int, ...]]] = {}
        self._block_reads: dict[int, tuple[tuple[int, str], ...]] = {}
        self._copied: dict[int, int] = {}
        roots: dict[int, Root] = {}
        self.completed: tuple[tuple[Completed, ...], ...] = ()
        completed = []
        for place, visit in enumerate(trace.visits):
            self._add(place, visit, roots)
            completed.append(self._completed(visit, roots))
        self.completed = tuple(completed)
        self._read_later(roots)
        self.roots: Mapping[int, Root] = MappingProxyType(roots)

    def _add(self, place: int, visit: Visit, roots: dict[int, Root]) -> None:
        pattern, root_of = self._patterns[visit.segment], self._root_of
        first, start, ports = visit.first_op, visit.first_tensor, visit.ports
        port_roots = [root_of[port] for port in ports]
        root_of.extend(start + r if r >= 0 else port_roots[-1 - r] for r in pattern.roots_of)
        for reference, index, nbytes, kind, saved in pattern.made:
            roots[start + reference] = Root(nbytes, kind, saved, place, first + index)

        def known(what: tuple[tuple[int, int], ...]) -> Iterator[tuple[Root, int]]:
            for index, reference in what:
                root = roots.get(start + reference if reference >= 0 else port_roots[-1 - reference])
                if root is not None:
                    yield root, first + index

        for dropped, op in known(pattern.drops):
            dropped.drop = op
        for unsaved, op in known(pattern.unsaves):
            unsaved.unsave = op
        for spent, op in known(pattern.spent):
            spent.spent = op
        for released, op in known(pattern.released):
            released.released = op
        for turn, (packed, op) in enumerate(known(pattern.packed)):
            packed.pack, packed.turn = op, turn

    def _completed(self, visit: Visit, roots: dict[int, Root]) -> tuple[Completed, ...]:
        made = []
        for index, parameter, tensor in self._patterns[visit.segment].gradients:
            done = Completed(visit.first_op + index, visit.resolve(parameter), self._root_of[visit.resolve(tensor)])
            if done.root in roots:
                roots[done.root].completes = done.op
            made.append(done)
        return tuple(made)

    def _read_later(self, roots: dict[int, Root]) -> None:
        """Lets gradients live until the last op that reads them."""
        for visit in self.trace.visits:
            if visit.phase is not Phase.BACKWARD:
                continue
            pattern, first = self._patterns[visit.segment], visit.first_op
            late = [(visit.first_tensor + root, index) for root, index in pattern.late]
            late += [(self._root_of[visit.ports[port]], max(ops)) for port, ops in pattern.readers]
            for number, index in late:
                root = roots.get(number)
                if root is not None and root.completes != NEVER:
                    root.completes = max(root.completes, first + index)

    def root_of(self, tensor: int) -> int:
        """The id of the root whose bytes tensor ``tensor`` (its id) lies in."""
        return self._root_of[tensor]

    # Single ops.

    @cached_property
    def _written(self) -> frozenset[int]:
        """Roots that a visit writes to which does not make them."""
        return frozenset(
            self._root_of[visit.ports[-1 - reference]]
            for visit in self.trace.visits
            for reference in self._patterns[visit.segment].written
            if reference < 0
        )

    def named(self, place: int) -> Mapping[tuple[str, int], int]:
        """The ops of a forward visit that a plan may treat otherwise than their block: (``Work.op``, occurrence) to the
        place of the op in the visit. They make a root that has bytes, and no later op writes to what they make."""
        if place not in self._named:
            names = self._patterns[self.trace.visits[place].segment].names
            if self._written:
                names = {name: op for name, op in names.items() if self._written.isdisjoint(self.made_by(place, op))}
            self._named[place] = names
        return self._named[place]

    def made_by(self, place: int, op: int) -> tuple[int, ...]:
        """The roots that op ``op`` (its place in the visit) makes, in the order in which it returns them."""
        visit = self.trace.visits[place]
        return tuple(visit.first_tensor + made for made in self._patterns[visit.segment].made_by.get(op, ()))

    def dtype_of(self, root: int) -> str:
        """The dtype of a root that the step makes."""
        visit = self.trace.visits[self.roots[root].visit]
        return self.trace.segments[visit.segment].tensors[root - visit.first_tensor].dtype

    @cached_property
    def asked(self) -> Mapping[int, int]:
        """Of every root that backward reads: the number of the op at which it may ask for it first. That is the first
        that can be of the same node of autograd as the first op that reads it."""
        found: dict[int, int] = {}
        for visit in self.trace.visits:
            pattern = self._patterns[visit.segment]
            for port, ops in pattern.readers if visit.phase is Phase.BACKWARD else ():
                root = self._root_of[visit.ports[port]]
                if root in self.roots and root not in found:
                    found[root] = visit.first_op + pattern.since(ops[0])
        return MappingProxyType(found)

    @cached_property
    def backward_asks(self) -> int:
        """The number of the op after which backward has asked for something at the latest; ``ops`` if it never does."""
        asking = (
            v.first_op + self._patterns[v.segment].ends[0]
            for v in self.trace.visits
            if v.phase is Phase.BACKWARD and self._patterns[v.segment].ends
        )
        return next(asking, self.ops)

    # Visits.

    def last_op(self, place: int) -> int:
        """The number of the last op of a visit."""
        visit = self.trace.visits[place]
        return visit.first_op + self._patterns[visit.segment].length - 1

    def length(self, place: int) -> int:
        """The number of ops of a visit."""
        return self._patterns[self.trace.visits[place].segment].length

    def length_again(self, place: int) -> int:
        """The number of ops that run again when a forward visit is recomputed: those before its last saved tensor."""
        return max(0, self._patterns[self.trace.visits[place].segment].saves_until)

    def port_roots(self, place: int) -> Mapping[int, tuple[int, ...]]:
        """Roots from outside that ops of a visit read, each with the places of those ops in the visit."""
        if place not in self._port_roots:
            visit = self.trace.visits[place]
            found: dict[int, tuple[int, ...]] = {}
            for port, ops in self._patterns[visit.segment].readers:
                root = self._root_of[visit.ports[port]]
                found[root] = tuple(sorted({*found[root], *ops})) if root in found else ops
            self._port_roots[place] = found
        return self._port_roots[place]

    def block_reads(self, place: int) -> tuple[tuple[int, str], ...]:
        """Which blocks the ops of a visit read parameters of: (place of the op, block), in order, each pair once."""
        if place not in self._block_reads:
            self._block_reads[place] = self._find_reads(self.trace.visits[place])
        return self._block_reads[place]

    def _find_reads(self, visit: Visit) -> tuple[tuple[int, str], ...]:
        reads: dict[tuple[int, int], str] = {}
        for port, ops in self._patterns[visit.segment].readers:
            root = self._root_of[visit.ports[port]]
            if root < len(self.blocks):
                block = self.blocks[root]
                for op in ops:
                    reads[op, -port] = block
        return tuple(dict.fromkeys((op, reads[op, port]) for op, port in sorted(reads, key=lambda k: (k[0], -k[1]))))

    def are_calls(self, places: Sequence[int]) -> bool:
        """Whether each of ``places``, the forward visits of a block, is known to be all of a call of its module, so
        that an op in it goes by a name. One that saves nothing may be a part of a call; or none: without gradients, or
        of a part of the module that somebody else calls."""
        trace = self.trace
        return are_apart(trace, places) and all(trace.segments[trace.visits[place].segment].saves for place in places)

    def partners(self, blocks: frozenset[str]) -> dict[int, frozenset[int]]:
        """For every forward visit of ``blocks`` the backward visits that belong to it.

        Calls of a module go backward in reverse order, those that save nothing (without gradients) not at all where
        there are more forward visits than backward ones. Where the numbers differ (a backward that autograd
        interrupts), or autograd has let go before, every backward visit of the block belongs to each of its forward
        visits.
        """
        pairs: dict[int, frozenset[int]] = {}
        places: dict[tuple[str, Phase], list[int]] = {}
        for place, visit in enumerate(self.trace.visits):
            places.setdefault((visit.block, visit.phase), []).append(place)
        for block in blocks:
            forward = places.get((block, Phase.FORWARD), [])
            backward = places.get((block, Phase.BACKWARD), [])
            pairs.update((f, frozenset(backward)) for f in forward)
            saving = forward if len(forward) <= len(backward) else [f for f in forward if self._saves(f)]
            reverse = list(zip(saving, reversed(backward), strict=False))
            if len(saving) == len(backward) and not any(self._has_let_go(f, before=b) for f, b in reverse):
                pairs.update((f, frozenset((b,))) for f, b in reverse)
                pairs.update((f, frozenset()) for f in forward if f not in saving)
        return pairs

    def _saves(self, place: int) -> bool:
        """Whether autograd saves anything in a visit."""
        return self._patterns[self.trace.visits[place].segment].saves_until != NO_SAVES

    def _has_let_go(self, place: int, before: int) -> bool:
        """Whether autograd has let go of all that was saved in a visit when visit ``before`` begins."""
        kept_until = self.trace.visits[place].kept_until
        return kept_until != NO_SAVES and kept_until < self.trace.visits[before].first_op

    def copied_nbytes(self, place: int) -> int:
        """Bytes of the buffers of a visit's module: recomputing it works on a copy of them (``runtime/recompute.py``),
        of which autograd may save parts."""
        if place not in self._copied:
            module = f"{self.trace.model.block(self.trace.visits[place].block).module}."
            self._copied[place] = sum(nbytes for name, nbytes in self._buffers if name.startswith(module))
        return self._copied[place]

    def found_nbytes(self, place: int) -> int:
        """Bytes of the buffers that a visit's module changes, and of those and of attributes that it replaces:
        recomputing it keeps what forward found in them (``runtime/surroundings.py``)."""
        visit = self.trace.visits[place]
        module, changed = f"{self.trace.model.block(visit.block).module}.", self.trace.changed_buffers
        held = sum(nbytes for name, nbytes in self._buffers if name in changed and name.startswith(module))
        return held + self.trace.segments[visit.segment].replaced_nbytes

    def kept(self, place: int) -> set[int]:
        """Roots from outside that a recomputation of a visit keeps: its arguments, and what its ops read."""
        return self.port_roots(place).keys() | set(self.given(place))

    def given(self, place: int) -> tuple[int, ...]:
        """Roots from outside among the arguments of a visit, in their order."""
        visit = self.trace.visits[place]
        return tuple(self._root_of[visit.ports[port]] for port in self._patterns[visit.segment].given)

    def triggers(self, partners: Mapping[int, frozenset[int]]) -> dict[int, tuple[int, ...]]:
        """For each backward visit the forward visits that must run again before it.

        A forward visit runs again before the first backward visit of its own that reads what it made or read: whatever
        a recomputed block saves, parameters included, is only there once it has run again. If none reads that, then
        before the first of them: autograd asks for what is saved, read or not. One that saves nothing never does.
        """
        found: dict[int, tuple[int, ...]] = {}
        saving = [p for p in partners if self._saves(p)]
        waiting = set(saving)
        forward_of: dict[int, list[int]] = {}
        for forward in saving:
            for place in partners[forward]:
                forward_of.setdefault(place, []).append(forward)
        for place in sorted(forward_of):
            wanted: dict[int, None] = {}
            for number, _ in sorted(self.port_roots(place).items(), key=lambda item: item[1][0]):
                made_by = self.roots[number].visit if number in self.roots else NEVER
                for forward in forward_of[place]:
                    if forward in waiting and (made_by == forward or number in self.port_roots(forward)):
                        wanted[forward] = None
            waiting.difference_update(wanted)
            if wanted:
                found[place] = tuple(wanted)
        for forward in sorted(waiting, reverse=True):
            for place in sorted(partners[forward])[:1]:
                found[place] = (*found.get(place, ()), forward)
        return found

    def is_internal(self, root: Root) -> bool:
        """Whether the visit that makes ``root`` drops it too: outside of it only autograd knows the root."""
        return root.drop != NEVER and root.drop <= self.last_op(root.visit)
