"""What a plan says of activations: the fate of what an op makes between forward and backward. Frozen, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.errors import ConfigError

__all__ = ["Fate", "Selection", "Treatment"]


class Fate(StrEnum):
    """Where what an op makes in forward is until backward asks for it."""

    KEEP = "keep"  # on the device
    OFFLOAD = "offload"  # on the host; the device has it again when backward comes to it
    DISK = "disk"  # the same, on disk


@dataclass(frozen=True)
class Treatment:
    """The fate of what one op of a block makes: the ``occurrence``-th run (from 0) of ``op`` (``Work.op``) in one
    forward of the block's module, views not counted.

    ``bits`` 0: as it is. 8, 4, 2: floating-point numbers as so many bits an element, which changes the numbers. 1:
    exact; what is true or false, or (of a ReLU) positive or not, which is all that its backward asks.
    """

    op: str
    occurrence: int
    fate: Fate
    bits: int = 0

    def __post_init__(self) -> None:
        if not self.op or self.occurrence < 0:
            raise ConfigError(f"a treatment names an op and its occurrence, 0 or more, got {self}")
        if self.bits not in (0, 1, 2, 4, 8):
            raise ConfigError(f"what {self.op} makes is kept as it is (0) or as 8, 4, 2 or 1 bits, got {self.bits}")

    @property
    def lossy(self) -> bool:
        """Whether backward reads other numbers than forward made."""
        return self.bits > 1


@dataclass(frozen=True)
class Selection:
    """Treatments that hold in each of ``blocks``.

    In a block that recomputes, an op that is named does not run again: what it made is kept or moved, and all other
    ops run again. In a block that does not, what an op made is treated as said if it is named and saved for backward,
    and stays on the device as it is if it is not named.
    """

    blocks: tuple[str, ...]
    treatments: tuple[Treatment, ...]

    def __post_init__(self) -> None:
        if not self.blocks or not self.treatments:
            raise ConfigError("a selection names one block and one treatment at least")
        named = [(t.op, t.occurrence) for t in self.treatments]
        if len(set(named)) != len(named) or len(set(self.blocks)) != len(self.blocks):
            raise ConfigError(f"a selection names a block or an op twice: blocks {', '.join(self.blocks)}")
