"""Walks through the steps of a trace as the runtime walks through a model, and writes down what it does. No torch.

The decisions are not repeated here: the slot pool, the recorded order, the gradient window and the staging rings are
those of the runtime (``scheduling``), over a recorder in the place of the device. What is repeated is who asks them
what, and when: ``runtime.hooks``, ``runtime.saved``, ``runtime.gradients`` and ``runtime.session``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import final

from forebay.arenas import Arenas
from forebay.lowering.homes import Homes
from forebay.lowering.index import Completed
from forebay.lowering.liveness import Liveness, Run
from forebay.lowering.recorder import Recorder
from forebay.memory import Kind, Tier
from forebay.plans import Plan
from forebay.program import Change, Use, Verb
from forebay.scheduling.gradients import GradientWindow
from forebay.scheduling.slots import Slot, SlotPool
from forebay.timeline import Lane
from forebay.trace import Phase, Trace

__all__ = ["Walker"]

TRAINING = "training"
"""The kind of pass, for the record of the order in which blocks are used."""


@dataclass(frozen=True, slots=True)
class _Landing:
    """A gradient that leaves for the host when it is complete. ``frees`` is what that frees on the device."""

    block: str
    place: int
    name: str
    nbytes: int
    frees: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class _Stop:
    """What happens around one op of a backward visit: blocks are asked for before it, gradients leave after it, and
    ``kept`` bytes of gradients of resident blocks are complete."""

    position: int
    blocks: tuple[str, ...]
    landings: tuple[_Landing, ...]
    kept: int


@dataclass(frozen=True, slots=True)
class _Stage:
    """A run and what to do in it. Forward: ``opened`` blocks are there from its beginning to its end, those in
    ``around`` (held ones) go on being there for the next run that they are around of. Backward: ``stops``."""

    run: Run
    what: str
    block: str
    forward: bool
    around: tuple[str, ...]
    opened: tuple[str, ...]
    stops: tuple[_Stop, ...]


@final
class Walker:
    """Writes the steps of one plan into ``recorder``."""

    def __init__(self, trace: Trace, plan: Plan, liveness: Liveness, sizes: Arenas, recorder: Recorder) -> None:
        self._trace = trace
        self._plan = plan
        self._recorder = recorder
        self._profile = liveness.profile(plan.recompute)
        self.homes = Homes(trace, plan, sizes, recorder)
        self._hosted = {p.block for p in plan.placements if not p.resident}
        self._stages = _Stages(trace, liveness, self._profile.runs, self._hosted).all()
        streaming = plan.streaming
        self.pool = SlotPool(
            recorder,
            self.homes,
            {b.name: b.nbytes for b in trace.model.blocks if b.name in self._hosted},
            streaming.slots,
            [p.block for p in plan.placements if p.parameters is Tier.DEVICE and not p.resident],
            streaming.prefetch_distance,
        )
        self.homes.number_slots(self.pool)
        self._numbers = {id(slot): number for number, slot in enumerate(self.pool.slots)}
        self._window = GradientWindow(recorder, streaming.gradient_window)
        self._tasks: dict[str, set[int]] = defaultdict(set)
        self._trained = _trained(liveness)
        levels = self._profile.levels.values()
        self._total = tuple(map(sum, zip(*levels, strict=True))) or (0,) * (len(self._profile.during) + 1)
        self._holds_outputs = False
        # Gradients of resident blocks: those of the first pass stay until the update, later ones are added to them.
        self._kept = 0
        self._first_pass = True
        # Compute that is issued and not yet written down: positions, the stage that they are of, blocks read.
        self._start = self._end = 0
        self._stage: _Stage | None = None
        self._uses: dict[str, Slot] = {}
        self._leaving: list[Change] = []
        recorder.before = self._write_compute

    def state(self) -> object:
        """What the next step depends on: equal states are followed by equal steps."""
        slots = tuple((slot.occupant, slot.residency) for slot in self.pool.slots)
        return slots, self.pool.order.record(TRAINING)

    # One step.

    def micro_batch(self) -> None:
        """One forward and backward pass."""
        self._window.empty()
        self.pool.order.begin(TRAINING)
        around: dict[str, Slot] = {}
        for stage in self._stages:
            self._write_compute()
            self._stage = stage
            self._start = self._end = stage.run.position
            for block in [b for b in around if b not in stage.around]:
                self.pool.release(around.pop(block))
            if stage.forward:
                self._forward(stage, around)
            else:
                self._backward(stage)
        self._write_compute()
        self._first_pass = False
        for slot in around.values():
            self.pool.release(slot)

    def _forward(self, stage: _Stage, around: dict[str, Slot]) -> None:
        for block in stage.around:
            if block not in around:
                around[block] = self.pool.acquire(block)
        opened = {block: self.pool.acquire(block) for block in stage.opened}
        self._uses = {**around, **opened}
        self._end = stage.run.position + stage.run.length
        self._write_compute()
        for slot in opened.values():
            self.pool.release(slot)

    def _backward(self, stage: _Stage) -> None:
        for stop in stage.stops:
            self._end = stop.position  # what comes before it is issued before its blocks are asked for
            slots = {block: self.pool.acquire(block) for block in stop.blocks}
            self._uses.update(slots)
            self._end = stop.position + 1
            for slot in slots.values():
                self.pool.release(slot)
            for landing in stop.landings:
                self._leaving.extend(Change(c.kind, -c.nbytes) for c in landing.frees)
            for landing in stop.landings:
                self._land(landing)
            if stop.kept and self._first_pass:
                self._leaving.append(Change(Kind.GRADIENT, stop.kept))
                self._kept += stop.kept
                self._write_compute()  # what comes after has them beside it
        self._end = stage.run.position + stage.run.length

    def _land(self, landing: _Landing) -> None:
        home, tasks = self.homes.blocks[landing.block], self._tasks[landing.block]
        # The update of the last step may not have read the landed bytes yet.
        reader = home.read_by.pop(landing.place, None)
        if reader is not None:
            reader.wait()
        self._window.admit(landing.nbytes)
        first = landing.place not in tasks
        tasks.add(landing.place)
        done = self._recorder.add(
            Lane.D2H,
            Verb.LAND if first else Verb.ACCUMULATE,
            f"gradient {landing.name}" if first else f"accumulate {landing.name}",
            after=(self._recorder.mark(),),
            nbytes=landing.nbytes,
            block=landing.block,
            parameter=landing.name,
            changes=landing.frees,
        )
        self._window.sent(done, landing.nbytes)
        home.arrived[landing.place] = done

    def optimizer_step(self) -> None:
        """The updates, and the first fetches of the next pass."""
        names = [n for n in self.pool.order.in_order_of_use(self.homes.blocks) if self._trained.get(n)]
        last = [n for n in names if self.homes.blocks[n].placement.resident][-1:]
        for name in names:
            home, tasks = self.homes.blocks[name], frozenset(self._trained[name])
            if home.placement.resident:
                # zero_grad() follows the step: it frees all gradients at once.
                freed = (Change(Kind.GRADIENT, -self._kept),) if [name] == last and self._kept else ()
                self.homes.update_resident(home, tasks, freed)
            else:
                self.pool.invalidate(name)
                self.homes.update(home, tasks)
        if not self._plan.streaming.overlap_update:
            self.homes.settle()
        self._tasks.clear()
        self._kept, self._first_pass = 0, True
        self.pool.order.begin(TRAINING)
        self.pool.prefetch()

    # Compute.

    def _write_compute(self) -> None:
        """Writes down the compute that was issued since the last time."""
        start, end, stage = self._start, self._end, self._stage
        if stage is None or end <= start:
            return
        self._start = end  # first: writing down asks for this again
        base, run = self._total[start], stage.run
        changes = {kind: level[end] - level[start] for kind, level in self._profile.levels.items()}
        for change in self._leaving:
            changes[change.kind] = changes.get(change.kind, 0) + change.nbytes
        peak = max(0, max(self._profile.during[start:end]) - base)
        peak = max(peak, self._outputs(end, changes, peak))
        first = run.first_op + start - run.position
        uses = tuple(Use(block, self._numbers[id(slot)]) for block, slot in self._uses.items())
        self._uses, self._leaving = {}, []
        self._recorder.compute(
            stage.what,
            stage.block,
            (first, first + end - start),
            recomputed=run.again,
            uses=uses,
            peak=peak,
            changes=tuple(Change(kind, nbytes) for kind, nbytes in changes.items() if nbytes),
        )

    def _outputs(self, end: int, changes: dict[Kind, int], peak: int) -> int:
        """Books what the trace knows of outputs; returns the peak with a loss outside of the model.

        What the pass made and nobody let go is gone from the levels at its end; of that, ``held_nbytes`` stay until the
        forward of the next pass is over.
        """
        trace = self._trace
        if end == self._profile.forward:
            left = sum(changes.values())
            if self._holds_outputs:
                changes[Kind.ACTIVATION] = changes.get(Kind.ACTIVATION, 0) - trace.held_nbytes
                self._holds_outputs = False
            peak = max(peak, left + trace.unseen_nbytes) if trace.unseen_nbytes else peak
        if end == len(self._profile.during) and trace.held_nbytes:
            changes[Kind.ACTIVATION] = changes.get(Kind.ACTIVATION, 0) + trace.held_nbytes
            self._holds_outputs = True
        return peak


@final
class _Stages:
    """Finds what the runtime will do in each run: the same in every pass of every step."""

    def __init__(self, trace: Trace, liveness: Liveness, runs: tuple[Run, ...], hosted: set[str]) -> None:
        self._trace = trace
        self._index = liveness.index
        self._runs = runs
        self._hosted = hosted
        self._held = {b.name: b.modules for b in trace.model.blocks if b.held and b.name in hosted}
        self._modules = {b.name: b.modules for b in trace.model.blocks}
        self._order = {b.name: i for i, b in enumerate(trace.model.blocks)}
        self._last: dict[int, Completed] = {}
        for done in sorted((c for visit in self._index.completed for c in visit), key=lambda c: c.op):
            self._last[done.root] = done  # of two gradients in one root, the last one frees it

    def all(self) -> list[_Stage]:
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
                _Stage(
                    run=run,
                    what=f"{verb} {visit.block}".rstrip(),
                    block=visit.block,
                    forward=forward,
                    around=around,
                    opened=self._opened(visit.block, reads, around) if forward else (),
                    stops=() if forward else self._stops(run, reads),
                )
            )
        return stages

    def _around(self) -> dict[str, range]:
        """Held blocks, the outermost first, each with the runs during which its modules' forward goes on: from the
        first to the last that they enclose or that reads its parameters."""
        spans: dict[str, range] = {}
        for place, run in enumerate(self._runs):
            visit = self._trace.visits[run.visit]
            if visit.phase is not Phase.FORWARD or run.again:
                continue
            reads = {block for _, block in self._index.block_reads(run.visit)}
            for held, modules in self._held.items():
                inner = self._modules.get(visit.block, ())
                if held == visit.block or held in reads or any(_inside(m, outer) for m in inner for outer in modules):
                    spans[held] = range(spans[held].start if held in spans else place, place + 1)
        return dict(sorted(spans.items(), key=lambda item: min(map(len, self._held[item[0]]))))

    def _opened(self, block: str, reads: list[tuple[int, str]], around: tuple[str, ...]) -> tuple[str, ...]:
        """The blocks whose parameters a module asks for, in the order of the model."""
        names = {name for _, name in reads if name in self._hosted}
        if block in self._hosted:
            names.add(block)
        return tuple(sorted(names.difference(around), key=self._order.__getitem__))

    def _stops(self, run: Run, reads: list[tuple[int, str]]) -> tuple[_Stop, ...]:
        asked: dict[int, list[str]] = defaultdict(list)
        for op, block in reads:
            if block in self._hosted:
                asked[op].append(block)
        leaving: dict[int, list[_Landing]] = defaultdict(list)
        kept: dict[int, int] = defaultdict(int)
        for done in self._index.completed[run.visit]:
            if self._leaves(done):
                leaving[done.op - run.first_op].append(self._landing(done))
            elif self._last[done.root] == done and done.root in self._index.roots:
                kept[done.op - run.first_op] += self._index.roots[done.root].nbytes
        return tuple(
            _Stop(run.position + op, tuple(asked.get(op, ())), tuple(leaving.get(op, ())), kept.get(op, 0))
            for op in sorted(asked.keys() | leaving.keys() | kept.keys())
        )

    def _leaves(self, done: Completed) -> bool:
        return self._index.blocks[done.parameter] in self._hosted

    def _landing(self, done: Completed) -> _Landing:
        root = self._index.roots.get(done.root)
        frees: tuple[Change, ...] = ()
        if root is not None and self._last[done.root] == done:
            frees = (Change(root.kind, -root.nbytes),)
        block = self._index.blocks[done.parameter]
        return _Landing(
            block=block,
            place=self._index.places[done.parameter],
            name=self._index.names[done.parameter],
            nbytes=self._trace.sources[done.parameter].nbytes,
            frees=frees,
        )


def _inside(module: str, outer: str) -> bool:
    return not outer or module.startswith(f"{outer}.")


def _trained(liveness: Liveness) -> dict[str, set[int]]:
    """The places of the parameters with a gradient, by block."""
    index = liveness.index
    found: dict[str, set[int]] = defaultdict(set)
    for visit in index.completed:
        for done in visit:
            found[index.blocks[done.parameter]].add(index.places[done.parameter])
    return found
