"""What may be done with what each op of a block makes, and what that costs: kept, moved to the host, made again, or,
where the user allows it, kept or moved as codes of fewer bits.

All blocks that are alike share a segment of the trace and so their items. A block that a step runs several times (one
that others share, an encoder of pairs) has those of all its runs together: a plan says the same of each. Where ops have
no names because a step may by chance run them once more without gradients, there are no items but what comes in: such
a block is kept or runs again as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from forebay.layout import MOVED_LEAST
from forebay.planners.activations.coding import Coded, codable
from forebay.simulation import Costs
from forebay.trace import Segment

__all__ = ["INPUT", "Item", "Items", "items_of", "together"]

TINY = 1e-3
"""Share of the bytes that a block saves: what is less is not moved. It would free next to nothing, and every tensor
that moves costs the host time on its way out and on its way back."""

INPUT = ""
"""In the place of an op's name: what comes into a block that recomputes, which has to be there when it runs again."""


@dataclass(frozen=True, slots=True)
class Item:
    """What one op makes, or what comes in (``op`` is ``INPUT``).

    ``seconds`` to run the op again, where it may (``reruns``). ``held``: bytes on the device if it is kept there from
    forward to backward. ``moved``: the same bytes if they can go to the host, else 0; ``out_seconds`` and
    ``back_seconds`` on the link if they do. ``saved`` bytes are on the device while backward runs through the block,
    whatever is done. ``named`` says whether a plan has to name the op to keep what it makes. ``codes``: the same as
    codes; None where it may not be codes. ``handover_seconds`` of compute, to hand over both transfers.

    Up to ``MOVED_LEAST`` bytes of an op that is moved stay on the device and are left out here: they are thousands
    among millions, and what a plan needs is counted exactly in any case (``Bench.device``).
    """

    op: str
    occurrence: int
    seconds: float
    held: int
    moved: int
    saved: int
    out_seconds: float
    back_seconds: float
    reruns: bool = False
    named: bool = False
    codes: Coded | None = None
    handover_seconds: float = 0.0

    def beside(self, other: Item) -> Item:
        """What the op makes in two runs of its block; backward goes through one of them at a time. Both move, or are
        codes, where each may. Where one of them alone runs again, this says that both do: no less can be held."""
        moves = self.moved and other.moved
        return Item(
            self.op,
            self.occurrence,
            self.seconds + other.seconds,
            self.held + other.held,
            self.moved + other.moved if moves else 0,
            max(self.saved, other.saved),
            self.out_seconds + other.out_seconds if moves else 0.0,
            self.back_seconds + other.back_seconds if moves else 0.0,
            self.reruns or other.reruns,
            self.named or other.named,
            self.codes.beside(other.codes) if self.codes and other.codes else None,
            self.handover_seconds + other.handover_seconds if moves else 0.0,
        )

    def staying(self) -> Item:
        """The same where it may not move, nor be codes."""
        return replace(self, moved=0, out_seconds=0.0, back_seconds=0.0, codes=None, handover_seconds=0.0)

    @property
    def worth(self) -> float:
        """Seconds that a byte of it is worth: what cannot be made again has to be somewhere."""
        return self.seconds / self.held if self.reruns and self.held else inf

    @property
    def least(self) -> int:
        """Bytes that are held or moved at least, where it does not run again."""
        return self.held if self.codes is None else min(self.held, self.codes.moved)

    @property
    def link_seconds(self) -> float:
        """Seconds of both directions of the link."""
        return self.out_seconds + self.back_seconds


@dataclass(frozen=True)
class Items:
    """The items of a block, and what recomputing it costs whatever is named.

    ``kept`` are those of a block that does not recompute: what it saves; ``kept_held`` bytes more are held then, of
    ops that cannot be named. ``again`` are those of one that does, None where it may not; ``again_seconds`` are those
    of the ops that run again in any case: views, and ops that cannot be named. ``treat_seconds`` are added to a forward
    and ``treat_again_seconds`` to what runs again of it where any item is treated.
    """

    kept: tuple[Item, ...]
    kept_held: int = 0
    again: tuple[Item, ...] | None = None
    again_seconds: float = 0.0
    treat_seconds: float = 0.0
    treat_again_seconds: float = 0.0

    @property
    def held(self) -> int:
        """Bytes held if nothing moves and nothing runs again."""
        return self.kept_held + sum(item.held for item in self.kept)


def items_of(
    costs: Costs,
    segment: Segment,
    named: Mapping[tuple[str, int], int],
    *,
    recomputes: bool,
    arriving: int = 0,
    arriving_moves: bool = False,
    bits: int = 0,
) -> Items:
    """The items of a block whose forward is ``segment``; ``named`` are the places of the ops that a plan can name
    (``TraceIndex.named``).

    ``recomputes``: whether the block may. ``arriving`` bytes come in and would be gone without recomputation;
    ``arriving_moves`` says whether they can go to the host. ``bits``: of the codes that items may become; 0: of none.
    """
    maker = _Maker(costs, segment, named, bits)
    kept = tuple(item for index, name in maker.names.items() if (item := maker.kept(index, name)) is not None)
    treated = len(segment.ops) * costs.treat_seconds
    if not recomputes or not segment.saves:
        return Items(kept, maker.nameless, treat_seconds=treated)
    stop = segment.saves_until
    again = [item for index, name in maker.names.items() if (item := maker.again(index, name, index < stop))]
    if arriving:
        again.append(maker.arriving(arriving, arriving_moves))
    rest = sum(costs.again(op.work) for index, op in enumerate(segment.ops[:stop]) if index not in maker.names)
    return Items(kept, maker.nameless, tuple(again), rest, treated, stop * costs.treat_seconds)


def together(runs: Sequence[Items]) -> Items:
    """The items of a block that a step runs several times, in ``runs`` that may have other ops. What a plan names is
    treated alike in every run: so it may name what each run makes. Of a block that does not run again the rest stays;
    of one that does it runs again in any case."""
    if len(runs) == 1:
        return runs[0]
    kept, staying = _together([items.kept for items in runs])
    again, rest = _together([items.again or () for items in runs])
    return Items(
        (*kept, *(item.staying() for item in staying)),
        sum(items.kept_held for items in runs),
        again if any(items.again is not None for items in runs) else None,
        sum(items.again_seconds for items in runs) + sum(item.seconds for item in rest),
        sum(items.treat_seconds for items in runs),
        sum(items.treat_again_seconds for items in runs),
    )


def _together(runs: Sequence[Sequence[Item]]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Those that every run has, all in one, and those that only some have. What comes in is that of all runs."""
    found: dict[tuple[str, int], Item] = {}
    made: Counter[tuple[str, int]] = Counter()
    for item in (item for items in runs for item in items):
        name = item.op, item.occurrence
        found[name] = found[name].beside(item) if name in found else item
        made[name] += len(runs) if item.op == INPUT else 1
    everywhere = tuple(item for name, item in found.items() if made[name] >= len(runs))
    return everywhere, tuple(item for name, item in found.items() if made[name] < len(runs))


class _Maker:
    """Makes the items of one segment."""

    def __init__(self, costs: Costs, segment: Segment, named: Mapping[tuple[str, int], int], bits: int) -> None:
        self._costs = costs
        self._segment = segment
        self._bits = bits
        # The roots that may be codes where the block does not run again, and where it does.
        self._codable = dict.fromkeys((False, True), frozenset[int]())
        if bits:
            ops = [costs.trace.works[op.work].op for op in segment.ops]
            self._codable = {again: codable(segment, ops, again=again) for again in (False, True)}
        self._saved = sum(t.nbytes for r, t in enumerate(segment.tensors) if t.saved and t.root == r)
        self._dropped = {root for op in segment.ops for root in op.dropped if root >= 0}
        self.names = {index: name for name, index in named.items()}
        # Each once: an op that writes in place returns what another has made.
        others = {r for index in range(len(segment.ops)) if index not in self.names for r in self._roots(index)}
        others -= {r for index in self.names for r in self._roots(index)}
        self.nameless = sum(segment.tensors[r].nbytes for r in others & self._dropped if segment.tensors[r].saved)

    def kept(self, index: int, name: tuple[str, int]) -> Item | None:
        """What the op saves, in a block that does not recompute; None if it saves nothing of its own."""
        tensors = self._segment.tensors
        roots = self._roots(index)
        saved = [tensors[r].nbytes for r in roots if tensors[r].saved]
        if not saved:
            return None
        large = [r for r in roots if tensors[r].nbytes >= MOVED_LEAST]
        # The checker refuses to move what nobody saves: nobody would ask for it again.
        movable = all(tensors[r].saved for r in large)
        moved = [tensors[r].nbytes for r in large] if movable else []
        codes = self._coded(large, sum(saved), again=False) if movable else None
        return self._item(name, 0.0, sum(saved), moved, sum(saved), codes=codes)

    def again(self, index: int, name: tuple[str, int], reruns: bool) -> Item | None:
        """What the op makes, in a block that recomputes; None if nobody needs it for backward."""
        tensors = self._segment.tensors
        roots = self._roots(index)
        moved = [tensors[r].nbytes for r in roots if tensors[r].nbytes >= MOVED_LEAST]
        if not self._dropped.issuperset(roots):
            # It leaves the block. What others save of it is there whether the op runs again or not.
            held = sum(tensors[r].nbytes for r in roots if tensors[r].saved)
            lasting = all(tensors[r].saved for r in roots)
            return self._item(name, 0.0, held, moved if lasting else [], held, named=reruns) if held or reruns else None
        if not reruns:
            return None
        held = sum(tensors[r].nbytes for r in roots)
        saved = sum(tensors[r].nbytes for r in roots if tensors[r].saved)
        seconds = self._costs.again(self._segment.ops[index].work)
        codes = self._coded([r for r in roots if tensors[r].nbytes >= MOVED_LEAST], held, again=True)
        return self._item(name, seconds, held, moved, saved, reruns=True, named=True, codes=codes)

    def arriving(self, nbytes: int, moves: bool) -> Item:
        """What comes in."""
        return self._item((INPUT, 0), 0.0, nbytes, [nbytes] if moves and nbytes >= MOVED_LEAST else [], nbytes)

    def _item(
        self,
        name: tuple[str, int],
        seconds: float,
        held: int,
        moved: list[int],
        saved: int,
        *,
        reruns: bool = False,
        named: bool = False,
        codes: Coded | None = None,
    ) -> Item:
        if sum(moved) < TINY * self._saved:
            moved = []
        machine, handed = self._costs.machine, 2 * len(moved) * self._costs.handover_seconds
        out, back = (sum(link.seconds(n) for n in moved) for link in (machine.leaving, machine.h2d))
        return Item(*name, seconds, held, held if moved else 0, saved, out, back, reruns, named, codes, handed)

    def _coded(self, large: list[int], held: int, *, again: bool) -> Coded | None:
        """What the roots ``large`` are as codes, of an op that holds ``held`` bytes; None where they may not be, or
        gain nothing by it."""
        if not large or not self._codable[again].issuperset(large):
            return None
        tensors = [self._segment.tensors[r] for r in large]
        coded = Coded.of(self._costs, tensors, held, self._bits)
        return coded if coded.held < held else None

    def _roots(self, index: int) -> list[int]:
        tensors = self._segment.tensors
        return [r for r in self._segment.ops[index].outputs if r >= 0 and tensors[r].root == r]
