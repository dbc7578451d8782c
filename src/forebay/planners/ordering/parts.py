"""A graph of ops cut where nothing can be moved across. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from forebay.op_graph import OpGraph

__all__ = ["Held", "Part", "cut_at", "parts_of"]


@dataclass(frozen=True, slots=True)
class Held:
    """``nbytes`` of a tensor that a part makes or reads. ``maker`` is the place of its op in the part, -1: it was there
    before. It goes when all of ``readers`` have run (its maker, where nobody reads it), unless it is there behind the
    part (``stays``)."""

    nbytes: int
    maker: int
    readers: tuple[int, ...]
    stays: bool


@dataclass(frozen=True)
class Part:
    """Consecutive ``ops`` of a graph between two that run at one place only: whatever the order, all that is before
    them has run, and nothing behind them. Places in the part number its ops; ``needs`` are the places that each has to
    come behind. ``base`` bytes are there all the time."""

    ops: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    tensors: tuple[Held, ...]
    base: int

    @cached_property
    def makes(self) -> tuple[int, ...]:
        """Bytes that each op makes."""
        made = [0] * len(self.ops)
        for one in self.tensors:
            if one.maker >= 0:
                made[one.maker] += one.nbytes
        return tuple(made)

    @cached_property
    def begins(self) -> int:
        """Bytes that are there before the first op."""
        return self.base + sum(one.nbytes for one in self.tensors if one.maker < 0)

    @cached_property
    def touching(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each op the tensors that go when it has run, if it is the last of some ops: (those as bits, bytes)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.ops]
        for one in self.tensors:
            if not one.stays:
                last = one.readers or (one.maker,)
                bits = sum(1 << op for op in last)
                for op in last:
                    found[op].append((bits, one.nbytes))
        return tuple(map(tuple, found))

    def levels(self, order: Sequence[int]) -> list[int]:
        """Bytes live while each op runs, one after the other in ``order``."""
        live, done, found = self.begins, 0, []
        for op in order:
            live += self.makes[op]
            found.append(live)
            done |= 1 << op
            live -= sum(nbytes for bits, nbytes in self.touching[op] if bits & done == bits)
        return found

    @cached_property
    def peak(self) -> int:
        """The most bytes that are live in program order."""
        return max(self.levels(range(len(self.ops))), default=0)

    def window(self, ops: Sequence[int], ran: AbstractSet[int]) -> Part:
        """The part that ``ops`` are, in that order, when ``ran`` has run and all others of this part come later. Its
        ``ops`` are places here."""
        place = {op: at for at, op in enumerate(ops)}
        base, tensors = self.base, []
        for one in self.tensors:
            there = one.maker < 0 or one.maker in ran
            inside = tuple(sorted(place[op] for op in one.readers if op in place))
            stays = one.stays or any(op not in place and op not in ran for op in one.readers)
            if there and stays:
                base += one.nbytes
            elif (there and inside) or one.maker in place:
                tensors.append(Held(one.nbytes, place.get(one.maker, -1), inside, stays))
        needs = tuple(tuple(sorted(place[need] for need in self.needs[op] if need in place)) for op in ops)
        return Part(tuple(ops), needs, tuple(tensors), base)

    @cached_property
    def floor(self) -> int:
        """Bytes that no order takes less of: those of the only one where there is one op, else what is there at the
        beginning and at the end."""
        if len(self.ops) == 1:
            return self.peak
        ends = self.base + sum(one.nbytes for one in self.tensors if one.stays)
        return max(self.begins, ends)


def parts_of(graph: OpGraph) -> tuple[Part, ...]:
    """The parts of ``graph`` in order: each op that can only run at one place is a part of its own, and so is what is
    between two of them."""
    fixed = list(_fixed(graph))
    return cut_at(graph, sorted({0, len(graph.ops), *fixed, *(op + 1 for op in fixed)}))


def cut_at(graph: OpGraph, cuts: Sequence[int]) -> tuple[Part, ...]:
    """The ops of ``graph`` from each of ``cuts``, which are all places where it may be cut and both ends, up to the
    next one."""
    number = [at for at, (first, end) in enumerate(pairwise(cuts)) for _ in range(first, end)]
    held: list[list[Held]] = [[] for _ in cuts]
    base = [0] * (len(cuts) + 1)
    for tensor in graph.tensors:
        readers = tuple(sorted(set(tensor.readers)))
        made = number[tensor.maker]
        last = len(cuts) - 1 if tensor.kept else number[(readers or (tensor.maker,))[-1]]
        for at in {made, last}:
            inside = tuple(op - cuts[at] for op in readers if number[op] == at)
            maker = tensor.maker - cuts[at] if at == made else -1
            held[at].append(Held(tensor.nbytes, maker, inside, stays=last > at))
        # In the parts between the two it is there from the beginning to the end.
        base[made + 1] += tensor.nbytes
        base[max(made + 1, last)] -= tensor.nbytes
    return tuple(
        Part(tuple(range(first, end)), _needs(graph, first, end), tuple(held[at]), there)
        for at, ((first, end), there) in enumerate(zip(pairwise(cuts), accumulate(base), strict=False))
    )


def _fixed(graph: OpGraph) -> Iterator[int]:
    """The ops with which every other one is either before or behind: ROAM's memory-insensitive ops."""
    before = [0] * len(graph.ops)
    for op, needs in enumerate(graph.needs):
        for need in needs:
            before[op] |= before[need] | 1 << need
    behind = [0] * len(graph.ops)
    for op in reversed(range(len(graph.ops))):
        for need in graph.needs[op]:
            behind[need] |= behind[op] | 1 << op
    for op in range(len(graph.ops)):
        if before[op].bit_count() + behind[op].bit_count() == len(graph.ops) - 1:
            yield op


def _needs(graph: OpGraph, first: int, end: int) -> tuple[tuple[int, ...], ...]:
    """Of each op of a part those in it that have to run before it, by their places in it."""
    return tuple(tuple(sorted(n - first for n in graph.needs[op] if n >= first)) for op in range(first, end))
