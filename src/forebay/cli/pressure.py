"""Host memory that runs out under a run: the run ends while it still can save itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from forebay.cli.shortage import HostPressed
from forebay.errors import ConfigError
from forebay.tiers.host import HostMemory, available_host_memory
from forebay.units import MiB

__all__ = ["HostPressure", "PressurePolicy"]


@dataclass(frozen=True)
class PressurePolicy:
    """What host memory has to leave free: ``share`` of the tightest limit around the process (0 to 1), ``least`` bytes
    in every case. It is looked at every ``seconds``."""

    share: float = 0.01
    least: int = 64 * MiB
    seconds: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1 or self.least < 0 or self.seconds < 0:
            raise ConfigError(
                f"share is from 0 to less than 1, least and seconds are 0 or more, got {self.share}, {self.least} and "
                f"{self.seconds}"
            )

    def floor(self, memory: HostMemory) -> int:
        """Bytes that have to be free."""
        return max(self.least, int(self.share * memory.total))


@final
class HostPressure:
    """Looks at the host memory of this process between steps. A process at the limit of its control group is killed
    without a word, however much of its budget is left: other processes of the group count too."""

    def __init__(
        self,
        policy: PressurePolicy | None = None,
        read: Callable[[], HostMemory] = available_host_memory,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy or PressurePolicy()
        self._read = read
        self._now = now
        self._looked = float("-inf")
        self._found: HostMemory | None = None

    def is_near(self) -> bool:
        """Whether less is free than has to be; True from then on."""
        now = self._now()
        if self._found is None and now - self._looked >= self._policy.seconds:
            self._looked, memory = now, self._read()
            if memory.available < self._policy.floor(memory):
                self._found = memory
        return self._found is not None

    def error(self, step: int, promised: int) -> HostPressed:
        """What ends the run behind ``step``, whose plan has ``promised`` bytes of the host. ``is_near`` has said so
        before."""
        found = self._found or self._read()
        return HostPressed(found, self._policy.floor(found), promised, step)
