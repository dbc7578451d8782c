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
The codes of a root live from the op that makes it until they are on the host, or (``Fate.KEEP``) until they are decoded
for whoever asks first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from types import MappingProxyType
from typing import final

from forebay.compression import MASK_BITS, Codes
from forebay.layout import MOVED_LEAST
from forebay.lowering.index import NEVER, Root, TraceIndex
from forebay.memory import Kind
from forebay.plans import Fate, Selection, Treatment
from forebay.scheduling.activations import described
from forebay.trace import NO_SAVES, Phase

__all__ = ["Layout", "Move", "Profile", "Run", "positions"]


@dataclass(frozen=True, slots=True)
class Run:
    """Ops that run one after the other: those of visit ``visit`` (its place in the trace), once more if ``again``: then
    only up to the last tensor that the visit saves, which may be none of them, and without those in ``skipped`` (their
    places in the visit), whose results are there.

    ``position`` is that of its first op in the step: with recomputation, positions and numbers of ops differ. What is
    skipped has a position too.
    """

    visit: int
    first_op: int
    length: int
    position: int
    again: bool
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A root that is encoded after the op that makes it, or leaves the device, or both, and comes back. Each is equal
    to itself alone: it is looked up often.

    ``root`` is its id, ``what`` says in words what it is, ``visit`` of ``block`` makes it; ``ops`` are the numbers of
    the op that does and of the one after the last during which Python holds what is to leave. It is made at position
    ``made`` and Python holds it until after the op at ``dropped``. ``asked`` is the position at which backward first
    asks for it (``NEVER``: nobody does), ``gone`` the last at which somebody holds what came back. ``codes`` are what
    takes its place (None: nothing does). They, or else the root, are on the device until after position ``until``, and
    then for as long as their copy to the host takes, if their ``fate`` is to leave.
    """

    root: int
    nbytes: int
    kind: Kind
    visit: int
    block: str
    what: str
    ops: tuple[int, int]
    made: int
    dropped: int
    asked: int
    gone: int
    fate: Fate
    codes: Codes | None
    until: int

    @property
    def moved(self) -> int:
        """Bytes of what leaves, or of the codes that stay."""
        return self.nbytes if self.codes is None else self.codes.nbytes

    @property
    def leaves(self) -> bool:
        """Whether it leaves the device, or else only becomes codes there."""
        return self.fate is not Fate.KEEP


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
    """The order of a step with the blocks of ``recompute`` recomputed and single ops treated as ``activations`` say,
    and the lives of its roots in it. Treatments of ops that the trace does not have change nothing."""

    def __init__(self, index: TraceIndex, recompute: frozenset[str], activations: Iterable[Selection] = ()) -> None:
        self._index = index
        self._recompute = recompute
        self._treated = _treated(index, activations)
        self._again: dict[int, Run] = {}
        runs: list[Run] = []
        triggers = index.triggers(index.partners(recompute))
        position = 0
        for place, visit in enumerate(index.trace.visits):
            for earlier in triggers.get(place, ()):
                first, length = index.trace.visits[earlier].first_op, index.length_again(earlier)
                skipped = frozenset(op for op in self._treated.get(earlier, {}) if op < length)
                self._again[earlier] = Run(earlier, first, length, position, again=True, skipped=skipped)
                runs.append(self._again[earlier])
                position += length
            runs.append(Run(place, visit.first_op, index.length(place), position, again=False))
            position += runs[-1].length
        self._runs = tuple(runs)
        self._end = position
        self._forward = next((r.position for r in self._runs if _is_backward(index, r)), position)
        self._position = positions(self._runs, index.ops)
        self._held = self._inputs_of_recomputed()
        self._kept, self._late, self._moves = self._fates()

    def profile(self) -> Profile:
        """Adds up the lives."""
        index = self._index
        lives = _Sums(self._end)
        moves = {move.root: move for move in self._moves}
        for number, root in index.roots.items():
            if number in moves:
                _add_move(lives, moves[number])
            elif number in self._kept:
                spans = self._lives(number, root)
                lives.add(Kind.ACTIVATION, spans[0][0], max(end for _, end in spans), root.nbytes)
            else:
                for start, end in self._lives(number, root):
                    lives.add(root.kind, start, max(end, self._late.get(number, end)), root.nbytes)
        for place, run in self._again.items():
            nbytes = index.copied_nbytes(place)
            if nbytes:
                lives.add(Kind.TEMPORARY, run.position, self._until(place), nbytes)
        return self._summed(lives)

    def _summed(self, lives: _Sums) -> Profile:
        trace = self._index.trace
        levels = lives.levels()
        during = lives.during(levels)
        first = self._forward
        whole = [n + trace.held_nbytes for n in during[:first]] + during[first:]
        if first:
            before = sum(level[first] for level in levels.values())
            whole[first - 1] = max(whole[first - 1], before + trace.held_nbytes + trace.unseen_nbytes)
        for position, most in self._coding(levels, whole).items():
            whole[position] = max(whole[position], most)
        asking = self._index.backward_asks
        asks = self._position[asking] if asking < self._index.ops else self._end
        return Profile(
            self._recompute,
            self._runs,
            tuple(during),
            tuple(whole),
            MappingProxyType(levels),
            first,
            self._moves,
            min((asks, *(run.position for run in self._again.values()))),
        )

    def _coding(self, levels: Mapping[Kind, tuple[int, ...]], whole: Sequence[int]) -> dict[int, int]:
        """The most bytes while something is encoded after the op at a position, or decoded before it.

        Encoding comes while all is there that the op has read and made. Decoding comes before the op; of what is asked
        for at once, one after the other in any order, all may be back when the last is decoded.
        """
        found: dict[int, int] = {}
        back: dict[int, int] = {}
        most: dict[int, int] = {}
        for move in self._moves:
            if move.asked != NEVER:
                back[move.asked] = back.get(move.asked, 0) + move.nbytes
            if move.codes is not None:
                found[move.made] = max(found.get(move.made, 0), whole[move.made] + move.codes.workspace)
                if move.asked != NEVER:
                    extra = move.codes.nbytes + move.codes.workspace
                    most[move.asked] = max(most.get(move.asked, 0), extra)
        copied = {run.position: self._index.copied_nbytes(place) for place, run in self._again.items()}
        for position, extra in most.items():
            before = sum(level[position] for level in levels.values()) + copied.get(position, 0)
            found[position] = max(found.get(position, 0), before + back[position] + extra)
        return found

    # Lives, with nothing treated.

    def _lives(self, number: int, root: Root) -> list[tuple[int, int]]:
        """From which to which position the bytes of ``root`` are live."""
        place, held = self._position, self._held.get(number, (NEVER, 0))[1]
        birth = place[root.birth]
        if root.completes != NEVER:
            return [(birth, max(birth, place[root.completes]))]
        again = self._again.get(root.visit)
        if again is None:
            unsaved = self._at(root.unsave) if root.saved else 0
            return [(birth, max(birth, self._at(root.drop), unsaved, held))]
        # The first copy is autograd's only where it is saved outside of the visit, the second where it is saved in it.
        first = max(birth, self._at(root.drop), held, 0 if root.released == NEVER else place[root.released])
        made = self._made_again(root)
        return [(birth, first)] if made is None else [(birth, first), made]

    def _made_again(self, root: Root) -> tuple[int, int] | None:
        """The life of what a recomputation makes; None for what is made after the last tensor was saved."""
        again = self._again.get(root.visit)
        if again is None or root.birth - again.first_op >= again.length:
            return None
        shift, stop = again.position - again.first_op, again.position + again.length - 1
        kept = 0 if root.spent == NEVER else self._position[root.spent]
        gone = min(root.drop + shift, stop) if self._index.is_internal(root) else stop
        return root.birth + shift, max(gone, kept)

    def _at(self, op: int) -> int:
        """The position of an op; the last for what is never over."""
        return self._end - 1 if op == NEVER else self._position[op]

    def _inputs_of_recomputed(self) -> dict[int, tuple[int, int]]:
        """From and until when each input of what is recomputed is held in backward: the checkpoint asks for it when the
        block runs again, and keeps it as long as backward has not let go of all that was saved in its region."""
        held: dict[int, tuple[int, int]] = {}
        for place, run in self._again.items():
            until = self._until(place)
            for root in self._index.kept(place):
                since, most = held.get(root, (run.position, until))
                held[root] = min(since, run.position), max(most, until)
        return held

    def _until(self, place: int) -> int:
        """The position after which backward has let go of all that was saved in a visit."""
        kept_until = self._index.trace.visits[place].kept_until
        return self._end - 1 if kept_until == NO_SAVES else self._position[kept_until]

    # Lives of what is treated.

    def _fates(self) -> tuple[frozenset[int], Mapping[int, int], tuple[Move, ...]]:
        """Which roots stay on the device because a recomputation does not make them, until when those that it would not
        come to, and which are moved or encoded."""
        kept: set[int] = set()
        late: dict[int, int] = {}
        moves: list[Move] = []
        for place, ops in sorted(self._treated.items()):
            again = self._again.get(place)
            for op, treatment in sorted(ops.items()):
                treats = self._treats(place, op, treatment)
                for order, number in enumerate(self._index.made_by(place, op)):
                    root = self._index.roots[number]
                    if number in treats and root.nbytes >= MOVED_LEAST:
                        what = described(self._block(place), treatment.op, treatment.occurrence, order)
                        moves.append(self._move(number, root, what, treatment))
                    elif again is not None and op < again.length:
                        kept.add(number)
                    elif self._block(place) in self._recompute:
                        # Nobody knew in forward that no more would be saved: it was held until that was over.
                        late[number] = self._position[self._index.last_op(place)]
        return frozenset(kept), late, tuple(moves)

    def _treats(self, place: int, op: int, treatment: Treatment) -> Collection[int]:
        """The roots of an op that do not stay as they are, if they are large enough. Of an op that makes what is true
        or false beside something else, a mask is of that alone."""
        made = self._index.made_by(place, op)
        if treatment.bits == MASK_BITS:
            return [root for root in made if self._index.dtype_of(root) == "bool"] or made
        return made if treatment.bits or treatment.fate is not Fate.KEEP else ()

    def _move(self, number: int, root: Root, what: str, treatment: Treatment) -> Move:
        made = self._made_again(root)
        since, held = self._held.get(number, (NEVER, NEVER))
        # What is saved in a block that recomputes is what was made again, and that comes first.
        saved = root.released if root.visit in self._again else root.unsave if root.saved else NEVER
        wanted = [] if since == NEVER else [(since, held)]
        if made is not None:
            wanted.append(made)
        if saved != NEVER:
            # Nothing may read it, if a node wanted its shape alone; it was asked for all the same.
            wanted.append((self._position[min(self._index.asked.get(number, saved), saved)], self._position[saved]))
        birth = self._position[root.birth]
        dropped = max(birth, self._at(root.drop))
        asked = min((start for start, _ in wanted), default=NEVER)
        last = self._index.ops - 1 if root.drop == NEVER else max(root.birth, root.drop)
        codes, until = None, dropped
        if treatment.bits:
            codes = Codes.of(root.nbytes, self._index.dtype_of(number), treatment.bits)
            # What nobody asks for is let go when forward is over.
            stay = (self._forward if asked == NEVER else asked) - 1
            last, until = root.birth, max(birth, stay if treatment.fate is Fate.KEEP else birth)
        return Move(
            root=number,
            nbytes=root.nbytes,
            kind=root.kind,
            visit=root.visit,
            block=self._block(root.visit),
            what=what,
            ops=(root.birth, 1 + last),
            made=birth,
            dropped=dropped,
            asked=asked,
            gone=max((end for _, end in wanted), default=NEVER),
            fate=treatment.fate,
            codes=codes,
            until=until,
        )

    def _block(self, place: int) -> str:
        return self._index.trace.visits[place].block


@final
class _Sums:
    """Adds up lives: bytes of every kind from one position to another, both included."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._made: dict[Kind, list[int]] = {}
        self._gone: dict[Kind, list[int]] = {}

    def add(self, kind: Kind, start: int, end: int, nbytes: int) -> None:
        """``nbytes`` of ``kind`` more."""
        if kind not in self._made:
            self._made[kind] = [0] * (self._end + 1)
            self._gone[kind] = [0] * (self._end + 1)
        self._made[kind][start] += nbytes
        self._gone[kind][end + 1] += nbytes

    def levels(self) -> dict[Kind, tuple[int, ...]]:
        """Of each kind the bytes before each position; what is made at one is there before the next."""
        shifted = {kind: [0, *made[:-1]] for kind, made in self._made.items()}
        return {kind: tuple(accumulate(map(int.__sub__, shifted[kind], self._gone[kind]))) for kind in self._made}

    def during(self, levels: Mapping[Kind, tuple[int, ...]]) -> list[int]:
        """The bytes of all kinds at each position; ``levels`` are those before it."""
        total = [0] * self._end
        for kind, level in levels.items():
            total = list(map(add, map(add, level, self._made[kind]), total))
        return total


def _add_move(lives: _Sums, move: Move) -> None:
    """What there is of a treated root, copies under way left out."""
    lives.add(move.kind, move.made, move.dropped, move.nbytes)
    if move.codes is not None:
        lives.add(Kind.ACTIVATION, move.made, move.until, move.codes.nbytes)
    if move.asked != NEVER:
        lives.add(Kind.ACTIVATION, move.asked, move.gone, move.nbytes)


def positions(runs: Sequence[Run], ops: int) -> list[int]:
    """The position of every op, by its number, where it runs for the first time."""
    found = [0] * ops
    for run in runs:
        if not run.again:
            found[run.first_op : run.first_op + run.length] = range(run.position, run.position + run.length)
    return found


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


def _is_backward(index: TraceIndex, run: Run) -> bool:
    return run.again or index.trace.visits[run.visit].phase is Phase.BACKWARD
