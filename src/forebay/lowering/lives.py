"""The order of a step with recomputation and treated activations, and the lives of its roots in it. No torch.

The lives of a root, in positions of the step
    of a block that does not recompute   from the op that makes it until nobody holds it: Python, or autograd.
    of one that does                     the same but for autograd's hold on what is saved inside the block; and again
                                         from where the op runs again until backward has read what it saved of it.
    that is kept (``Fate.KEEP``)         both as one, without a gap: the op does not run again; where it would not run
                                         again anyway, the first, until the block's forward is over at least.
    that is moved (``Fate.OFFLOAD``,     until Python lets go of it; and again from where backward first asks for it, or
    ``Fate.DISK``), or made into codes   the op would have run again, until its last holder is gone. The time that the
                                         copies take comes on top of that (``liveness``).
A root is treated where it is *sent*: behind the op that makes it, if every op of its block is seen
(``treatments.seen_by_op``); if not, where autograd saves it for the first time. Its codes live from there until they
are on the host, or (``Fate.KEEP``) until they are decoded for whoever asks first. What of it is not treated (``Split``)
lives from there until whoever asks first has it whole again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import final

import numpy as np

from forebay.compression import MASK_BITS, Codes
from forebay.layout import MOVED_LEAST
from forebay.lowering.arrangement import Arrangement, Run
from forebay.lowering.columns import KINDS, Levels, Lives, column
from forebay.lowering.index import NEVER, Root, TraceIndex
from forebay.memory import Kind
from forebay.scheduling.activations import described
from forebay.trace import Phase
from forebay.treatments import Fate, Selection, StandIn, Treatment, seen_by_op

__all__ = ["Layout", "Move", "Profile"]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A root that is encoded, or leaves the device, as a whole or in part, and comes back. Each is equal to itself
    alone: it is looked up often.

    ``root`` is its id, ``what`` says in words what it is, ``visit`` of ``block`` makes it; ``ops`` are the numbers of
    the op that does and of the one after the last during which Python holds what is to leave. It is made at position
    ``made``, encoded or sent on its way behind the op at ``sent``, and Python holds it until after the op at
    ``dropped``. ``asked`` is the position at which backward first asks for it (``NEVER``: nobody does), ``gone`` the
    last at which somebody holds what came back. ``stand_in`` takes its place in between: its codes, or else the root,
    are on the device until after position ``until``, and then for as long as their copy to the host takes, if they
    leave; the rest of it is there until after ``rest_until``.
    ``pieces`` are the bytes of each that leaves, where several are taken for one (``stages.Grain``).
    """

    root: int
    nbytes: int
    kind: Kind
    visit: int
    block: str
    what: str
    ops: tuple[int, int]
    made: int
    sent: int
    dropped: int
    asked: int
    gone: int
    stand_in: StandIn
    until: int
    rest_until: int
    pieces: tuple[int, ...] = ()
    # Of ``stand_in``. Asked for at every turn, and so not worked out each time.
    moved: int = field(init=False)
    rest: int = field(init=False)
    in_transit: int = field(init=False)
    leaves: bool = field(init=False)
    codes: Codes | None = field(init=False)

    def __post_init__(self) -> None:
        for name in ("moved", "rest", "in_transit", "leaves", "codes"):
            object.__setattr__(self, name, getattr(self.stand_in, name))

    @property
    def fate(self) -> Fate:
        """Where it goes."""
        return self.stand_in.fate


@dataclass(frozen=True)
class Profile:
    """Bytes of one micro-batch, position by position, with the blocks of ``recompute`` recomputed.

    ``during[p]`` are the bytes live while the op at p runs, ``levels[kind][p]`` those of a kind before it (one more
    entry than there are positions: the end). A gradient counts until it is complete. The first ``forward`` positions
    are those of the forward pass. ``with_outputs`` is ``during`` and what the trace's own figures add in forward
    (outputs of the pass before, a loss outside of the model), or what decoding takes before the op, or encoding after
    it. ``moves`` are in the order in which they leave; backward has begun to ask for things when the op at ``asking``
    runs.
    """

    recompute: frozenset[str]
    runs: tuple[Run, ...]
    during: tuple[int, ...]
    with_outputs: tuple[int, ...]
    levels: Mapping[Kind, tuple[int, ...]]
    forward: int
    moves: tuple[Move, ...] = ()
    asking: int = 0

    @property
    def peak(self) -> int:
        """The most bytes at any time, nothing of them on its way to the host or back ahead of time."""
        return max(self.with_outputs, default=0)


@final
class Layout:
    """The order of a step as in ``arrangement``, with single ops treated as ``activations`` say, and the lives of its
    roots in it. Treatments of ops that the trace does not have change nothing."""

    def __init__(self, arrangement: Arrangement, activations: Iterable[Selection] = ()) -> None:
        self._base = arrangement
        self._index, self._columns = arrangement.index, arrangement.columns
        activations = tuple(activations)
        self._treated = _treated(self._index, activations)
        self._by_op = seen_by_op(activations, arrangement.recompute)
        self._again = arrangement.again
        self._position, self._end = arrangement.position, arrangement.end
        self._kept, self._late, self._moves = self._fates()

    def profile(self) -> Profile:
        """Adds up the lives."""
        lives = Levels(self._end)
        self.note(lives)
        return self._summed(lives)

    def note(self, lives: Lives) -> None:
        """Tells ``lives`` of each."""
        index, table = self._index, self._columns
        starts, ends = self._base.first[0], self._base.first[1].copy()
        remade, starts_again, ends_again = self._base.second
        again = remade & (table.completes == NEVER)
        for number, until in self._late.items():
            row = table.row[number]  # it is not made again: it has one life
            ends[row] = max(ends[row], until)
        kept = column([table.row[number] for number in sorted(self._kept)])
        ends[kept] = np.maximum(ends[kept], np.where(again[kept], ends_again[kept], 0))
        again[kept] = False
        kinds = table.kind.copy()
        kinds[kept] = KINDS.index(Kind.ACTIVATION)
        as_it_is = np.ones(len(kinds), bool)
        as_it_is[[table.row[move.root] for move in self._moves]] = False
        found, first = np.unique(kinds, return_index=True)
        for place in found[np.argsort(first)].tolist():
            own = as_it_is & (kinds == place)
            lives.add_all(KINDS[place], starts[own], ends[own], table.nbytes[own])
            own &= again
            lives.add_all(KINDS[place], starts_again[own], ends_again[own], table.nbytes[own])
        for move in self._moves:
            _add_move(lives, move)
        for place, run in self._again.items():
            nbytes = index.copied_nbytes(place)
            if nbytes:
                lives.add(Kind.TEMPORARY, run.position, self._base.until(place), nbytes)
            nbytes = index.found_nbytes(place)
            if nbytes:
                begins = self._position[index.trace.visits[place].first_op]
                lives.add(Kind.ACTIVATION, begins, self._base.until(place), nbytes)

    def _summed(self, lives: Levels) -> Profile:
        trace = self._index.trace
        before = lives.before()
        levels = {kind: tuple(level.tolist()) for kind, level in before.items()}
        during = lives.during(before).tolist()
        first = self._base.forward
        whole = [n + trace.held_nbytes for n in during[:first]] + during[first:]
        if first:
            left = sum(level[first] for level in levels.values())
            whole[first - 1] = max(whole[first - 1], left + trace.held_nbytes + trace.unseen_nbytes)
        for position, most in self._coding(levels, whole).items():
            whole[position] = max(whole[position], most)
        asking = self._index.backward_asks
        asks = self._position[asking] if asking < self._index.ops else self._end
        return Profile(
            self._base.recompute,
            self._runs(),
            tuple(during),
            tuple(whole),
            MappingProxyType(levels),
            first,
            self._moves,
            min((asks, *(run.position for run in self._again.values()))),
        )

    def _runs(self) -> tuple[Run, ...]:
        """The runs, without what is not run again because it is treated."""
        runs = []
        for run in self._base.runs:
            skipped = frozenset(op for op in self._treated.get(run.visit, {}) if run.again and op < run.length)
            runs.append(replace(run, skipped=skipped) if skipped else run)
        return tuple(runs)

    def _coding(self, levels: Mapping[Kind, tuple[int, ...]], whole: Sequence[int]) -> dict[int, int]:
        """The most bytes while something is encoded after the op at a position, or decoded before it.

        Encoding comes while all is there that the op has read and made. Decoding comes before the op; of what is asked
        for at once, one after the other in any order, all may be back when the last is decoded, and the rest of each of
        which a part was treated may still be beside it.
        """
        found, back, most = dict[int, int](), dict[int, int](), dict[int, int]()
        if not any(move.stand_in.is_made for move in self._moves):
            return found
        for move in self._moves:
            if move.asked != NEVER:
                back[move.asked] = back.get(move.asked, 0) + move.nbytes + move.rest
            if move.codes is not None:
                found[move.sent] = max(found.get(move.sent, 0), whole[move.sent] + move.codes.workspace)
            if move.stand_in.is_made and move.asked != NEVER:
                extra = 0 if move.codes is None else move.codes.nbytes + move.codes.workspace
                most[move.asked] = max(most.get(move.asked, 0), extra)
        copied = {run.position: self._index.copied_nbytes(place) for place, run in self._again.items()}
        for position, extra in most.items():
            before = sum(level[position] for level in levels.values()) + copied.get(position, 0)
            found[position] = max(found.get(position, 0), before + back[position] + extra)
        return found

    # Lives of what is treated.

    def _fates(self) -> tuple[frozenset[int], Mapping[int, int], tuple[Move, ...]]:
        """Which roots stay on the device because a recomputation does not make them, until when those that it would not
        come to, and which are moved or encoded."""
        kept: set[int] = set()
        late: dict[int, int] = {}
        moves: list[tuple[tuple[int, ...], Move]] = []
        for place, ops in sorted(self._treated.items()):
            again = self._again.get(place)
            for op, treatment in sorted(ops.items()):
                treats = self._treats(place, op, treatment)
                for order, number in enumerate(self._index.made_by(place, op)):
                    root = self._index.roots[number]
                    if number in treats and root.nbytes >= MOVED_LEAST:
                        what = described(self._block(place), treatment.op, treatment.occurrence, order)
                        sent = self._sent(number, root)
                        moves.append((sent, self._move(number, root, sent[0], what, treatment)))
                    elif again is not None and op < again.length:
                        kept.add(number)
                    elif self._block(place) in self._base.recompute:
                        # Nobody knew in forward that no more would be saved: it was held until that was over.
                        late[number] = self._position[self._index.last_op(place)]
        moves.sort(key=lambda entry: entry[0])
        return frozenset(kept), late, tuple(move for _, move in moves)

    def _treats(self, place: int, op: int, treatment: Treatment) -> Collection[int]:
        """The roots of an op that do not stay as they are, if they are large enough. Of an op that makes what is true
        or false beside something else, a mask is of that alone."""
        if not treatment.changes_bytes:
            return ()
        made: Sequence[int] = self._index.made_by(place, op)
        if treatment.bits == MASK_BITS:
            made = [root for root in made if self._index.dtype_of(root) == "bool"] or made
        if self._block(place) in self._base.recompute:
            return made
        # With other routes nobody may save what the plan names.
        return [root for root in made if self._index.roots[root].saved]

    def _sent(self, number: int, root: Root) -> tuple[int, ...]:
        """The number of the op behind which a root is treated, and what says which of those behind that op is first."""
        if self._block(root.visit) in self._by_op or root.pack == NEVER:
            return root.birth, 0, number
        saved, handed = (root.pack, 0, root.turn), self._base.handed.get(number)
        # A checkpoint saves its arguments when it begins, whatever the ops in it save of them later.
        return saved if handed is None or saved[0] < handed[0] else (handed[0], 1, handed[1])

    def _move(self, number: int, root: Root, sent: int, what: str, treatment: Treatment) -> Move:
        remade, starts, ends = self._base.second
        row = self._columns.row[number]
        made = (int(starts[row]), int(ends[row])) if remade[row] else None
        since, held = self._base.held.get(number, (NEVER, NEVER))
        # What is saved in a block that recomputes is what was made again, and that comes first.
        saved = root.released if root.visit in self._again else root.unsave if root.saved else NEVER
        wanted = [] if since == NEVER else [(since, held)]
        if made is not None:
            wanted.append(made)
        if saved != NEVER:
            # Nothing may read it, if a node wanted its shape alone; it was asked for all the same.
            wanted.append((self._position[min(self._index.asked.get(number, saved), saved)], self._position[saved]))
        birth, place = self._position[root.birth], self._position[sent]
        dropped = max(place, self._end - 1 if root.drop == NEVER else self._position[root.drop])
        asked = min((start for start, _ in wanted), default=NEVER)
        last = self._index.ops - 1 if root.drop == NEVER else max(root.birth, root.drop)
        stand_in, until = StandIn.of(treatment, root.nbytes, self._index.dtype_of(number)), dropped
        # What nobody asks for is let go when forward is over.
        rest_until = max(place, (self._base.forward if asked == NEVER else asked) - 1)
        if stand_in.codes is not None:
            last, until = sent, place if stand_in.leaves else rest_until
        return Move(
            root=number,
            nbytes=root.nbytes,
            kind=root.kind,
            visit=root.visit,
            block=self._block(root.visit),
            what=what,
            ops=(root.birth, 1 + last),
            made=birth,
            sent=place,
            dropped=dropped,
            asked=asked,
            gone=max((end for _, end in wanted), default=NEVER),
            stand_in=stand_in,
            until=until,
            rest_until=rest_until,
        )

    def _block(self, place: int) -> str:
        return self._index.trace.visits[place].block


def _add_move(lives: Lives, move: Move) -> None:
    """What there is of a treated root, copies under way left out."""
    lives.add(move.kind, move.made, move.dropped, move.nbytes)
    if move.codes is not None:
        lives.add(Kind.ACTIVATION, move.sent, move.until, move.moved)
    if move.rest:
        lives.add(Kind.ACTIVATION, move.sent, move.rest_until, move.rest)
    if move.asked != NEVER:
        lives.add(Kind.ACTIVATION, move.asked, move.gone, move.nbytes)


def _treated(index: TraceIndex, activations: Iterable[Selection]) -> dict[int, dict[int, Treatment]]:
    """Of every forward visit of a selected block the ops that are treated, by their place."""
    chosen = {block: selection.treatments for selection in activations for block in selection.blocks}
    found: dict[int, dict[int, Treatment]] = {}
    for place, visit in enumerate(index.trace.visits):
        if visit.phase is Phase.FORWARD and visit.block in chosen:
            names = index.named(place)
            named = ((names.get((t.op, t.occurrence), NEVER), t) for t in chosen[visit.block])
            found[place] = {op: treatment for op, treatment in named if op != NEVER}
    return found
