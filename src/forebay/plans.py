"""The answers: where each tensor is between its uses. Frozen, JSON in and out, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.memory import Tier

__all__ = ["PLAN_SCHEMA", "Budget", "DiskBudget", "Placement", "Plan", "Streaming"]

PLAN_SCHEMA = 2


@dataclass(frozen=True)
class DiskBudget:
    """A folder for the disk tier and the bytes allowed in it (None: what the file system has free)."""

    path: str
    nbytes: int | None = None


@dataclass(frozen=True)
class Budget:
    """Bytes allowed per tier. ``host`` and ``pinned`` None: what the machine (or its cgroup) has."""

    device: int
    host: int | None = None
    pinned: int | None = None
    disk: DiskBudget | None = None

    def __post_init__(self) -> None:
        for name, value in (("device", self.device), ("host", self.host), ("pinned", self.pinned)):
            if value is not None and value <= 0:
                raise ConfigError(f"the {name} budget must be more than 0 bytes, got {value}")


@dataclass(frozen=True)
class Placement:
    """Home tiers of one block.

    ``parameters`` on the device: the block is never fetched. ``gradients`` and ``states`` are on the device
    together or not at all: an update runs where both are.
    """

    block: str
    parameters: Tier
    gradients: Tier
    states: Tier

    def __post_init__(self) -> None:
        if (self.gradients is Tier.DEVICE) != (self.states is Tier.DEVICE):
            raise ConfigError(f"block {self.block}: gradients and states must be on the device together")
        if self.states is Tier.DEVICE and self.parameters is not Tier.DEVICE:
            raise ConfigError(f"block {self.block}: states on the device need the parameters there")
        if self.gradients is Tier.DISK:
            raise ConfigError(f"block {self.block}: gradients accumulate on the device or on the host, not on disk")
        if Tier.PINNED in (self.parameters, self.gradients, self.states):
            raise ConfigError(f"block {self.block}: a home is device, host or disk; pinning is decided by the arena")

    @property
    def resident(self) -> bool:
        """Whether parameters, gradients and states all stay on the device."""
        return self.states is Tier.DEVICE


@dataclass(frozen=True)
class Streaming:
    """How blocks that are not at home on the device pass through it.

    ``slots`` are device buffers (bytes each, largest first); a block takes the smallest free one that holds it.
    ``host_slots`` are the same on the host for blocks whose parameters live on disk. ``prefetch_distance`` counts
    blocks ahead in the recorded order. ``gradient_window`` caps the bytes of gradients on their way to the host.
    ``update_chunk`` is the number of elements that one update job reads, updates and writes back.
    ``overlap_update`` lets the updates of later blocks run under the next forward. ``poison`` fills slots with NaN
    when they are released (debugging).
    """

    slots: tuple[int, ...] = ()
    host_slots: tuple[int, ...] = ()
    prefetch_distance: int = 1
    gradient_window: int = 0
    update_chunk: int = 4 * 1024 * 1024
    overlap_update: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        if self.prefetch_distance < 0:
            raise ConfigError(f"prefetch_distance must be 0 or more, got {self.prefetch_distance}")
        if self.update_chunk < 1024:
            raise ConfigError(f"update_chunk must be 1024 elements or more, got {self.update_chunk}")
        for name, sizes in (("slots", self.slots), ("host_slots", self.host_slots)):
            if any(size <= 0 for size in sizes) or list(sizes) != sorted(sizes, reverse=True):
                raise ConfigError(f"{name} must be positive sizes in bytes, largest first, got {sizes}")


@dataclass(frozen=True)
class Plan:
    """Where everything lives, what that is predicted to need, and why.

    ``device``, ``host``, ``pinned`` and ``disk`` are predicted peaks in bytes. ``step_seconds`` is the predicted time
    of a step of one micro-batch, ``micro_batch_seconds`` what each further micro-batch of a step adds (None: not
    simulated); ``notes`` say in words where these figures come from. ``recompute`` names the blocks whose activations
    are dropped in forward and made again in backward. ``fingerprint`` is that of the trace that the plan was made for
    ("": none). ``reasons`` say in words why the plan is as it is, ``changes_numbers`` whatever makes the result differ
    from plain PyTorch; the latter is empty for a lossless plan.
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
    step_seconds: float | None = None
    micro_batch_seconds: float | None = None
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

    def seconds_of_step(self, micro_batches: int = 1) -> float | None:
        """Predicted seconds of a step of ``micro_batches`` forward and backward passes; None where it is not known."""
        if self.step_seconds is None or micro_batches == 1:
            return self.step_seconds
        more = self.micro_batch_seconds
        return None if more is None else self.step_seconds + (micro_batches - 1) * more

    def to_json(self) -> str:
        """The plan as one JSON object."""
        from forebay.records import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads ``to_json``'s text. Raises ``ConfigError`` naming the field that is wrong."""
        from forebay.records import load

        return load(cls, text)
