"""The answers: where each tensor is between its uses. Frozen, JSON in and out, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Literal

from forebay.budgets import Budget
from forebay.calls import CHECKSUMS, Calls
from forebay.errors import ConfigError
from forebay.layout import PAGE
from forebay.machine import SPARED_CORES
from forebay.memory import ALIGNMENT, Tier
from forebay.states import Masters
from forebay.trace import Leaves
from forebay.treatments import Selection, Treatment

__all__ = [
    "PLAN_SCHEMA",
    "Accumulation",
    "Placement",
    "Plan",
    "Streaming",
    "Update",
    "UpdateTime",
    "updated",
    "used_up",
]

PLAN_SCHEMA = 12

UpdateTime = Literal["step", "backward"]
"""When an update may be made: when ``optimizer.step()`` asks for it, or in backward as soon as a block's gradients have
landed, which uses them up."""

UNLIMITED = 1 << 30
"""Micro-batches: where none takes more of a tier than another."""


class Update(StrEnum):
    """When and where a block is updated: each way makes the same numbers. One that is resident is updated on the
    device, when its step asks (``STEP``) or in backward (``BACKWARD``); the other ways are for those that are not.

    ``AHEAD``: out of the current copy of parameters and states into a second one at home, which becomes the current one
    if the step turns out to ask for just that. ``DEVICE``: gradients, parameters and states pass through
    ``Streaming.update_window``, chunk by chunk, and what the update makes of them goes home again. ``BACKWARD``: where
    the block is at home; the place of its gradients is another block's then, or free if they are on the device. So a
    step is one backward, and nobody can clip those gradients, or look at them. ``STORAGE``: by a process beside the
    storage (or a device of its own); gradients go to it, parameters come back, and the states, which are on disk, move
    nowhere.
    """

    STEP = "step"  # on the host, when the step asks
    AHEAD = "ahead"  # on the host, ahead of the step, while backward still runs
    DEVICE = "device"  # on the device, when the step asks
    BACKWARD = "backward"  # at home, in backward, as soon as the block's gradients are complete, which are used up
    STORAGE = "storage"  # beside the storage, when the step asks


@dataclass(frozen=True)
class Placement:
    """Home tiers of one block, and how it is updated.

    ``parameters`` on the device: the block is never fetched. ``gradients`` and ``states`` are on the device
    together or not at all: an update runs where both are.

    ``update`` is ``STEP`` or ``BACKWARD`` of a block that is resident, and ``STORAGE`` only of one whose states are on
    disk.
    """

    block: str
    parameters: Tier
    gradients: Tier
    states: Tier
    update: Update = Update.STEP

    def __post_init__(self) -> None:
        if (self.gradients is Tier.DEVICE) != (self.states is Tier.DEVICE):
            raise ConfigError(f"block {self.block}: gradients and states must be on the device together")
        if self.states is Tier.DEVICE and self.parameters is not Tier.DEVICE:
            raise ConfigError(f"block {self.block}: states on the device need the parameters there")
        if self.gradients is Tier.DISK:
            raise ConfigError(f"block {self.block}: gradients accumulate on the device or on the host, not on disk")
        if Tier.PINNED in (self.parameters, self.gradients, self.states):
            raise ConfigError(f"block {self.block}: a home is device, host or disk; pinning is decided by the arena")
        if self.update not in (Update.STEP, Update.BACKWARD) and self.resident:
            raise ConfigError(
                f"block {self.block} is resident: its update runs on the device as it is; set its update to "
                f"step or backward, got {self.update.value}"
            )
        if self.update is Update.STORAGE and self.states is not Tier.DISK:
            raise ConfigError(
                f"block {self.block} is updated beside the storage and its states are not on disk; put them there, or "
                f"set its update to step"
            )

    @property
    def resident(self) -> bool:
        """Whether parameters, gradients and states all stay on the device."""
        return self.states is Tier.DEVICE

    @property
    def on_disk(self) -> bool:
        """Whether parameters or states are on disk."""
        return Tier.DISK in (self.parameters, self.states)

    def updating(self, how: Update) -> Placement:
        """The same block, updated so."""
        if self.update is how:
            return self
        return Placement(self.block, self.parameters, self.gradients, self.states, how)


def updated(placements: Iterable[Placement], how: Update) -> tuple[str, ...]:
    """The blocks of ``placements`` that are updated so."""
    return tuple(p.block for p in placements if p.update is how)


def used_up(placements: Iterable[Placement], *, resident: bool) -> tuple[str, ...]:
    """The blocks of ``placements`` whose gradients backward uses up (``Update.BACKWARD``): those that are ``resident``,
    where the gradients are let go as soon as the block is updated, or the others, where they pass through
    ``Streaming.gradient_slots`` on the host."""
    return tuple(p.block for p in placements if p.update is Update.BACKWARD and p.resident is resident)


@dataclass(frozen=True)
class Streaming:
    """How blocks that are not at home on the device pass through it.

    ``slots`` are device buffers (bytes each, largest first, multiples of 64); a block takes the smallest free one that
    holds it. ``host_slots`` are the same on the host, in whole pages, for blocks whose parameters live on disk.
    ``prefetch_distance`` counts blocks ahead in the recorded order. ``gradient_window`` caps the bytes of gradients on
    their way to the host.
    ``offload_window`` caps the bytes of activations on their way to the host, ``reload_window`` those that are on the
    device again before backward asks for them; ``host_activations`` are the bytes of the arena on the host that
    offloaded activations of one micro-batch take. ``disk_activations`` are those of the file for activations on disk,
    and ``disk_window`` those of the ring on the host through which they pass, in either direction. What is on disk is
    read in the calls ``disk_reads`` and written in the calls ``disk_writes``. ``disk_copies`` 2: parameters and states
    at home on disk have one place more there than otherwise, so that no update writes where the last checkpoint has
    them. ``checksums``: what is read of them is held against checksums of what was written. ``masters`` is how fp32
    masters of parameters in 16 bits are kept, at home and on their way.
    ``update_chunk`` is the number of elements that one update job reads, updates and writes back. ``update_window`` are
    the bytes on the device through which blocks pass that are updated there and not at home there (``Update.DEVICE``):
    as many chunks at a time as it holds, beside the gradients that one of them widens. ``gradient_slots`` are buffers
    on the host (as ``slots``) through which the gradients of blocks pass that are updated in backward
    (``Update.BACKWARD``) and are not resident. ``overlap_update`` lets the updates of later blocks run under the next
    forward, and beside compute they have all cores of the host but ``spared_cores``. ``delay_after`` (None: never) is
    the number of steps after which updates are delayed: that of a step then runs under forward and backward of the next
    one, which see parameters without it, and so make other numbers.
    ``update_every`` (1: each step updates all blocks) is the number of steps in which every block that is not resident
    is updated once, in turns; its gradients are added up meanwhile, which makes other numbers.
    ``gradient_density`` (None: it goes as it is) is the share of the elements of a gradient that go to an update beside
    the storage (``Update.STORAGE``): the largest, and the rest is added to the gradient of the next step; below 1 that
    makes other numbers. ``poison`` fills slots with NaN when they are released (debugging).
    """

    slots: tuple[int, ...] = ()
    host_slots: tuple[int, ...] = ()
    gradient_slots: tuple[int, ...] = ()
    prefetch_distance: int = 1
    gradient_window: int = 0
    offload_window: int = 0
    reload_window: int = 0
    host_activations: int = 0
    disk_activations: int = 0
    disk_window: int = 0
    disk_reads: Calls = field(default_factory=Calls)
    disk_writes: Calls = field(default_factory=Calls)
    disk_copies: int = 1
    checksums: bool = CHECKSUMS
    masters: Masters = Masters.WHOLE
    update_chunk: int = 4 * 1024 * 1024
    update_window: int = 0
    overlap_update: bool = True
    spared_cores: int = SPARED_CORES
    delay_after: int | None = None
    update_every: int = 1
    gradient_density: float | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        if self.prefetch_distance < 0:
            raise ConfigError(f"prefetch_distance must be 0 or more, got {self.prefetch_distance}")
        if self.update_chunk < 1024:
            raise ConfigError(f"update_chunk must be 1024 elements or more, got {self.update_chunk}")
        if self.spared_cores < 0:
            raise ConfigError(f"spared_cores must be 0 or more, got {self.spared_cores}")
        if self.disk_copies not in (1, 2):
            raise ConfigError(f"disk_copies must be 1 or 2, got {self.disk_copies}")
        self._check_changes()
        self._check_slots()
        for name, nbytes in (
            ("gradient_window", self.gradient_window),
            ("offload_window", self.offload_window),
            ("reload_window", self.reload_window),
            ("host_activations", self.host_activations),
            ("disk_activations", self.disk_activations),
            ("disk_window", self.disk_window),
            ("update_window", self.update_window),
        ):
            if nbytes < 0:
                raise ConfigError(f"{name} must be 0 bytes or more, got {nbytes}")
        for name, calls in (("disk_reads", self.disk_reads), ("disk_writes", self.disk_writes)):
            if calls.block % PAGE:
                raise ConfigError(f"the block of {name} must be whole pages of {PAGE} bytes, got {calls.block}")
        if self.disk_window % PAGE:
            raise ConfigError(f"disk_window must be whole pages of {PAGE} bytes, got {self.disk_window}")

    def _check_slots(self) -> None:
        """Raises for sizes of slots that are none."""
        for name, sizes, unit in (
            ("slots", self.slots, ALIGNMENT),
            ("host_slots", self.host_slots, PAGE),
            ("gradient_slots", self.gradient_slots, ALIGNMENT),
        ):
            if any(size <= 0 for size in sizes) or list(sizes) != sorted(sizes, reverse=True):
                raise ConfigError(f"{name} must be positive sizes in bytes, largest first, got {sizes}")
            if any(size % unit for size in sizes):  # they lie one behind the other in an arena
                raise ConfigError(f"{name} must be multiples of {unit} bytes, got {sizes}")

    def _check_changes(self) -> None:
        """Raises for numbers of steps, or a ``gradient_density``, that are none."""
        if self.delay_after is not None and self.delay_after < 0:
            raise ConfigError(f"delay_after must be 0 steps or more, or None for never, got {self.delay_after}")
        if self.update_every < 1:
            raise ConfigError(f"update_every must be 1 step or more, got {self.update_every}")
        if self.gradient_density is not None and not 0 < self.gradient_density <= 1:
            raise ConfigError(
                f"gradient_density is a share, above 0 and at most 1, or None for gradients as they are, got "
                f"{self.gradient_density}"
            )


@dataclass(frozen=True)
class Accumulation:
    """Bytes that n micro-batches of ``forebay.accumulate`` take at most: ``device + (n - 1) * device_further``, and so
    on the host (``host_further``), page-locked of that (``pinned_further``) and on disk (``disk_further``).
    ``step_seconds`` is the predicted time of a step of ``micro_batches`` of them, as many as the plan was asked to
    leave room for (None: for one). ``leaves`` is what a forward leaves in its modules: where it is something,
    micro-batches pass forward one after the other."""

    device: int
    device_further: int
    host: int
    host_further: int
    disk: int
    disk_further: int
    micro_batches: int = 1
    step_seconds: float | None = None
    pinned: int = 0
    pinned_further: int = 0
    leaves: Leaves = Leaves.NOTHING

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ConfigError(f"micro_batches of an accumulation must be 1 or more, got {self.micro_batches}")
        _check_seconds("step_seconds of an accumulation", self.step_seconds)
        for tier in Tier:
            if min(self._of(tier)) < 0:
                what = f"{tier.value} and {tier.value}_further of an accumulation"
                raise ConfigError(f"{what} must be 0 bytes or more, got {self._of(tier)}")

    def needed(self, tier: Tier, micro_batches: int) -> int:
        """Bytes of a tier that so many micro-batches take. Page-locked are at most as many: no more than the budget
        for that, as far as it goes."""
        one, further = self._of(tier)
        return one + (micro_batches - 1) * further

    def most(self, tier: Tier, nbytes: int) -> int:
        """How many micro-batches ``nbytes`` of a tier have room for; 0 if for none."""
        one, further = self._of(tier)
        if nbytes < one:
            return 0
        return 1 + (nbytes - one) // further if further else UNLIMITED

    def _of(self, tier: Tier) -> tuple[int, int]:
        return {
            Tier.DEVICE: (self.device, self.device_further),
            Tier.HOST: (self.host, self.host_further),
            Tier.PINNED: (self.pinned, self.pinned_further),
            Tier.DISK: (self.disk, self.disk_further),
        }[tier]


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < inf:
        raise ConfigError(f"{name} must be 0 or more and finite, or None where it is not known, got {seconds}")


@dataclass(frozen=True)
class Plan:
    """Where everything lives, what that is predicted to need, and why.

    ``planner`` made it within ``budget``; ``placements`` say where each block is at home, ``streaming`` how blocks pass
    through the device.

    ``device``, ``host``, ``pinned`` and ``disk`` are predicted peaks in bytes. ``step_seconds`` is the predicted time
    of a step of one micro-batch, ``micro_batch_seconds`` what each further micro-batch of a step adds (None: not
    simulated); ``notes`` say in words where these figures come from. ``recompute`` names the blocks whose activations
    are dropped in forward and made again in backward; ``activations`` says which ops are treated otherwise than their
    block (``Selection``). ``loss_piece`` (0: all at once) are the most bytes of logits at a time from which the loss of
    a language model is computed. ``read_outside`` names the blocks whose parameters the model reads outside of their
    modules (``model.Block``), ``written`` the parameters of blocks that stream which the forward writes to: such a
    write may change nothing (a clamp), and is refused where it does. ``compiled`` names the modules that run as
    torch.compile made them, which the plan was made for; others run as written. ``accumulates`` False: every training
    forward finds that no parameter which stays on the device has a gradient, and what those take is counted from when
    they are made; else they may be there all the time, as in a loop of several backward passes a step. ``fingerprint``
    is that of the trace that the plan was made for ("": none). ``reasons`` say in words why the plan is as it is,
    ``changes_numbers`` whatever makes the result
    differ from plain PyTorch (lossless: nothing). ``accumulation``: see there (None: unknown, or nothing that streams).
    """

    planner: str
    budget: Budget
    placements: tuple[Placement, ...]
    streaming: Streaming
    device: int
    host: int
    disk: int
    pinned: int = 0
    recompute: tuple[str, ...] = ()
    activations: tuple[Selection, ...] = ()
    loss_piece: int = 0
    read_outside: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    accumulates: bool = True
    step_seconds: float | None = None
    micro_batch_seconds: float | None = None
    accumulation: Accumulation | None = None
    fingerprint: str = ""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changes_numbers: tuple[str, ...] = ()
    schema: int = PLAN_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != PLAN_SCHEMA:
            raise ConfigError(
                f"this plan has schema {self.schema}, this forebay reads schema {PLAN_SCHEMA}; make the plan again"
            )
        for name in ("device", "host", "pinned", "disk", "loss_piece"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 bytes or more, got {getattr(self, name)}")
        _check_seconds("step_seconds", self.step_seconds)
        _check_seconds("micro_batch_seconds", self.micro_batch_seconds)
        if self.updated(Update.DEVICE) and not self.streaming.update_window:
            raise ConfigError("the plan updates blocks on the device and has no update_window for them; give it one")
        if used_up(self.placements, resident=False) and not self.streaming.gradient_slots:
            raise ConfigError("the plan updates blocks in backward and has no gradient_slots for them; give it one")
        self._check_copies()
        self._check_masters()
        self._check_late()
        if self.streaming.gradient_density is not None:
            self._check_density(self.streaming.gradient_density)
        chosen = [block for selection in self.activations for block in selection.blocks]
        if len(set(chosen)) != len(chosen):
            raise ConfigError(f"two selections name block {max(chosen, key=chosen.count)}; a block is in one of them")
        treatments = [t for selection in self.activations for t in selection.treatments]
        if any(t.lossy for t in treatments) and not self.changes_numbers:
            raise ConfigError("a plan that keeps activations as 8, 4 or 2 bits must say so in changes_numbers")
        recomputed = frozenset(self.recompute)
        for selection in self.activations:
            for block in selection.blocks:
                if block not in recomputed and not all(t.changes_bytes for t in selection.treatments):
                    raise ConfigError(f"block {block} does not recompute: all it saves is kept; name only what leaves")

    def _check_masters(self) -> None:
        """Raises for masters of which half is kept where the other half is not when they are updated."""
        beside = self.updated(Update.STORAGE)
        if beside and self.streaming.masters is Masters.LOWER:
            raise ConfigError(
                f"block {beside[0]} is updated beside the storage, without the parameters that are half of its "
                f"masters; keep masters whole"
            )

    def _check_copies(self) -> None:
        """Raises for blocks on disk that somebody else writes, who does not know which copy a checkpoint has."""
        there = self.updated(Update.STORAGE)
        if there and self.streaming.disk_copies > 1:
            raise ConfigError(
                f"block {there[0]} is updated beside the storage, where nobody leaves the copy alone that a checkpoint "
                f"has; set its update to step, or make disk_copies 1"
            )

    def _check_density(self, density: float) -> None:
        """Raises for gradients of which a part is to go where none go, or of which nobody says so."""
        if not self.updated(Update.STORAGE):
            raise ConfigError(
                "gradient_density says what of gradients goes to an update beside the storage, and the plan makes none "
                "there; leave it out, or set the update of blocks to storage"
            )
        if density < 1 and not self.changes_numbers:
            raise ConfigError(
                "a plan with a gradient_density below 1 must say in changes_numbers that not all of a gradient is sent"
            )

    def _check_late(self) -> None:
        """Raises for updates that cannot come late, in turns or delayed, or do and nobody says so."""
        turns, delayed = self.streaming.update_every > 1, self.streaming.delay_after is not None
        if not turns and not delayed:
            return
        if turns and delayed:
            raise ConfigError("updates come in turns (update_every) or a step late (delay_after), not both")
        late = "updates in turns (update_every)" if turns else "delayed updates (delay_after)"
        for placed in self.placements:
            if delayed and (placed.resident or placed.parameters is not Tier.DEVICE):
                raise ConfigError(
                    f"delay_after delays the update of block {placed.block} on the host, whose parameters stay on the "
                    f"device meanwhile: its parameters must be on the device and its states elsewhere"
                )
            if placed.update is not Update.STEP:
                how = f"set the update of block {placed.block} to step, got {placed.update.value}"
                raise ConfigError(f"{late} are made after their step; {how}")
        if not self.changes_numbers:
            what = "update_every above 1" if turns else "delay_after"
            words = "blocks take turns" if turns else "updates come a step late"
            raise ConfigError(f"a plan with {what} must say in changes_numbers that {words}")

    def updated(self, how: Update) -> tuple[str, ...]:
        """The blocks that are updated so."""
        return updated(self.placements, how)

    def treatments(self, block: str) -> tuple[Treatment, ...]:
        """What is treated otherwise than ``block`` as a whole."""
        return next((s.treatments for s in self.activations if block in s.blocks), ())

    def seconds_of_step(self, micro_batches: int = 1, together: int = 1) -> float | None:
        """Predicted seconds of a step of ``micro_batches`` forward and backward passes, ``together`` of which pass the
        model at a time; None where it is not known."""
        if self.step_seconds is None or micro_batches == 1:
            return self.step_seconds
        if together > 1:
            needs = self.accumulation
            known = None if needs is None or needs.micro_batches != micro_batches else needs.step_seconds
            return known if together == micro_batches else None
        more = self.micro_batch_seconds
        return None if more is None else self.step_seconds + (micro_batches - 1) * more

    def peaks(self, together: int = 1) -> dict[Tier, int]:
        """Predicted peaks in bytes while so many micro-batches pass the model at a time."""
        found = {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.PINNED: self.pinned, Tier.DISK: self.disk}
        if together > 1 and self.accumulation is not None:
            found |= {tier: self.accumulation.needed(tier, together) for tier in Tier}
            if self.budget.pinned is not None:
                found[Tier.PINNED] = min(found[Tier.PINNED], self.budget.pinned)
        return found

    def to_json(self) -> str:
        """The plan as one JSON object."""
        from forebay.records import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads ``to_json``'s text. Raises ``ConfigError`` naming the field that is wrong."""
        from forebay.records import load

        return load(cls, text)
