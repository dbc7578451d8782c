"""Walks through the steps of a trace as the runtime walks through a model, and writes down what it does. No torch.

The decisions are not repeated here: the slot pool, the recorded order, the windows and the staging rings are those
of the runtime (``scheduling``), over a recorder in the place of the device. What is repeated is who asks them what, and
when: ``runtime.hooks``, ``runtime.saved``, ``runtime.stash``, ``runtime.gradients`` and ``runtime.session``.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import final

from forebay.arenas import Arenas
from forebay.lowering.account import Account
from forebay.lowering.homes import Homes
from forebay.lowering.in_backward import PaperBackwardUpdates
from forebay.lowering.liveness import Liveness
from forebay.lowering.lives import Move
from forebay.lowering.moving import Moving
from forebay.lowering.recorder import Recorder
from forebay.lowering.stages import Cut, Grain, Landing, Stage
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update, used_up
from forebay.program import Change, Use, Verb
from forebay.scheduling.rounds import Rounds
from forebay.scheduling.slots import Slot, SlotPool
from forebay.scheduling.window import TransferWindow
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.treatments import seen_by_op

__all__ = ["Walker"]

TRAINING = "training"
"""The kind of pass, for the record of the order in which blocks are used."""


@final
class Walker:
    """Writes the steps of one plan into ``recorder``. In a sketch compute does not say what it takes and leaves on the
    device, and what moves may be taken for as coarse as ``grain`` says."""

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        liveness: Liveness,
        sizes: Arenas,
        recorder: Recorder,
        grain: Grain | None = None,
    ) -> None:
        self._plan = plan
        self._recorder = recorder
        self._profile = liveness.profile(plan.recompute, plan.activations)
        self.homes = Homes(trace, plan, sizes, recorder, liveness.jobs)
        self._by_op = seen_by_op(plan.activations, plan.recompute)
        self._hosted = {p.block for p in plan.placements if not p.resident}
        # Of residents: whose gradients are let go in backward, and whose step is asked for.
        in_backward = frozenset(used_up(plan.placements, resident=True))
        self._stepping = {p.block for p in plan.placements if p.resident} - in_backward
        self._stages = liveness.stages(plan.recompute, plan.activations, frozenset(self._hosted), in_backward, grain)
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
        self._in_backward = PaperBackwardUpdates(plan, self.homes)
        self._numbers = {id(slot): number for number, slot in enumerate(self.pool.slots)}
        self._window = TransferWindow(recorder, streaming.gradient_window)
        self._tasks: dict[str, set[int]] = defaultdict(set)
        self._trained = _trained(liveness)
        # Of blocks that speculate: landings in a pass, and how many of them are still to come in this one.
        self._landings = _landings(self._stages, frozenset(plan.updated(Update.AHEAD)))
        self._to_land: dict[str, int] = {}
        self._moving = Moving(recorder, self._profile.moves, streaming)
        self._account = None if recorder.sketching else Account(trace, self._profile)
        # Gradients of resident blocks that stay: those of the first pass until the update, later ones are added to
        # them.
        self._kept = 0
        self._first_pass = True
        self._rounds = Rounds.of(plan)
        # Where updates are delayed: the blocks whose slots are without the last one.
        self._late: Sequence[str] = ()
        # Compute that is issued and not yet written down: positions, the stage that they are of, blocks read.
        self._start = self._end = 0
        self._stage: Stage | None = None
        self._cuts: deque[Cut] = deque()
        self._uses: dict[str, Slot] = {}
        self._known_uses: dict[tuple[str, int], Use] = {}
        self._leaving: list[Change] = []
        recorder.before = self._write_compute

    def state(self) -> object:
        """What the next step depends on: equal states are followed by equal steps."""
        slots = tuple((slot.occupant, slot.residency) for slot in self.pool.slots)
        return slots, self.pool.order.record(TRAINING)

    # One step.

    def micro_batch(self, *, last: bool = True) -> None:
        """One forward and backward pass; ``last``: of its step."""
        self._to_land = dict(self._landings) if last else {}
        self._window.empty()
        self.pool.order.begin(TRAINING)
        around: dict[str, Slot] = {}
        self._start = self._end = 0
        for stage in self._stages:
            self._write_compute()
            if stage.run.position >= self._profile.forward:
                self._moving.begin_backward(stage.run.first_op)
            self._stage, self._cuts = stage, deque(stage.cuts)
            self._end = stage.run.position
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

    def _forward(self, stage: Stage, around: dict[str, Slot]) -> None:
        for block in stage.around:
            if block not in around:
                around[block] = self.pool.acquire(block)
        self._ask(stage, stage.run.position, stage.given)
        opened = {block: self.pool.acquire(block) for block in stage.opened}
        end, uses = stage.run.position + stage.run.length, {**around, **opened}
        self._cut(stage, end, uses)
        self._end, self._uses = end, dict(uses)
        self._write_compute()
        self._uses = {}  # if all that was left is skipped, nothing reads them
        for slot in opened.values():
            self.pool.release(slot)

    def _backward(self, stage: Stage) -> None:
        latest: dict[str, Slot] = {}
        for stop in stage.stops:
            self._cut(stage, stop.position, {})
            self._end = stop.position  # what comes before it is issued before its blocks are asked for
            if stop.blocks:
                latest = self._asked(stop.blocks, latest)
                self._uses.update(latest)
            self._end = stop.position + 1
            if self._account is not None:
                for landing in stop.landings:
                    self._leaving.extend(Change(c.kind, -c.nbytes) for c in landing.frees)
            # First: an op may complete gradients that stay and gradients that leave, and the way of those cuts compute.
            if stop.kept and self._first_pass:
                self._leaving.append(Change(Kind.GRADIENT, stop.kept))
                self._kept += stop.kept
                self._write_compute()  # what comes after has them beside it
            for ending in stop.ending:
                self._write_compute()
                home = self.homes.blocks[ending.block]
                freed = (Change(Kind.GRADIENT, -ending.nbytes),) if ending.nbytes else ()
                self.homes.update_resident(home, frozenset(self._trained[ending.block]), freed)
                self._kept -= ending.nbytes
            for landing in stop.landings:
                self._land(landing)
        end = stage.run.position + stage.run.length
        self._cut(stage, end, {})
        self._end = end

    def _asked(self, blocks: tuple[str, ...], latest: dict[str, Slot]) -> dict[str, Slot]:
        """The slots of ``blocks``, which an op reads; ``latest`` are those that ops of this visit have asked for last.
        A block that is asked for again before any other is where it was, nobody has left a slot since, and what there
        was room to fetch ahead has been fetched: it need not be asked for."""
        if len(blocks) == 1 and len(latest) == 1 and blocks[0] in latest:
            return latest
        slots = {block: self.pool.acquire(block) for block in blocks}
        for slot in slots.values():
            self.pool.release(slot)
        return slots

    def _cut(self, stage: Stage, until: int, uses: Mapping[str, Slot]) -> None:
        """Cuts compute at all positions up to ``until``; each part but the last reads the blocks ``uses``."""
        while self._cuts and self._cuts[0].position <= until:
            cut = self._cuts.popleft()
            self._end = cut.position
            self._uses.update(uses)
            self._write_compute()
            dropping = self._account.dropped(cut.position) if cut.leaving and self._account is not None else 0
            for move in cut.leaving:
                self._moving.leave(move, dropping)
            self._ask(stage, cut.position, cut.asked)

    def _ask(self, stage: Stage, position: int, moves: Sequence[Move]) -> None:
        """Asks for what the op at ``position`` reads, which is the next. What went with ops that were skipped is gone
        before that comes back."""
        if moves and self._start < self._end:
            if self._account is not None:
                self._moving.freed.extend(self._account.made(self._start, self._end))
            self._start = self._end
        for move in moves:
            self._moving.ask(move, stage.run.first_op + position - stage.run.position)

    def _land(self, landing: Landing) -> None:
        home, tasks = self.homes.blocks[landing.block], self._tasks[landing.block]
        # The update of the last step may not have read the landed bytes yet.
        self.homes.queue_deferred(home)
        reader = home.read_by.pop(landing.place, None)
        if reader is not None:
            reader.wait()
        slot, free = self._in_backward.place(home)
        self._window.admit(landing.nbytes)
        first = landing.place not in tasks
        tasks.add(landing.place)
        done = self._recorder.add(
            Lane.D2H,
            Verb.LAND if first else Verb.ACCUMULATE,
            f"gradient {landing.name}" if first else f"accumulate {landing.name}",
            after=(self._recorder.mark(), *free),
            nbytes=landing.nbytes,
            block=landing.block,
            parameter=landing.name,
            changes=landing.frees,
            slot=slot,
            pieces=landing.pieces,
        )
        self._window.sent(done, landing.nbytes)
        home.arrived[landing.place] = done
        self._in_backward.landed(home, landing.place)
        left = self._to_land.get(landing.block, 0)
        if left:
            self._to_land[landing.block] = left - 1
        if left == 1:  # nothing more lands in this step
            self.homes.update_ahead(home, frozenset(tasks))

    def optimizer_step(self) -> None:
        """The updates, and the first fetches of the next pass."""
        self.pool.order.begin(TRAINING)
        trained = [n for n in self.pool.order.in_order_of_use(self.homes.blocks) if self._trained.get(n)]
        names = [n for n in trained if self._rounds.has_turn(n, self._recorder.step)]
        last = [n for n in names if n in self._stepping][-1:]
        delayed = self._plan.streaming.delay_after is not None
        if delayed:
            self._show_latest(names)
        changing, first = set(trained), self.pool.upcoming()
        for name in reversed(trained) if delayed else trained:
            if name in names:
                # zero_grad() follows the step: it frees all gradients at once.
                freed = (Change(Kind.GRADIENT, -self._kept),) if [name] == last and self._kept else ()
                self._step_block(name, freed, delayed=delayed)
            changing.discard(name)
            if name in first and not delayed:
                self.pool.prefetch(changing)
        if not self._plan.streaming.overlap_update:
            self.homes.settle()
        for name in names:
            # What has landed of others waits for their turn, and the gradients of the next step are added to it.
            self._tasks.pop(name, None)
        self._kept, self._first_pass = 0, True
        self.pool.prefetch()

    def _step_block(self, name: str, freed: tuple[Change, ...], *, delayed: bool) -> None:
        home, tasks = self.homes.blocks[name], frozenset(self._trained[name])
        if home.placement.resident:
            if name in self._stepping:
                self.homes.update_resident(home, tasks, freed)
            return
        if not delayed:
            self.pool.invalidate(name)
        if not self._in_backward.step(home):
            self.homes.step(home, tasks)

    def _show_latest(self, names: Sequence[str]) -> None:
        """The slots get what the delayed updates of the step before have made (``runtime.delay``); those of ``names``
        come next. Every step is written down as those behind the warm-up are."""
        for name in self._late:
            self.pool.invalidate(name)
        for name in names:
            self.pool.bring(name)
        self._late = names

    def finish(self) -> None:
        """Writes down what has been put off; nothing comes after it. A search walks hundreds of times while the cyclic
        collector rests, so what has been written must not be kept by the two who ask each other."""
        self.homes.queue_all()
        self._moving.finish()
        self._recorder.finish()

    # Compute.

    def _write_compute(self) -> None:
        """Writes down the compute that was issued since the last time."""
        start, end, stage = self._start, self._end, self._stage
        if stage is None or end <= start:
            return  # asked for at every turn: mostly there is nothing
        run = stage.run
        begin = max(start, run.position)
        while begin - run.position in run.skipped:
            begin += 1  # compute is cut before each op that is skipped
        if end <= begin:
            return  # what goes with what was skipped goes with what runs next
        self._start = end  # first: writing down asks for this again
        if end == self._profile.forward:
            self._moving.end_forward()
        peak, changes, uses = 0, tuple[Change, ...](), tuple[Use, ...]()
        if self._account is not None:
            peak, changes = self._account.booked(start, end, (*self._leaving, *self._moving.freed))
            uses = tuple([self._use(block, slot) for block, slot in self._uses.items()])
        first = run.first_op + begin - run.position
        self._uses, self._leaving = {}, []
        self._moving.freed.clear()
        self._recorder.compute(
            stage.what,
            stage.block,
            (first, first + end - begin),
            recomputed=run.again,
            treated=stage.forward and stage.block in self._by_op,
            uses=uses,
            peak=peak,
            changes=changes,
        )

    def _use(self, block: str, slot: Slot) -> Use:
        key = block, self._numbers[id(slot)]
        if key not in self._known_uses:
            self._known_uses[key] = Use(*key)
        return self._known_uses[key]


def _trained(liveness: Liveness) -> dict[str, set[int]]:
    """The places of the parameters with a gradient, by block."""
    index = liveness.index
    found: dict[str, set[int]] = defaultdict(set)
    for visit in index.completed:
        for done in visit:
            found[index.blocks[done.parameter]].add(index.places[done.parameter])
    return found


def _landings(stages: Sequence[Stage], blocks: frozenset[str]) -> Mapping[str, int]:
    """How many gradients of each of ``blocks`` land in a pass."""
    landings = (landing.block for stage in stages for stop in stage.stops for landing in stop.landings)
    return Counter(block for block in landings if block in blocks)
