"""What the runtime will do in each run of a step, found once: the same in every pass of every step. No torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from forebay.lowering.arrangement import Run
from forebay.lowering.index import NEVER, Completed, TraceIndex
from forebay.lowering.lives import Move, Profile
from forebay.program import Change
from forebay.trace import Phase

__all__ = ["Cut", "Grain", "Landing", "Stage", "Stages", "Stop", "UsedUp"]


@dataclass(frozen=True, slots=True)
class Grain:
    """What is taken for one by who only compares seconds, in bytes. Gradients of a block until they have ``gradients``,
    as if they left when the last of them is made; activations next to each other of one visit up to ``activations``,
    as if they left when the last of them is sent and came back when the first of them is asked for. With 0 each moves
    by itself. Compute is not cut where something only goes."""

    gradients: int = 0
    activations: int = 0


class Landing(NamedTuple):
    """A gradient that leaves for the host when it is complete. ``frees`` is what that frees on the device; ``pieces``
    are the bytes of each, where several are taken for one."""

    block: str
    place: int
    name: str
    nbytes: int
    frees: tuple[Change, ...]
    pieces: tuple[int, ...] = ()


class UsedUp(NamedTuple):
    """All gradients of a resident block are complete, and its update in backward lets go of their ``nbytes``."""

    block: str
    nbytes: int


class Stop(NamedTuple):
    """What happens around one op of a backward visit: blocks are asked for before it, gradients leave after it, and
    ``kept`` bytes of gradients of resident blocks are complete, those in ``ending`` all of them."""

    position: int
    blocks: tuple[str, ...]
    landings: tuple[Landing, ...]
    kept: int
    ending: tuple[UsedUp, ...] = ()


class Cut(NamedTuple):
    """Compute is cut before the op at ``position``: what is sent behind the one before is ``leaving``, what this one
    reads is ``asked`` for. With neither, what was moved may go, or an op is left out that a recomputation does not
    run."""

    position: int
    leaving: tuple[Move, ...]
    asked: tuple[Move, ...]


class Stage(NamedTuple):
    """A run and what to do in it. Forward: ``opened`` blocks are there from its beginning to its end, those in
    ``around`` (held ones) go on being there for the next run that they are around of; a recomputation asks for what it
    is ``given`` before that. Backward: ``stops``. Both: ``cuts``."""

    run: Run
    what: str
    block: str
    forward: bool
    around: tuple[str, ...]
    opened: tuple[str, ...]
    stops: tuple[Stop, ...]
    given: tuple[Move, ...]
    cuts: tuple[Cut, ...]


@final
class Stages:
    """Finds what the runtime will do in each run of ``profile``; ``hosted`` are the blocks that are not resident,
    those ``in_backward`` are, and use their gradients up. ``grain`` None: as it does it, one after the other."""

    def __init__(
        self,
        index: TraceIndex,
        profile: Profile,
        hosted: Collection[str],
        in_backward: Collection[str] = (),
        grain: Grain | None = None,
    ) -> None:
        trace = self._trace = index.trace
        self._index = index
        self._runs = profile.runs
        # By the position of the op before or after which compute is cut.
        self._sent: dict[int, list[Move]] = defaultdict(list)
        self._asked: dict[int, list[Move]] = defaultdict(list)
        self._dropped = set() if grain else {move.until for move in profile.moves if move.codes is None}
        for move in _gathered(profile.moves, grain.activations) if grain else profile.moves:
            self._sent[move.sent].append(move)
            self._asked[move.asked].insert(0, move)  # backward asks in reverse order
        skipped = (run.position + op for run in profile.runs for op in run.skipped)
        after = (position + 1 for position in (*self._sent, *self._dropped))
        self._at = sorted({*after, *self._asked, *skipped})  # where compute may be cut
        self._hosted = hosted
        self._together = grain.gradients if grain else 0
        self._held = {b.name: b.modules for b in trace.model.blocks if b.held and b.name in hosted}
        self._modules = {b.name: b.modules for b in trace.model.blocks}
        self._order = {b.name: i for i, b in enumerate(trace.model.blocks)}
        self._last: dict[int, Completed] = {}
        self._ends: dict[str, Completed] = {}
        for done in sorted((c for visit in self._index.completed for c in visit), key=lambda c: c.op):
            self._last[done.root] = done  # of two gradients in one root, the last one frees it
            self._ends[index.blocks[done.parameter]] = done
        self._used_up = dict.fromkeys(in_backward, 0)
        for root, done in self._last.items():
            if index.blocks[done.parameter] in self._used_up and root in index.roots:
                self._used_up[index.blocks[done.parameter]] += index.roots[root].nbytes

    def all(self) -> list[Stage]:
        """One stage for each run."""
        stages = []
        around_of = self._around()
        for place, run in enumerate(self._runs):
            visit = self._trace.visits[run.visit]
            forward = visit.phase is Phase.FORWARD
            around = tuple(held for held, span in around_of.items() if place in span)
            reads = [read for read in self._index.block_reads(run.visit) if read[0] < run.length]
            verb = "recompute" if run.again else visit.phase.value
            stages.append(
                Stage(
                    run=run,
                    what=f"{verb} {visit.block}".rstrip(),
                    block=visit.block,
                    forward=forward,
                    around=around,
                    opened=self._opened(visit.block, reads, around) if forward else (),
                    stops=() if forward else self._stops(run, reads),
                    given=self._given(run),
                    cuts=self._cuts(run),
                )
            )
        return stages

    def _around(self) -> dict[str, range]:
        """Held blocks, the outermost first, each with the runs during which its modules' forward goes on: from the
        first to the last that they enclose or that reads its parameters. A block of which they enclose one module and
        not another (a tied embedding, which the head has too) does not tell which of the two it is that runs."""
        spans: dict[str, range] = {}
        for place, run in enumerate(self._runs):
            visit = self._trace.visits[run.visit]
            if visit.phase is not Phase.FORWARD or run.again:
                continue
            reads = {block for _, block in self._index.block_reads(run.visit)}
            for held, modules in self._held.items():
                inner = self._modules.get(visit.block, ())
                enclosed = inner and all(any(_inside(m, outer) for outer in modules) for m in inner)
                if held == visit.block or held in reads or enclosed:
                    spans[held] = range(spans[held].start if held in spans else place, place + 1)
        return dict(sorted(spans.items(), key=lambda item: min(map(len, self._held[item[0]]))))

    def _opened(self, block: str, reads: list[tuple[int, str]], around: tuple[str, ...]) -> tuple[str, ...]:
        """The blocks whose parameters a module asks for, in the order of the model."""
        names = {name for _, name in reads if name in self._hosted}
        if block in self._hosted:
            names.add(block)
        return tuple(sorted(names.difference(around), key=self._order.__getitem__))

    def _stops(self, run: Run, reads: list[tuple[int, str]]) -> tuple[Stop, ...]:
        asked: dict[int, list[str]] = defaultdict(list)
        for op, block in reads:
            if block in self._hosted:
                asked[op].append(block)
        leaving: dict[int, list[Landing]] = defaultdict(list)
        kept: dict[int, int] = defaultdict(int)
        away: list[Completed] = []
        staying: list[Completed] = []
        for done in self._index.completed[run.visit]:
            (away if self._leaves(done) else staying).append(done)
        for done, landing in self._landings(away):
            leaving[done.op - run.first_op].append(landing)
        for done in staying:
            if self._last[done.root] == done and done.root in self._index.roots:
                kept[done.op - run.first_op] += self._index.roots[done.root].nbytes
        ending = self._ending(run, staying)
        return tuple(
            Stop(
                run.position + op,
                tuple(asked.get(op, ())),
                tuple(leaving.get(op, ())),
                kept.get(op, 0),
                tuple(ending.get(op, ())),
            )
            for op in sorted(asked.keys() | leaving.keys() | kept.keys() | ending.keys())
        )

    def _ending(self, run: Run, staying: Iterable[Completed]) -> Mapping[int, list[UsedUp]]:
        """By op of ``run``, the blocks whose last gradient is complete behind it and which use them up."""
        found: dict[int, list[UsedUp]] = defaultdict(list)
        for done in staying:
            block = self._index.blocks[done.parameter]
            if block in self._used_up and self._ends[block] == done:
                found[done.op - run.first_op].append(UsedUp(block, self._used_up[block]))
        return found

    def _given(self, run: Run) -> tuple[Move, ...]:
        """What a recomputation is given and has to have before it begins."""
        return tuple(m for m in self._asked.get(run.position, ()) if run.again and m.visit != run.visit)

    def _cuts(self, run: Run) -> tuple[Cut, ...]:
        cuts = []
        first, last = bisect_left(self._at, run.position), bisect_right(self._at, run.position + run.length)
        for at in self._at[first:last]:
            before, here = at > run.position, at < run.position + run.length
            leaving = self._sent.get(at - 1, ()) if before else ()
            asked = self._asked.get(at, ()) if here else ()
            skips = here and at - run.position in run.skipped
            if leaving or asked or skips or (before and at - 1 in self._dropped):
                cuts.append(Cut(at, tuple(leaving), tuple(asked)))
        return tuple(cuts)

    def _landings(self, leaving: Sequence[Completed]) -> Iterator[tuple[Completed, Landing]]:
        """The landings of one run, ``leaving`` in the order in which they are made, each with its last gradient."""
        last = {self._index.blocks[done.parameter]: done for done in leaving}
        waiting: dict[str, list[Completed]] = defaultdict(list)
        for done in leaving:
            block = self._index.blocks[done.parameter]
            waiting[block].append(done)
            if last[block] is done or self._nbytes(waiting[block]) >= self._together:
                yield done, self._landing(block, waiting.pop(block))

    def _leaves(self, done: Completed) -> bool:
        return self._index.blocks[done.parameter] in self._hosted

    def _nbytes(self, gradients: Sequence[Completed]) -> int:
        return sum([self._trace.sources[done.parameter].nbytes for done in gradients])

    def _landing(self, block: str, gradients: Sequence[Completed]) -> Landing:
        """That of some ``gradients`` of ``block``, one or more, under the name of the last."""
        index, parameter = self._index, gradients[-1].parameter
        last = [done.root for done in gradients if self._last[done.root] is done]
        return Landing(
            block,
            index.places[parameter],
            index.names[parameter],
            self._nbytes(gradients),
            tuple([Change(index.roots[r].kind, -index.roots[r].nbytes) for r in last if r in index.roots]),
            tuple([self._trace.sources[done.parameter].nbytes for done in gradients]) if len(gradients) > 1 else (),
        )


def _gathered(moves: Iterable[Move], nbytes: int) -> Iterator[Move]:
    """``moves``, in the order in which they leave, those of one visit that are next to each other as one of up to
    ``nbytes``."""
    gathered: Move | None = None
    for move in moves:
        if gathered is None:
            gathered = move
        elif gathered.nbytes + move.nbytes <= nbytes and _go_together(gathered, move):
            gathered = _with(gathered, move)
        else:
            yield gathered
            gathered = move
    if gathered is not None:
        yield gathered


def _go_together(one: Move, other: Move) -> bool:
    """Whether both are whole, and the same is done with them."""
    made = one.stand_in.is_made or other.stand_in.is_made
    return not made and one.visit == other.visit and one.fate is other.fate and NEVER not in (one.asked, other.asked)


def _with(move: Move, later: Move) -> Move:
    """``move`` and one that leaves ``later`` as one."""
    both = move.stand_in, later.stand_in
    nbytes, treated = sum(one.nbytes for one in both), sum(one.treated for one in both)
    return replace(
        later,
        nbytes=nbytes,
        ops=(move.ops[0], max(move.ops[1], later.ops[1])),
        dropped=max(move.dropped, later.dropped),
        asked=min(move.asked, later.asked),
        gone=max(move.gone, later.gone),
        stand_in=replace(later.stand_in, nbytes=nbytes, treated=treated),
        until=max(move.until, later.until),
        rest_until=max(move.rest_until, later.rest_until),
        pieces=(*(move.pieces or (move.moved,)), later.moved),
    )


def _inside(module: str, outer: str) -> bool:
    return not outer or module.startswith(f"{outer}.")
