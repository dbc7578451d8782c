"""A planner's workbench: what a draft needs of every tier and how long its step takes, each worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

from forebay.arenas import Arenas, Sizer
from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.lowering import lower, sketch
from forebay.lowering.liveness import updating_nbytes
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.activations.chain import Chain, standing_nbytes
from forebay.planners.activations.coding import changes
from forebay.planners.activations.groups import groups_of
from forebay.planners.best_rates import BestRates
from forebay.planners.coarse import Coarseness
from forebay.planners.known import Known
from forebay.planners.parts import (
    Draft,
    delays,
    omissions,
    recomputable,
    roundings,
    slot_options,
    turns,
)
from forebay.planners.problem import Problem
from forebay.plans import Plan, Streaming, Update, used_up
from forebay.program import Outline, Program, Sketch
from forebay.simulation import Costs, Forecast, Score, pace, play, settled_seconds, summarise
from forebay.states import state_changes
from forebay.timeline import Timeline

__all__ = ["Bench"]

SIMULATIONS = 40
"""Simulations that one search may take at most: what a search costs is counted, not timed, so that the same problem
always gives the same plan."""

ACTIONS = 45_000
"""Of long programs fewer: a search ends when those that it simulated have so many actions together. An action costs
some 25 microseconds, so this bounds the time too."""

IN_WORDS = ACTIONS // 8
"""Where programs have more actions than that, none is simulated only to say in words what a choice is worth."""

SIMULATIONS_LEAST = 3
"""But so many it may take."""

SIMULATIONS_COSTLY = 4
"""Drafts of which a search can simulate no more than so many are costly."""

LONG = 160
"""Visits of a trace from which on a step is so long that nothing is simulated beside what is most likely to gain."""


@final
class Bench:
    """Sizes and times the drafts of one problem. ``known``: see ``with_limits``."""

    def __init__(self, problem: Problem, known: Known | None = None) -> None:
        self.problem = problem
        self.model = problem.model
        self.known = known or Known(problem)
        self.recomputable: tuple[str, ...] = () if problem.trace is None else recomputable(problem.trace)
        self.simulated = 0
        self.actions = 0
        self._last_actions = 0
        self.liveness = self.known.liveness
        self._coarseness = Coarseness.of(self.model, long=self.is_long)
        self._seconds: dict[Draft, float] = {}
        self._exact: dict[Draft, Forecast] = {}
        self._proofs: dict[Draft, DoesNotFit | PlanInvalid | None] = {}
        self._latest: tuple[Draft, Program, Timeline] | None = None
        self._chain: Chain | None = None
        self._bound: float | None = None
        self._fingerprint = "" if problem.trace is None else problem.trace.fingerprint

    def with_limits(self, problem: Problem) -> Bench:
        """A bench for ``problem``, which asks the same as this one's within other limits: what does not depend on those
        is known. Raises ``ConfigError`` where it asks something else."""
        mine = self.problem
        same = replace(
            problem, budget=mine.budget, host_limit=mine.host_limit, disk_limit=mine.disk_limit, compress=mine.compress
        )
        if same != mine:
            raise ConfigError("a bench for other limits is one for the same model on the same machine")
        return Bench(problem, self.known)

    def spent(self, simulated: int, actions: int, share: float = 1.0) -> bool:
        """Whether a search that began with the counts of ``simulated`` and ``actions`` has used up ``share`` of what it
        may simulate."""
        simulated, actions = self.simulated - simulated, self.actions - actions
        enough = simulated >= share * SIMULATIONS_LEAST and actions >= share * ACTIONS
        return enough or simulated >= share * SIMULATIONS

    def within(self, simulated: int, actions: int, share: float) -> tuple[int, int]:
        """Counts from which no more than ``share`` of what a search may simulate has been used up, those of
        ``simulated`` and ``actions`` if that is so."""
        return (
            max(simulated, self.simulated - int(share * SIMULATIONS)),
            max(actions, self.actions - int(share * ACTIONS)),
        )

    @property
    def is_long(self) -> bool:
        """Whether a step is so long that little of it should be simulated; the same whatever the budgets are."""
        return self.problem.trace is not None and len(self.problem.trace.visits) >= LONG

    @property
    def is_costly(self) -> bool:
        """Whether the draft that was simulated last has so many actions that a search has no time for many like it."""
        return self._last_actions * SIMULATIONS_COSTLY > ACTIONS

    def sizer(self, update_chunk: int) -> Sizer:
        """The sizer for chunks of ``update_chunk`` elements."""
        return self.known.sizer(update_chunk)

    def arenas(self, draft: Draft) -> Arenas:
        """Bytes of every arena."""
        found = self.known.arenas.get(draft)
        if found is None:
            sizer = self.sizer(draft.streaming.update_chunk)
            settled = self.in_backward(draft)
            found = sizer.arenas(settled.placements, settled.streaming)
            self.known.arenas[draft] = found
        return found

    def in_backward(self, draft: Draft) -> Draft:
        """``draft`` with updates in backward of all blocks that can, and slots for their gradients: its own, if those
        are large enough."""
        return draft if self.known.early is None else self.known.early.settled(draft)

    def kept_gradients(self, block: Block) -> int:
        """Bytes of gradients that wait on the device for their step where ``block`` stays there."""
        early = self.known.early
        return block.gradient_nbytes if early is None else early.kept_nbytes(block)

    def device(self, draft: Draft) -> int:
        """Bytes that the device will hold at most; never exceeded, whatever the timing."""
        return self.arenas(draft).device + self.beside(draft)

    def beside(self, draft: Draft) -> int:
        """Of the device's bytes those that are in no arena: activations, temporaries, buffers, gradients under way.
        Where the homes of streamed blocks are, on the host or on disk, changes nothing about them. What has the room of
        gradients that are not made yet is none of them (``Problem.accumulates``)."""
        window, trace = draft.streaming.gradient_window, self.problem.trace
        if trace is None or self.liveness is None:
            return self.problem.footprint.peak + self.model.buffer_nbytes + window
        placements = self.in_backward(draft).placements
        hosted = tuple(p.block for p in placements if not p.resident)
        early = used_up(placements, resident=True)
        key = (draft.level, hosted, early, window, draft.streaming.update_chunk)
        known = self.known.beside
        if key not in known:
            streaming = self._as_here(draft.streaming)
            how = streaming, draft.activations, self.problem.accumulates, early
            live = self.liveness.beside(draft.recompute, hosted, *how)
            live = max(live, updating_nbytes(trace, placements, streaming))
            known[key] = live + trace.outside_nbytes
        return known[key]

    def fits_device(self, draft: Draft) -> bool:
        """Whether the device has room. Where it has none for the arenas alone, nothing else need be known."""
        limit = self.problem.limit(Tier.DEVICE)
        return self.arenas(draft).device <= limit and self.device(draft) <= limit

    def streamed(self, draft: Draft) -> Sequence[Block]:
        """The blocks that pass through shared slots."""
        return [b for b, p in zip(self.model.blocks, draft.placements, strict=True) if p.parameters is not Tier.DEVICE]

    def pinned(self, sizes: Arenas) -> int:
        """Bytes that the runtime will page-lock (``Arenas.pinnable``)."""
        machine = self.problem.machine
        if machine is None or machine.device_kind != "cuda":
            return 0
        taken, limit = 0, self.problem.limit(Tier.PINNED)
        for _, nbytes in sizes.pinnable:
            if taken + nbytes <= limit:
                taken += nbytes
        return taken

    def pageable(self, sizes: Arenas) -> int:
        """Bytes of arenas that the device copies from or to and that stay pageable for want of pinned budget."""
        machine = self.problem.machine
        if machine is None or machine.device_kind != "cuda":
            return 0
        return sum(nbytes for _, nbytes in sizes.pinnable) - self.pinned(sizes)

    def plan(self, name: str, draft: Draft, reasons: tuple[str, ...] = ()) -> Plan:
        """The plan that ``draft`` stands for."""
        sizes = self.arenas(draft)
        settled = self.in_backward(draft)
        return Plan(
            planner=name,
            budget=self.problem.budget,
            placements=settled.placements,
            streaming=self._as_here(settled.streaming),
            device=self.device(draft),
            host=sizes.host,
            disk=sizes.disk,
            pinned=self.pinned(sizes),
            recompute=draft.recompute,
            activations=draft.activations,
            read_outside=tuple(block.name for block in self.model.blocks if block.is_read_outside),
            compiled=() if self.problem.trace is None else self.problem.trace.compiled,
            accumulates=self.problem.accumulates,
            fingerprint=self._fingerprint,
            reasons=reasons,
            changes_numbers=(
                *changes(draft.activations),
                *state_changes(self.problem.state_names),
                *roundings(self.model),
                *delays(draft.streaming),
                *turns(draft.streaming),
                *omissions(draft.streaming),
            ),
        )

    def _as_here(self, streaming: Streaming) -> Streaming:
        """``streaming`` with what is no draft's to decide."""
        machine = self.problem.machine
        here = streaming if machine is None else replace(streaming, spared_cores=machine.spared_cores)
        return replace(here, masters=self.problem.masters)

    def timed(self, plan: Plan) -> Plan:
        """``plan`` with the seconds of its simulated step, where the problem says enough to simulate one."""
        if self.problem.trace is None:
            return plan
        return replace(plan, step_seconds=self.exact(Draft.of(plan)).step_seconds)

    def exact(self, draft: Draft) -> Forecast:
        """What a step of ``draft`` is predicted to take, every chunk of every update by itself."""
        if draft not in self._exact:
            program, timeline = self.played(self.plan("", draft))
            self._exact[draft] = summarise(timeline, program, self.costs)
        return self._exact[draft]

    def seconds(self, draft: Draft) -> float:
        """Seconds of a step of ``draft`` that is like all that follow. Raises ``ConfigError`` for a problem without a
        trace.

        Updates of a large model are taken in fewer and larger chunks than they run in, and gradients and activations of
        a block move in fewer and larger parts, which is what most of a simulation would go into; ``exact`` takes them
        as they are.
        """
        if draft not in self._seconds:
            paced = self.known.paced.get(draft)
            if paced is None:
                program, score = self.sketched(draft)
                paced = settled_seconds(pace(score), program), len(program.actions)
                self.known.paced[draft] = paced
            # What another bench has simulated counts all the same: what is found does not depend on who came before.
            self.simulated += 1
            self.actions += paced[1]
            self._last_actions = paced[1]
            self._seconds[draft] = paced[0]
        return self._seconds[draft]

    def sketched(self, draft: Draft) -> tuple[Sketch, Score]:
        """The program of which ``seconds`` are those of the last step, and its score."""
        known = self.known
        if draft not in known.sketches:
            coarse = replace(self.plan("", draft), streaming=self.coarse(draft))
            sizes = self.sizer(coarse.streaming.update_chunk).arenas(coarse.placements, coarse.streaming)
            grain = self._coarseness.grain(draft.streaming)
            program = sketch(self.costs.trace, coarse, liveness=self.liveness, sizes=sizes, grain=grain)
            score = Score.of(program, self.costs, settled=not draft.streaming.overlap_update)
            known.keep(draft, program, score)
        return known.sketches[draft]

    def eased(self, draft: Draft, part: Callable[[Outline], float]) -> float:
        """``seconds`` if every action took ``part`` of its seconds (or so many times of them): what a step may come to
        where those are not in its way. It costs no program, and is worked out once."""
        eased = self.known.eased
        if (draft, part) not in eased:
            program, score = self.sketched(draft)
            times = list(map(part, program.actions))
            eased[draft, part] = settled_seconds(pace(score.times(times)), program)
        return eased[draft, part]

    def played(self, plan: Plan) -> tuple[Program, Timeline]:
        """``plan`` lowered, every chunk of every update by itself, and played against a clock. The latest is kept."""
        draft, costs = Draft.of(plan), self.costs
        if self._latest is None or self._latest[0] != draft:
            program = lower(costs.trace, plan, liveness=self.liveness, sizes=self.arenas(draft))
            timeline = play(program, costs, settled=not plan.streaming.overlap_update)
            self._latest = draft, program, timeline
        return self._latest[1:]

    def prove(self, plan: Plan) -> None:
        """Raises what ``checking.check`` raises for ``plan``, one that was made here."""
        fault = self.fault_of(plan)
        if fault is not None:
            raise fault

    def fault_of(self, plan: Plan) -> DoesNotFit | PlanInvalid | None:
        """What ``prove`` raises. What is checked follows from what was decided: no plan is proven twice."""
        draft, costs = Draft.of(plan), self.costs
        if draft not in self._proofs:
            program, _ = self.played(plan)
            self._proofs[draft] = None
            try:
                check(costs.trace, costs.machine, plan, program)
            except (DoesNotFit, PlanInvalid) as error:
                self._proofs[draft] = error.with_traceback(None)  # its frames refer to this bench
        return self._proofs[draft]

    def coarse(self, draft: Draft) -> Streaming:
        """The streaming of simulations that only compare: with larger update jobs, and a window for as many of them on
        the device."""
        streaming, there = self._as_here(self.in_backward(draft).streaming), draft.updated(Update.DEVICE)
        chunk = self._coarseness.chunk(streaming.update_chunk)
        if chunk == streaming.update_chunk or not there:
            return replace(streaming, update_chunk=chunk)
        sizes = self.arenas(draft)
        cells = (streaming.update_window - sizes.update_widening) // sizes.update_cell
        window = self.sizer(chunk).update_window(there, cells)
        return replace(streaming, update_chunk=chunk, update_window=window)

    def may_compare(self, draft: Draft) -> bool:
        """Whether ``draft`` may be simulated after the search, to say in words what a choice is worth."""
        return draft in self._seconds or self.actions <= self.simulated * IN_WORDS

    def fastest(self, count: int) -> list[Draft]:
        """The ``count`` fastest of the drafts that were simulated, those with updates ahead of their step, or on the
        device, left out."""
        other = (Update.AHEAD, Update.DEVICE)
        plain = (draft for draft in self._seconds if not any(p.update in other for p in draft.placements))
        return sorted(plain, key=self.seconds)[:count]

    @cached_property
    def best_rates(self) -> BestRates:
        """Seconds of work, every lane at its best rate."""
        return BestRates(self.problem, self.known, self.chain)

    @property
    def chain(self) -> Chain | None:
        """The programme over all blocks; None without a trace."""
        if self._chain is None and self.liveness is not None:
            # Of the limits, what a block may do depends on whether there is a disk alone.
            key, known = (self.problem.compress, bool(self.problem.limit(Tier.DISK))), self.known.groups
            if key not in known:
                known[key] = groups_of(self.problem, self.liveness, self.costs)
            standing = standing_nbytes(self.liveness, known[key])
            self._chain = Chain(self.problem, known[key], self.costs, standing)
        return self._chain

    def slot_options(self, most: int) -> list[tuple[int, ...]]:
        """``parts.slot_options`` for everything that can stream."""
        known = self.known.slots
        if most not in known:
            known[most] = slot_options([b for b in self.model.blocks if not b.held], most)
        return known[most]

    @property
    def bound(self) -> float:
        """Seconds below which no step is: the optimum of the programme over all blocks; 0 without a trace."""
        if self._bound is None:
            self._bound = 0.0 if self.chain is None else self.chain.bound()
        return self._bound

    @property
    def costs(self) -> Costs:
        """Seconds of ops and actions. Raises ``ConfigError`` for a problem without a trace."""
        return self.known.priced
