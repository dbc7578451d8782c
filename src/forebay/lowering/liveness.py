"""How many bytes a step's activations, temporaries and unfinished gradients take, op by op. No torch.

The device holds beside its arenas: roots of the trace from the op that makes them until nobody holds them any more,
and gradients that are complete and on their way to the host. The first part depends on the blocks that are
recomputed alone, the second on the window. That makes both cheap to work out for many plans: keep one ``Liveness`` for
a trace and ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from types import MappingProxyType
from typing import final

from forebay.arenas import arenas
from forebay.layout import STATE_ITEMSIZE, align, needs_master
from forebay.lowering.index import NEVER, Root, TraceIndex
from forebay.memory import ALIGNMENT, Kind
from forebay.plans import Placement, Plan, Streaming
from forebay.trace import NO_SAVES, Phase, Trace

__all__ = ["Liveness", "Profile", "Run", "device_bound", "input_nbytes", "updating_nbytes"]


@dataclass(frozen=True, slots=True)
class Run:
    """Ops that run one after the other: those of visit ``visit`` (its place in the trace), once more if ``again``: then
    only up to the last tensor that the visit saves, which may be none of them.

    ``position`` is that of its first op in the step: with recomputation, positions and numbers of ops differ.
    """

    visit: int
    first_op: int
    length: int
    position: int
    again: bool


@dataclass(frozen=True)
class Profile:
    """Bytes of one micro-batch, position by position, with the blocks of ``recompute`` recomputed.

    ``during[p]`` are the bytes live while the op at p runs, ``levels[kind][p]`` those of a kind before it (one more
    entry than there are positions: the end). A gradient counts until it is complete. The first ``forward`` positions
    are those of the forward pass. ``with_outputs`` is ``during`` and what the trace's own figures add in forward:
    outputs of the pass before, a loss outside of the model.
    """

    recompute: frozenset[str]
    runs: tuple[Run, ...]
    during: tuple[int, ...]
    with_outputs: tuple[int, ...]
    levels: Mapping[Kind, tuple[int, ...]]
    forward: int

    @property
    def peak(self) -> int:
        """The most bytes at any time, nothing of them on its way to the host."""
        return max(self.with_outputs, default=0)


@final
class Liveness:
    """The bytes of a trace's step under any plan. Profiles are kept: the second question costs nothing.

    A profile is that of the trace itself. What is promised, ``beside``, is the most of it and of ``extremes``, the same
    of each of ``Trace.extremes``.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.extremes = tuple(Liveness(extreme) for extreme in trace.extremes)
        self.index = TraceIndex(trace)
        self._profiles: dict[frozenset[str], Profile] = {}

    def profile(self, recompute: Iterable[str] = ()) -> Profile:
        """Bytes op by op with the blocks named recomputed."""
        names = frozenset(recompute)
        if names not in self._profiles:
            self._profiles[names] = _Layout(self.index, names).profile()
        return self._profiles[names]

    def saved_nbytes(self) -> dict[str, int]:
        """Bytes from forward to backward that recomputing each block would spare, by its name."""
        spared: dict[str, int] = {}
        for root in self.index.roots.values():
            block = self.index.trace.visits[root.visit].block
            if block and root.saved and root.unsave != NEVER and self.index.is_internal(root):
                spared[block] = spared.get(block, 0) + root.nbytes
        return spared

    def beside(self, recompute: Iterable[str], hosted: Iterable[str], window: int) -> int:
        """The most bytes on the device beside arenas, buffers and inputs, whatever the timing and the routes.

        ``hosted`` are the blocks whose gradients go to the host; at most ``window`` bytes of those are under way
        while an op runs (``scheduling.gradients``), no more than the pass has made so far, and none of the pass
        before.
        """
        blocks, names = frozenset(recompute), frozenset(hosted)
        others = (one._beside(blocks, names, window, self._not_in(one, names)) for one in self.extremes)
        return max((self._beside(blocks, names, window, 0), *others))

    def _not_in(self, other: Liveness, names: frozenset[str]) -> int:
        """Bytes of gradients of blocks ``names`` that are complete here and never in ``other``: an expert that no row
        goes to there may have one, and with it gradients, in a routing that takes as much otherwise."""
        done = {c.parameter for visit in other.index.completed for c in visit}
        own = {c.parameter for visit in self.index.completed for c in visit} - done
        return sum(self.trace.sources[p].nbytes for p in own if self.index.blocks[p] in names)

    def _beside(self, recompute: frozenset[str], names: frozenset[str], window: int, missing: int) -> int:
        """As ``beside``, of this trace alone; ``missing`` bytes of gradients more, once the first one is complete."""
        profile = self.profile(recompute)
        landing = sorted((c for visit in self.index.completed for c in visit), key=lambda c: c.op)
        landing = [c for c in landing if self.index.blocks[c.parameter] in names]
        if not landing or window <= 0:
            return profile.peak
        sizes = [self.trace.sources[c.parameter].nbytes for c in landing]
        # A root may be larger than the gradient in it; the window counts the gradient.
        roots = [self.index.roots[c.root].nbytes if c.root in self.index.roots else 0 for c in landing]
        excess = sum(max(0, root - size) for root, size in zip(roots, sizes, strict=True))
        positions = _positions(profile.runs, self.index.ops)
        most, under_way, reach = 0, 0, 0
        for done, size in zip(landing, sizes, strict=True):
            here = positions[done.op] + 1
            live = max(profile.with_outputs[reach:here], default=0)
            most = max(most, live + (min(under_way, window) + excess if under_way else 0))
            under_way, reach = under_way + size + (0 if under_way else missing), max(reach, here)
        return max(most, max(profile.with_outputs[reach:], default=0) + min(under_way, window) + excess)


@final
class _Layout:
    """The order of a step with recomputation, and the lives of its roots in it."""

    def __init__(self, index: TraceIndex, recompute: frozenset[str]) -> None:
        self._index = index
        self._recompute = recompute
        self._again: dict[int, Run] = {}
        runs: list[Run] = []
        triggers = index.triggers(index.partners(recompute))
        position = 0
        for place, visit in enumerate(index.trace.visits):
            for earlier in triggers.get(place, ()):
                first, length = index.trace.visits[earlier].first_op, index.length_again(earlier)
                self._again[earlier] = Run(earlier, first, length, position, again=True)
                runs.append(self._again[earlier])
                position += length
            runs.append(Run(place, visit.first_op, index.length(place), position, again=False))
            position += runs[-1].length
        self._runs = tuple(runs)
        self._end = position
        self._position = _positions(self._runs, index.ops)

    def profile(self) -> Profile:
        """Adds up the lives."""
        trace = self._index.trace
        made: dict[Kind, list[int]] = {}
        gone: dict[Kind, list[int]] = {}
        held = self._inputs_of_recomputed()
        for number, root in self._index.roots.items():
            if root.kind not in made:
                made[root.kind] = [0] * (self._end + 1)
                gone[root.kind] = [0] * (self._end + 1)
            up, down = made[root.kind], gone[root.kind]
            for start, end in self._lives(root, held.get(number, 0)):
                up[start] += root.nbytes
                down[end + 1] += root.nbytes
        for place, run in self._again.items():
            nbytes = self._index.copied_nbytes(place)
            if nbytes:
                up, down = (table.setdefault(Kind.TEMPORARY, [0] * (self._end + 1)) for table in (made, gone))
                up[run.position] += nbytes
                down[self._until(place) + 1] += nbytes
        levels = {kind: tuple(accumulate(map(int.__sub__, _shifted(made[kind]), gone[kind]))) for kind in made}
        during = [0] * self._end
        for kind, level in levels.items():
            during = list(map(add, map(add, level, made[kind]), during))
        first = next((r.position for r in self._runs if _is_backward(self._index, r)), self._end)
        whole = [n + trace.held_nbytes for n in during[:first]] + during[first:]
        if first:
            before = sum(level[first] for level in levels.values())
            whole[first - 1] = max(whole[first - 1], before + trace.held_nbytes + trace.unseen_nbytes)
        kinds = MappingProxyType(levels)
        return Profile(self._recompute, self._runs, tuple(during), tuple(whole), kinds, first)

    def _lives(self, root: Root, held: int) -> list[tuple[int, int]]:
        """From which to which position the bytes of ``root`` are live; ``held``: the input of a recomputation."""
        place, index = self._position, self._index
        last = self._end - 1
        birth = place[root.birth]
        if root.completes != NEVER:
            return [(birth, max(birth, place[root.completes]))]
        dropped = last if root.drop == NEVER else place[root.drop]
        unsaved = (last if root.unsave == NEVER else place[root.unsave]) if root.saved else 0
        again = self._again.get(root.visit)
        if again is None:
            return [(birth, max(birth, dropped, unsaved, held))]
        shift = again.position - again.first_op
        # The first copy is autograd's only where it is saved outside of the visit, the second where it is saved in it.
        first = max(birth, dropped, held, 0 if root.released == NEVER else place[root.released])
        stop = again.position + again.length - 1
        if root.birth + shift > stop:
            return [(birth, first)]  # made after the last tensor was saved: not made again
        kept = 0 if root.spent == NEVER else place[root.spent]
        gone = min(root.drop + shift, stop) if index.is_internal(root) else stop
        return [(birth, first), (root.birth + shift, max(gone, kept))]

    def _inputs_of_recomputed(self) -> dict[int, int]:
        """Until when each input of what is recomputed is held: the checkpoint keeps it as long as backward has not let
        go of all that was saved in its region."""
        held: dict[int, int] = {}
        for place in self._again:
            until = self._until(place)
            for root in self._index.kept(place):
                held[root] = max(held.get(root, 0), until)
        return held

    def _until(self, place: int) -> int:
        """The position after which backward has let go of all that was saved in a visit."""
        kept_until = self._index.trace.visits[place].kept_until
        return self._end - 1 if kept_until == NO_SAVES else self._position[kept_until]


def _positions(runs: tuple[Run, ...], ops: int) -> list[int]:
    """The position of every op, by its number, where it runs for the first time."""
    positions = [0] * ops
    for run in runs:
        if not run.again:
            positions[run.first_op : run.first_op + run.length] = range(run.position, run.position + run.length)
    return positions


def _is_backward(index: TraceIndex, run: Run) -> bool:
    return run.again or index.trace.visits[run.visit].phase is Phase.BACKWARD


def _shifted(made: list[int]) -> list[int]:
    """What is made at a position is there before the next one."""
    return [0, *made[:-1]]


def input_nbytes(trace: Trace) -> int:
    """Bytes of the inputs on the device: on ``cpu`` they are the host's."""
    return sum(t.nbytes for t in trace.sources if t.kind is Kind.INPUT) if trace.device == "cuda" else 0


def device_bound(trace: Trace, plan: Plan, *, liveness: Liveness | None = None) -> int:
    """Bytes that the device holds at most under ``plan``, whatever the timing and the routes: arenas, buffers, inputs,
    and the most that activations and gradients under way take together. ``liveness`` is that of the trace, if the
    caller has it.
    """
    liveness = liveness or Liveness(trace)
    sizes = arenas(trace.model, plan.placements, plan.streaming, trace.state_names)
    hosted = [p.block for p in plan.placements if not p.resident]
    window = plan.streaming.gradient_window
    beside = liveness.beside(plan.recompute, hosted, window)
    updating = updating_nbytes(trace, plan.placements, plan.streaming)
    return sizes.device + trace.model.buffer_nbytes + input_nbytes(trace) + max(beside, updating)


def updating_nbytes(trace: Trace, placements: Iterable[Placement], streaming: Streaming) -> int:
    """The most bytes beside the arenas while resident blocks are updated: 16-bit gradients widened to fp32, chunk by
    chunk, outputs of the pass, gradients under way."""
    most = align(streaming.update_chunk, ALIGNMENT // STATE_ITEMSIZE)
    resident = {p.block for p in placements if p.resident}
    narrow = [sum(p.numel for p in b.parameters if needs_master(p)) for b in trace.model.blocks if b.name in resident]
    widened = STATE_ITEMSIZE * min(most, max(narrow, default=0))
    hosted = sum(b.gradient_nbytes for b in trace.model.blocks if b.name not in resident)
    return trace.held_nbytes + widened + min(streaming.gradient_window, hosted) if widened else 0
