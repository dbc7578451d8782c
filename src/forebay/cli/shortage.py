"""A run that has less memory than its plan was made for, and how much another plan should leave free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from forebay.errors import DeviceOutOfMemory, HostOutOfMemory
from forebay.memory import Tier
from forebay.tiers.host import HostMemory
from forebay.units import format_bytes

if TYPE_CHECKING:
    from forebay.reporting.run import RunReport

__all__ = ["HostPressed", "Overrun", "spare_of"]

LEAST: Final = 0.05
"""Of what a plan had: what is free at the least under one that is made after it."""


def spare_of(missing: int, had: int) -> int:
    """Bytes that another plan should leave free, where ``missing`` are known to be too few of those that one ``had``.
    Twice of them: what was seen need not have been the peak."""
    return max(2 * missing, int(LEAST * had))


@final
class Overrun(DeviceOutOfMemory):
    """A step took more device memory than its plan has promised, behind ``steps`` that this process has taken.
    ``spare`` are the bytes that another plan should leave free."""

    def __init__(self, error: DeviceOutOfMemory, report: RunReport, together: int) -> None:
        super().__init__(str(error), needed=error.needed, allowed=error.allowed)
        self.steps = report.steps
        self.spare = spare_of(error.needed - report.plan.peaks(together)[Tier.DEVICE], error.allowed)


@final
class HostPressed(HostOutOfMemory):
    """``memory`` was left of the host behind ``step``, which is less than the ``floor``, and the plan of the run has
    ``promised`` bytes of it. ``within`` is the host budget of a plan that leaves enough: 0 or less, there is none."""

    def __init__(self, memory: HostMemory, floor: int, promised: int, step: int) -> None:
        self.found = (
            f"host memory: {format_bytes(memory.available)} are left of {format_bytes(memory.total)} "
            f"({memory.limit_source})"
        )
        super().__init__(
            f"{self.found}, so the run was stopped behind step {step}, before the kernel ends it; end other "
            f"programs, or lower --host-memory (and give a --disk)",
            needed=floor,
            allowed=memory.available,
        )
        self.within = promised - spare_of(floor - memory.available, promised)
