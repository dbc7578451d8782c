"""What a planner is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import get_args

from forebay.arguments import expect, expect_micro_batches
from forebay.budgets import Budget
from forebay.calls import CHECKSUMS
from forebay.compression import CODE_BITS
from forebay.errors import ConfigError
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.model import Model
from forebay.plans import UpdateTime
from forebay.states import Masters, masters_for
from forebay.trace import Footprint, Trace

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """A model, what its step needs beside the parameters, what is allowed, and the machine that it will run on.

    ``trace`` and ``machine`` go together: with them plans are compared by their simulated step. Without them (no
    batch was given) ``footprint`` stands for the step. ``host_limit`` and ``disk_limit`` are bytes: the budget, or
    what the machine has where the budget names none (``disk_limit`` 0: no disk). ``state_names`` are the optimizer's
    states per element. ``overlap_update`` says whether host updates may run beside compute: not where both share the
    cores. ``compress`` are the bits that an activation may be kept as: 8, 4 or 2, which changes the numbers; 0: as it
    is. ``micro_batches`` of a step pass the model together (``forebay.accumulate``); the trace is of one of them.
    ``update`` "backward": gradients may be used up while backward runs (``Update.BACKWARD``). ``disk_copies`` and
    ``checksums``: as in ``Streaming``, for whatever a plan puts on disk; ``masters``: as there. ``accumulates``: as in
    ``Plan``. Only a plan whose step takes less than ``faster_than`` seconds is of use to who asks, who has another one:
    a search may end where it will find none.

    Raises ``ConfigError`` where these contradict each other.
    """

    model: Model
    footprint: Footprint
    budget: Budget
    host_limit: int
    disk_limit: int
    state_names: tuple[str, ...]
    overlap_update: bool
    trace: Trace | None = None
    machine: Machine | None = None
    compress: int = 0
    micro_batches: int = 1
    update: UpdateTime = "step"
    disk_copies: int = 1
    checksums: bool = CHECKSUMS
    accumulates: bool = True
    masters: Masters = Masters.WHOLE
    faster_than: float = inf

    def __post_init__(self) -> None:
        if (self.trace is None) != (self.machine is None):
            raise ConfigError("a trace and a machine go together: without one of them no step can be simulated")
        expect("accumulates", self.accumulates, bool, "True, or False for a loop that takes one backward a step")
        if not isinstance(self.compress, int) or self.compress not in (0, *CODE_BITS):
            raise ConfigError(f"compress must be 0 (nothing), 8, 4 or 2 bits, got {self.compress!r}")
        expect_micro_batches(self.micro_batches)
        if self.update not in get_args(UpdateTime):
            raise ConfigError(f"update must be {' or '.join(get_args(UpdateTime))}, got {self.update!r}")
        told = {"update='backward'": self.update == "backward", "accumulates=False": not self.accumulates}
        for name, asked in told.items() if self.trace is None else ():
            if asked:
                why = self.footprint.note or "no batch was given"
                raise ConfigError(f"{name} needs to know when gradients are made ({why}); give a batch")
        if self.update == "backward" and self.micro_batches > 1:
            raise ConfigError(
                f"update='backward' makes one backward a step, got {self.micro_batches} micro-batches; take one, or "
                f"update='step'"
            )
        if not self.accumulates and self.micro_batches > 1:
            raise ConfigError(
                f"accumulates=False is a loop of one backward a step, got {self.micro_batches} micro-batches; take "
                f"one, or accumulates=True"
            )
        if self.trace is not None and self.trace.model != self.model:
            raise ConfigError("the trace is of another model; capture this one")
        if self.machine is not None and self.disk_limit and self.machine.disk is None:
            raise ConfigError(
                f"a disk is allowed and machine {self.machine.name} has none; measure one with forebay doctor --disk"
            )

    @property
    def measured(self) -> bool:
        """Whether the activations are known beforehand."""
        return self.trace is not None or self.footprint.measured

    def unknown(self, needs: str) -> ConfigError:
        """The error where there is no trace and something ``needs`` one, in words."""
        why = self.footprint.note
        there = f"a step on the batch cannot be looked at beforehand ({why})" if why else "no batch was given; give one"
        return ConfigError(f"{needs}: {there}")

    @property
    def workspace_nbytes(self) -> int:
        """Bytes of the device for workspaces and pages of the allocator, whatever the plan and the batch."""
        return 0 if self.trace is None else self.trace.workspace_nbytes

    def limit(self, tier: Tier) -> int:
        """Bytes that a plan may take of ``tier``: what is allowed, and no more than the machine has, without the part
        of the device that is the loop's."""
        allowed = {
            Tier.DEVICE: self.budget.planned_device,
            Tier.HOST: self.host_limit,
            Tier.PINNED: self.host_limit if self.budget.pinned is None else self.budget.pinned,
            Tier.DISK: self.disk_limit,
        }[tier]
        if self.machine is None:
            return allowed
        there = {
            Tier.DEVICE: max(0, self.machine.device_capacity - self.budget.device_reserve),
            Tier.HOST: self.machine.host_capacity,
            Tier.PINNED: self.machine.pinned_capacity,
            Tier.DISK: 0 if self.machine.disk is None else self.machine.disk.capacity,
        }[tier]
        return min(allowed, there)

    def beside(self, seconds: float | None) -> Problem:
        """The same for who has a plan whose step takes so many ``seconds`` (None: nobody knows)."""
        return replace(self, faster_than=min(self.faster_than, inf if seconds is None else seconds))

    def with_halves(self) -> Problem:
        """The same with masters kept as their lower halves, where that loses nothing and whoever updates states has the
        parameters too: not a drive that computes."""
        disk = None if self.machine is None else self.machine.disk
        if disk is not None and disk.update_rate is not None:
            return self
        return replace(self, masters=masters_for(self.state_names, self.model.trained_dtypes))
