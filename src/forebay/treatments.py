"""What a plan says of activations: the fate of what an op makes between forward and backward. Frozen, no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from forebay.compression import Codes
from forebay.errors import ConfigError
from forebay.memory import ALIGNMENT

__all__ = ["Fate", "Selection", "Split", "StandIn", "Treatment", "seen_by_op"]


class Fate(StrEnum):
    """Where what an op makes in forward is until backward asks for it."""

    KEEP = "keep"  # on the device
    OFFLOAD = "offload"  # on the host; the device has it again when backward comes to it
    DISK = "disk"  # the same, on disk


@dataclass(frozen=True)
class Split:
    """Which parts of what an op makes are treated, the *micro-tensors* of TSPLIT (Nie et al., ICDE 2022): of its bytes
    in order of memory, ``parts`` equal parts, the first ``treated``. The others stay on the device as they are.

    Of a tensor without gaps the leading dimension is the outermost in memory: where ``parts`` divides it, parts are
    slices of it, but for what the alignment adds.
    """

    treated: int
    parts: int

    def __post_init__(self) -> None:
        if not 1 <= self.treated < self.parts:
            raise ConfigError(
                f"a split treats one part at least and leaves one as it is, got {self.treated} of {self.parts}; leave "
                f"the split out to treat all of it"
            )

    def __str__(self) -> str:
        return f"{self.treated} of {self.parts} parts"

    def nbytes(self, whole: int) -> int:
        """Bytes of ``whole`` that are treated: whole multiples of ``ALIGNMENT``, or all of it where that is less."""
        exact = -(-whole * self.treated // self.parts)
        return min(whole, -(-exact // ALIGNMENT) * ALIGNMENT)


@dataclass(frozen=True)
class Treatment:
    """The fate of what one op of a block makes: the ``occurrence``-th run (from 0) of ``op`` (``Work.op``) in one
    forward of the block's module, views not counted.

    ``bits`` 0: as it is. 8, 4, 2: floating-point numbers as so many bits an element, which changes the numbers. 1:
    exact; what is true or false, or (of a ReLU) positive or not, which is all that its backward asks. ``split``: of
    what it is about (None: all of it).
    """

    op: str
    occurrence: int
    fate: Fate
    bits: int = 0
    split: Split | None = None

    def __post_init__(self) -> None:
        if not self.op or self.occurrence < 0:
            raise ConfigError(f"a treatment names an op and its occurrence, 0 or more, got {self}")
        if self.bits not in (0, 1, 2, 4, 8):
            raise ConfigError(f"what {self.op} makes is kept as it is (0) or as 8, 4, 2 or 1 bits, got {self.bits}")
        if self.split is not None and not self.changes_bytes:
            raise ConfigError(
                f"what {self.op} makes stays on the device as it is, in parts or not; leave the split out, or move the "
                f"parts, or keep them as fewer bits"
            )

    @property
    def lossy(self) -> bool:
        """Whether backward reads other numbers than forward made."""
        return self.bits > 1

    @property
    def changes_bytes(self) -> bool:
        """Whether it leaves the device, or becomes codes."""
        return self.fate is not Fate.KEEP or self.bits > 0

    def treated_nbytes(self, whole: int) -> int:
        """Of a storage of ``whole`` bytes, the first so many are treated."""
        return whole if self.split is None else self.split.nbytes(whole)


@dataclass(frozen=True, slots=True)
class StandIn:
    """What takes the place of one storage of ``nbytes`` between forward and backward.

    Its first ``treated`` bytes go to where ``fate`` says, as ``codes`` or (None) as they are. The ``rest`` of them is
    copied to a storage of its own on the device and stays there.
    """

    nbytes: int
    treated: int
    fate: Fate
    codes: Codes | None

    @classmethod
    def of(cls, treatment: Treatment, nbytes: int, dtype: str) -> StandIn:
        """What stands in for ``nbytes`` of ``dtype`` under ``treatment``. Raises ``ConfigError`` for what cannot be
        such codes."""
        treated = treatment.treated_nbytes(nbytes)
        codes = Codes.of(treated, dtype, treatment.bits) if treatment.bits else None
        return cls(nbytes, treated, treatment.fate, codes)

    @property
    def leaves(self) -> bool:
        """Whether any of it leaves the device."""
        return self.fate is not Fate.KEEP

    @property
    def moved(self) -> int:
        """Bytes that leave, or of the codes that stay."""
        return self.treated if self.codes is None else self.codes.nbytes

    @property
    def rest(self) -> int:
        """Bytes that stay as they are."""
        return self.nbytes - self.treated

    @property
    def made(self) -> int:
        """Bytes that are made on the device in its place: codes, and the copy of the rest."""
        return self.rest + (0 if self.codes is None else self.codes.nbytes)

    @property
    def in_transit(self) -> int:
        """Bytes that the device has for what leaves until it is gone, and for what comes back from when it begins to:
        those of the codes; or else all of the storage, of which the way out reads a part and the way back fills one,
        and which the rest is put into then."""
        return self.nbytes if self.codes is None else self.codes.nbytes

    @property
    def is_made(self) -> bool:
        """Whether compute makes something in its place, and puts it together again: codes, or the rest."""
        return self.codes is not None or self.rest > 0


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


def seen_by_op(selections: Iterable[Selection], recompute: Collection[str]) -> frozenset[str]:
    """The blocks of which every op of every forward is seen. Of those that run again (``recompute``) it must be known
    which op is which. Of the others what moves as it is follows the order of saves behind the first passes
    (``runtime.save_order``), but not where any of it becomes codes."""
    selections = tuple(selections)
    others = {block for one in selections for block in one.blocks if block not in recompute}
    coded = any(t.bits for one in selections if others.intersection(one.blocks) for t in one.treatments)
    return frozenset(block for one in selections for block in one.blocks if coded or block not in others)
