"""How many bytes a step's activations, temporaries and unfinished gradients take, op by op. No torch.

The device holds beside its arenas: roots of the trace from the op that makes them until nobody holds them any more,
gradients that are complete and on their way to the host, and activations that are on their way there or back ahead of
time. The first part depends on what is recomputed and moved alone (``lives``), the others on the windows. That makes
both cheap to work out for many plans: keep one ``Liveness`` for a trace and ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, final

from forebay.arenas import arenas_of
from forebay.layout import chunk_elements
from forebay.lowering.arrangement import Arrangement
from forebay.lowering.columns import Columns
from forebay.lowering.index import NEVER, TraceIndex
from forebay.lowering.jobs import Jobs
from forebay.lowering.lives import Layout, Profile
from forebay.lowering.stages import Grain, Stage, Stages
from forebay.lowering.transit import Landings, Transit
from forebay.model import Block
from forebay.plans import Placement, Plan, Streaming, Update, used_up
from forebay.scheduling.activations import disk_nbytes, host_nbytes
from forebay.trace import Trace
from forebay.treatments import Fate, Selection
from forebay.workspaces import widened_copies, workspace_nbytes

__all__ = ["Liveness", "device_bound", "update_workspaces", "updating_nbytes"]

STAGES = 8
"""Plans whose stages are kept: a search turns among a few that differ in them."""

PROFILES = 64
"""Profiles that are kept, and what they follow from: one of 6,184 positions is 1.4 MiB. Of seven searches none asked
for one again that was more than 40 back (docs/log.md)."""

Value = TypeVar("Value")


@final
class _Latest(Generic[Value]):
    """The ``most`` values that were asked for last, by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made if it is not there."""
        value = self._values.pop(key) if key in self._values else make()
        while len(self._values) >= self._most:
            del self._values[next(iter(self._values))]
        self._values[key] = value  # behind all others
        return value


@final
class Liveness:
    """The bytes of a trace's step under any plan. The latest profiles are kept: the second question costs nothing.

    A profile is that of the trace itself. What is promised, ``beside``, is the most of it and of ``extremes``, the same
    of each of ``Trace.extremes``.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.extremes = tuple(Liveness(extreme) for extreme in trace.extremes)
        self.index = TraceIndex(trace)
        self.jobs = Jobs(trace)
        self._columns = Columns(self.index)
        self._landings = Landings(self.index)
        self._arrangements = _Latest[Arrangement](PROFILES)
        self._profiles = _Latest[Profile](PROFILES)
        self._transits = _Latest[Transit](PROFILES)
        self._stages = _Latest[Sequence[Stage]](STAGES)

    def profile(self, recompute: Iterable[str] = (), activations: tuple[Selection, ...] = ()) -> Profile:
        """Bytes op by op with the blocks named recomputed, and single ops treated as ``activations`` say. A routing
        that does not have an op which is named there has nothing to treat."""
        again = frozenset(recompute)

        def made() -> Profile:
            return Layout(self.arrangement(again), activations).profile()

        return self._profiles.get((again, activations), made)

    def arrangement(self, recompute: frozenset[str]) -> Arrangement:
        """The order of the step with the blocks named recomputed."""
        return self._arrangements.get(recompute, lambda: Arrangement(self.index, self._columns, recompute))

    def stages(
        self,
        recompute: Iterable[str],
        activations: tuple[Selection, ...],
        hosted: frozenset[str],
        in_backward: frozenset[str] = frozenset(),
        grain: Grain | None = None,
    ) -> Sequence[Stage]:
        """What the runtime will do in each run of a step in which gradients of the blocks ``hosted`` leave, and those
        of others are used up ``in_backward``, as coarse as ``grain`` says (``Stages``). Some of the latest are kept:
        plans that differ in windows or updates alone have the same."""
        again = frozenset(recompute)

        def made() -> Sequence[Stage]:
            return Stages(self.index, self.profile(again, activations), hosted, in_backward, grain).all()

        return self._stages.get((again, activations, hosted, in_backward, grain), made)

    def _transit(self, recompute: frozenset[str], activations: tuple[Selection, ...]) -> Transit:
        def made() -> Transit:
            return Transit(self.profile(recompute, activations), self.index.ops)

        return self._transits.get((recompute, activations), made)

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
        accumulates: bool = True,
        in_backward: Iterable[str] = (),
    ) -> int:
        """The most bytes on the device beside arenas, buffers and inputs, whatever the timing and the routes.

        ``hosted`` are the blocks whose gradients go to the host; of all others they stay, or are used up by an
        update of the block ``in_backward``, as soon as the last of them is complete. At most
        ``streaming.gradient_window`` bytes of those that go are under way while an op runs (``scheduling.window``), no
        more than the pass has made so far, and none of the pass before. Of activations that move, ``offload_window``
        and ``reload_window`` bytes are there beside those that somebody holds (``scheduling.activations``). Without
        ``accumulates`` a pass finds no gradient when it begins: until one that stays is complete, its place in the
        arenas is room for what else is there.
        """
        blocks, names = frozenset(recompute), frozenset(hosted)
        updating = {name: _workspace(self.trace, self.trace.model.block(name), streaming) for name in in_backward}
        staying = frozenset(self.index.blocks) - names - updating.keys()
        found = []
        for one in (self, *self.extremes):
            missing, transit = 0 if one is self else self._not_in(one, names), one._transit(blocks, activations)
            found.append(transit.most(streaming, one._landings, names, missing, staying, updating, accumulates))
        return max(found)

    def _not_in(self, other: Liveness, names: frozenset[str]) -> int:
        """Bytes of gradients of blocks ``names`` that are complete here and never in ``other``: an expert that no row
        goes to there may have one, and with it gradients, in a routing that takes as much otherwise."""
        done = {c.parameter for visit in other.index.completed for c in visit}
        own = {c.parameter for visit in self.index.completed for c in visit} - done
        return sum(self.trace.sources[p].nbytes for p in own if self.index.blocks[p] in names)


def device_bound(trace: Trace, plan: Plan, *, liveness: Liveness | None = None) -> int:
    """Bytes that the device holds at most under ``plan``, whatever the timing and the routes: arenas, buffers, inputs,
    workspaces, and the most that activations and gradients under way take together. ``liveness`` is that of the trace,
    if the caller has it.
    """
    liveness = liveness or Liveness(trace)
    sizes = arenas_of(trace.model, plan, trace.state_names)
    hosted = [p.block for p in plan.placements if not p.resident]
    in_backward = used_up(plan.placements, resident=True)
    how = plan.streaming, plan.activations, plan.accumulates, in_backward
    beside = liveness.beside(plan.recompute, hosted, *how)
    updating = updating_nbytes(trace, plan.placements, plan.streaming)
    return sizes.device + trace.outside_nbytes + max(beside, updating)


def updating_nbytes(trace: Trace, placements: Iterable[Placement], streaming: Streaming) -> int:
    """The most bytes beside the arenas while resident blocks are updated whose step has been asked for: what that takes
    of one of them (``_workspace``), outputs of the pass, gradients under way."""
    placements = tuple(placements)
    stepping = {p.block for p in placements if p.resident and p.update is Update.STEP}
    away = {p.block for p in placements if not p.resident}
    widened = max((_workspace(trace, b, streaming) for b in trace.model.blocks if b.name in stepping), default=0)
    hosted = sum(b.gradient_nbytes for b in trace.model.blocks if b.name in away)
    return trace.held_nbytes + widened + min(streaming.gradient_window, hosted) if widened else 0


def update_workspaces(trace: Trace, streaming: Streaming) -> Mapping[str, int]:
    """Bytes that the update of each block takes on the device, if it stays there."""
    return {block.name: _workspace(trace, block, streaming) for block in trace.model.blocks}


def _workspace(trace: Trace, block: Block, streaming: Streaming) -> int:
    """Bytes that the update of ``block`` takes on the device: 16-bit gradients widened to fp32, chunk by chunk, with
    what else goes with that (``workspaces.workspace_nbytes``)."""
    most = chunk_elements(streaming.update_chunk, trace.state_names, streaming.masters)
    trained = [p for p in block.parameters if p.trainable]
    copies = [(widened_copies(p, streaming.masters), p.numel) for p in trained]
    largest = min(most, max((p.numel for p in trained), default=0))
    widened = min(most, sum(numel for many, numel in copies if many)) * max((many for many, _ in copies), default=0)
    return workspace_nbytes(trace.state_names, largest, widened, trained)
