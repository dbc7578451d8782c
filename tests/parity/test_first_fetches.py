"""What the next forward wants first leaves for the device before the last update of the step is even queued."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forebay.device.base import Delays
from forebay.timeline import Lane
from tests.null.updating import at_home
from tests.parity.speculating import Run, speculating
from tests.parity.test_delays import NARROW


class Asked(Delays):
    """Holds nothing back, and is asked once for each job, in the order in which they are queued."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Lane, str]] = []

    def seconds(self, lane: Lane, what: str) -> float:
        self.jobs.append((lane, what))
        return 0.0


@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
def test_the_first_fetches_are_queued_between_the_updates(disk: bool, tmp_path: Path) -> None:
    asked = Asked()
    plan = at_home(speculating(NARROW, torch.float32, disk=disk))
    run = Run(NARROW, torch.float32, plan, f"{tmp_path}:64MiB" if disk else None, asked)
    try:
        run.backward(0)
        asked.jobs.clear()
        run.optimizer.step()
        fetched = [at for at, (lane, _) in enumerate(asked.jobs) if lane is Lane.H2D]
        updated = {what: at for at, (lane, what) in enumerate(asked.jobs) if lane is Lane.UPDATE}  # its last chunk
        assert len(fetched) == plan.streaming.prefetch_distance
        for at in fetched:
            own = updated[asked.jobs[at][1].replace("fetch", "update")]
            assert own < at < max(updated.values())
            assert not any(own < other < at for other in updated.values())
    finally:
        run.close()
