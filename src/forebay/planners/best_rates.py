"""What drafts take at best: every lane at its best rate, with all others out of its way. Nothing is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import final

from forebay.memory import Tier
from forebay.planners.activations.chain import Chain
from forebay.planners.activations.groups import Use
from forebay.planners.activations.named import again_seconds, moved_nbytes
from forebay.planners.known import Known
from forebay.planners.parts import DEDICATED, RESIDENT, Draft, Level
from forebay.planners.problem import Problem
from forebay.plans import Placement, Update
from forebay.simulation import Costs
from forebay.timeline import Lane
from forebay.treatments import Fate

__all__ = ["BestRates"]


@final
class BestRates:
    """Seconds of work in steps of the drafts of ``problem``, of which ``known`` is known; ``chain`` is the programme
    over all blocks (None without a trace: updates and computing take nothing then)."""

    def __init__(self, problem: Problem, known: Known, chain: Chain | None) -> None:
        self._problem = problem
        self._known = known
        self._chain = chain

    def step(self, draft: Draft) -> float:
        """Seconds below which no step of ``draft`` can be."""
        return max(self.lanes(draft).values())

    def lanes(self, draft: Draft) -> Mapping[Lane, float]:
        """Seconds that each lane works in a step of ``draft``; of the disk those for states and activations that it
        takes in. Of every lane 0 where the machine is not known."""
        machine, liveness = self._problem.machine, self._known.liveness
        if machine is None:
            return dict.fromkeys((Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE), 0.0)
        sizer, there = self._known.sizer(draft.streaming.update_chunk), (Update.DEVICE, Update.STORAGE)
        hosted = [(b, p) for b, p in zip(self._problem.model.blocks, draft.placements, strict=True) if not p.resident]
        states = [(sizer.state_nbytes(b.name), p.states) for b, p in hosted if p.update is not Update.STORAGE]
        updated = [p for _, p in hosted if p.update not in there]
        # A trained block comes at least once a step, because its update made what a slot holds stale.
        trained = sum(b.nbytes for b, _ in hosted if b.gradient_nbytes)
        gradients = sum(b.gradient_nbytes for b, _ in hosted)
        moved = 0 if liveness is None else sum(moved_nbytes(liveness.index, draft.activations))
        lanes = {
            Lane.COMPUTE: self.computing(draft) + self.updating(draft),
            Lane.H2D: (trained + moved) / machine.h2d.curve.best,
            Lane.D2H: gradients / machine.d2h.curve.best + moved / machine.leaving.curve.best,
            Lane.UPDATE: sum(self._updates_at_home.get(p.block, 0.0) * self._apart(p) for p in updated),
        }
        if machine.disk is not None:
            written = sum(nbytes for nbytes, tier in states if tier is Tier.DISK)
            if liveness is not None:
                written += sum(moved_nbytes(liveness.index, draft.activations, (Fate.DISK,)))
            lanes[Lane.DISK_READ] = written / machine.disk.read.curve.best
            lanes[Lane.DISK_WRITE] = written / machine.disk.write.curve.best
        return lanes

    def computing(self, draft: Draft | Level) -> float:
        """Seconds of the trace's ops and of those that run again, whatever is where."""
        again, liveness = 0.0, self._known.liveness
        if liveness is not None:
            again = again_seconds(self._costs, liveness.index, draft.recompute, draft.activations)
        return self._ops + again

    @property
    def forward(self) -> float:
        """Seconds of compute in forward; 0 without a trace."""
        return 0.0 if self._chain is None else self._chain.base.forward

    def updating(self, draft: Draft) -> float:
        """Seconds of compute that updates take of blocks that stay on the device."""
        return sum(self._updates.get(block, 0.0) for block in draft.resident)

    @cached_property
    def _ops(self) -> float:
        """Seconds of the trace's ops."""
        return sum(self._costs.work(op.work).seconds for _, _, op in self._costs.trace.ops())

    @cached_property
    def _updates(self) -> Mapping[str, float]:
        """Seconds of an update on the device of each block, if it stays."""
        return {block: use.backward for block, use in self._uses(RESIDENT)}

    @cached_property
    def _updates_at_home(self) -> Mapping[str, float]:
        """Seconds of an update in place on the host, of each block."""
        return {block: use.update for block, use in self._uses(DEDICATED)}

    def _uses(self, tiers: tuple[Tier, Tier, Tier]) -> Iterator[tuple[str, Use]]:
        """What each block costs that may be at home in ``tiers``; of none without a trace."""
        for group in () if self._chain is None else self._chain.groups:
            for home in group.homes:
                if home.tiers == tiers:
                    yield from ((block, home.use) for block in group.blocks)

    def _apart(self, placement: Placement) -> float:
        """How many times as long as in place an update on the host takes that is so."""
        # What comes from disk and goes there is updated where it lies in between.
        apart = placement.update is Update.AHEAD and not placement.on_disk
        return self._costs.apart if apart else 1.0

    @property
    def _costs(self) -> Costs:
        return self._known.priced
