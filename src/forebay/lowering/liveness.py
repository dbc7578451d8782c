"""How many bytes a step's activations, temporaries and unfinished gradients take, op by op. No torch.

The device holds beside its arenas: roots of the trace from the op that makes them until nobody holds them any more,
gradients that are complete and on their way to the host, and activations that are on their way there or back ahead of
time. The first part depends on what is recomputed and moved alone (``lives``), the others on the windows. That makes
both cheap to work out for many plans: keep one ``Liveness`` for a trace and ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, repeat
from operator import add
from typing import final

from forebay.arenas import arenas
from forebay.layout import STATE_ITEMSIZE, align, needs_master
from forebay.lowering.index import NEVER, TraceIndex
from forebay.lowering.lives import Layout, Profile, positions
from forebay.memory import ALIGNMENT, Kind
from forebay.plans import Fate, Placement, Plan, Selection, Streaming
from forebay.scheduling.activations import disk_nbytes, host_nbytes
from forebay.trace import Trace

__all__ = ["Liveness", "device_bound", "input_nbytes", "updating_nbytes"]


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
        self._profiles: dict[tuple[frozenset[str], tuple[Selection, ...]], Profile] = {}

    def profile(self, recompute: Iterable[str] = (), activations: tuple[Selection, ...] = ()) -> Profile:
        """Bytes op by op with the blocks named recomputed, and single ops treated as ``activations`` say. A routing
        that does not have an op which is named there has nothing to treat."""
        key = frozenset(recompute), activations
        if key not in self._profiles:
            self._profiles[key] = Layout(self.index, *key).profile()
        return self._profiles[key]

    def host_activations(self, recompute: Iterable[str], activations: tuple[Selection, ...]) -> int:
        """Bytes of the arena on the host that holds all that one micro-batch moves there, whatever the routes."""
        moves = self.profile(recompute, activations).moves
        others = (one.host_activations(recompute, activations) for one in self.extremes)
        return max((sum(host_nbytes(move.moved) for move in moves if move.fate is Fate.OFFLOAD), *others))

    def disk_activations(self, recompute: Iterable[str], activations: tuple[Selection, ...]) -> int:
        """Bytes of the file that holds all that one micro-batch moves to disk, whatever the routes."""
        moves = self.profile(recompute, activations).moves
        others = (one.disk_activations(recompute, activations) for one in self.extremes)
        return max((sum(disk_nbytes(move.moved) for move in moves if move.fate is Fate.DISK), *others))

    def disk_window(self, recompute: Iterable[str], activations: tuple[Selection, ...]) -> int:
        """Bytes of the smallest ring through which all that goes to disk can pass, whatever the routes."""
        moves = self.profile(recompute, activations).moves
        others = (one.disk_window(recompute, activations) for one in self.extremes)
        return max((0, *(disk_nbytes(move.moved) for move in moves if move.fate is Fate.DISK), *others))

    def saved_nbytes(self) -> dict[str, int]:
        """Bytes from forward to backward that recomputing each block would spare, by its name."""
        spared: dict[str, int] = {}
        for root in self.index.roots.values():
            block = self.index.trace.visits[root.visit].block
            if block and root.saved and root.unsave != NEVER and self.index.is_internal(root):
                spared[block] = spared.get(block, 0) + root.nbytes
        return spared

    def beside(
        self,
        recompute: Iterable[str],
        hosted: Iterable[str],
        streaming: Streaming,
        activations: tuple[Selection, ...] = (),
    ) -> int:
        """The most bytes on the device beside arenas, buffers and inputs, whatever the timing and the routes.

        ``hosted`` are the blocks whose gradients go to the host; at most ``streaming.gradient_window`` bytes of those
        are under way while an op runs (``scheduling.window``), no more than the pass has made so far, and none of
        the pass before. Of activations that move, ``offload_window`` and ``reload_window`` bytes are there beside those
        that somebody holds (``scheduling.activations``).
        """
        blocks, names = frozenset(recompute), frozenset(hosted)
        own = self._beside(self.profile(blocks, activations), names, streaming, 0)
        others = (
            one._beside(one.profile(blocks, activations), names, streaming, self._not_in(one, names))
            for one in self.extremes
        )
        return max((own, *others))

    def _not_in(self, other: Liveness, names: frozenset[str]) -> int:
        """Bytes of gradients of blocks ``names`` that are complete here and never in ``other``: an expert that no row
        goes to there may have one, and with it gradients, in a routing that takes as much otherwise."""
        done = {c.parameter for visit in other.index.completed for c in visit}
        own = {c.parameter for visit in self.index.completed for c in visit} - done
        return sum(self.trace.sources[p].nbytes for p in own if self.index.blocks[p] in names)

    def _beside(self, profile: Profile, names: frozenset[str], streaming: Streaming, missing: int) -> int:
        """As ``beside``, of this trace alone; ``missing`` bytes of gradients more, once the first one is complete."""
        window, bytes_at = streaming.gradient_window, _with_moves(profile, streaming)
        landing = sorted((c for visit in self.index.completed for c in visit), key=lambda c: c.op)
        landing = [c for c in landing if self.index.blocks[c.parameter] in names]
        if not landing or window <= 0:
            return max(bytes_at, default=0)
        sizes = [self.trace.sources[c.parameter].nbytes for c in landing]
        # A root may be larger than the gradient in it; the window counts the gradient.
        roots = [self.index.roots[c.root].nbytes if c.root in self.index.roots else 0 for c in landing]
        excess = sum(max(0, root - size) for root, size in zip(roots, sizes, strict=True))
        place = positions(profile.runs, self.index.ops)
        most, under_way, reach = 0, 0, 0
        for done, size in zip(landing, sizes, strict=True):
            here = place[done.op] + 1
            live = max(bytes_at[reach:here], default=0)
            most = max(most, live + (min(under_way, window) + excess if under_way else 0))
            under_way, reach = under_way + size + (0 if under_way else missing), max(reach, here)
        return max(most, max(bytes_at[reach:], default=0) + min(under_way, window) + excess)


def _with_moves(profile: Profile, streaming: Streaming) -> Sequence[int]:
    """The most bytes at each position with activations under way, gradients left out.

    Until backward asks for the first one, of those that Python has let go at most ``offload_window`` bytes are still on
    the device, on their way to the host: when a copy is queued compute waits until no more are. From the first position
    of backward on, of those that were not asked for yet at most ``reload_window`` bytes are there.
    """
    if not profile.moves:
        return profile.with_outputs
    end = len(profile.with_outputs)
    gone, asked = [0] * (end + 1), [0] * (end + 1)
    for move in (one for one in profile.moves if one.leaves):
        gone[move.until + 1] += move.moved
        if move.asked != NEVER:
            asked[move.asked] -= move.moved
    # Of each position: the bytes that forward has let go, those that backward has not asked for.
    let_go, waiting = accumulate(gone), accumulate(asked, initial=-sum(asked))
    leaving = list(map(min, islice(let_go, profile.asking + 1), repeat(streaming.offload_window)))
    coming = list(map(min, islice(waiting, profile.forward + 1, None), repeat(streaming.reload_window)))
    leaving += [0] * (end - len(leaving))
    coming = [0] * profile.forward + coming
    return list(map(add, profile.with_outputs, map(max, leaving, coming)))


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
    beside = liveness.beside(plan.recompute, hosted, plan.streaming, plan.activations)
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
