"""A device whose compute is a queue of timed waits, and whose memory and copies are those of ``cpu``.

On ``cpu`` compute runs in the training thread, which finds out late, whenever the cores are busy with updates, that an
op is over. A device does not: it takes the next op from its queue as soon as the one before is done and the bytes are
there, while the training thread is some layers ahead. So compute has a thread of its own here, and a clock: an op
begins when the one before ended, when it was issued, and when what it waits for had arrived, whichever came last, and
not when a thread got a core to see to it. Forward, backward and landings wait for the ends on that clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import numpy as np
import torch

from benchmarks.fasthost.engine import moved
from forebay.device.base import Completion, Device, NoDelays
from forebay.device.completions import DONE, LaneCompletion, WorkerCompletion, dependency_failure
from forebay.device.cpu import CpuDevice, copies_bytes
from forebay.device.event_log import EventLog
from forebay.device.lanes import WorkerLanes
from forebay.memory import Kind, TierUsage
from forebay.timeline import Event, Lane

__all__ = ["Compute", "QueuedDevice"]


@final
class Compute:
    """The queue. ``stalled`` are the seconds that it had work and waited for bytes."""

    def __init__(self) -> None:
        # A lane of its own machinery: any that takes jobs will do.
        self._lanes = WorkerLanes(
            time.perf_counter, EventLog(1), NoDelays(), prepare_thread=partial(torch.set_grad_enabled, False)
        )
        self._holds: list[Completion] = []
        self._last: LaneCompletion = DONE
        self._free = 0.0
        self.stalled = 0.0

    def launch(self, job: Callable[[], object], seconds: float) -> None:
        """Queues an op that takes ``seconds``. ``job`` makes what comes out of it, and takes next to nothing."""
        holds, self._holds = self._holds, []
        run = partial(self._run, job, seconds, time.perf_counter(), holds)
        self._last = self._lanes.submit(Lane.DEVICE_UPDATE, run, after=holds)

    def hold(self, completion: Completion) -> None:
        """What is launched from now on begins after ``completion``, whose ``wait`` may return the moment."""
        self._holds.append(completion)

    def mark(self) -> LaneCompletion:
        """Done with all that has been launched so far."""
        return self._last

    def synchronize(self) -> None:
        """Waits for all that has been launched."""
        self._lanes.synchronize()

    def close(self) -> None:
        """Ends the thread."""
        self._lanes.close()

    def _run(self, job: Callable[[], object], seconds: float, issued: float, holds: Sequence[Completion]) -> None:
        job()
        ready = begin = max(self._free, issued)
        for hold in holds:
            arrived = hold.wait()
            begin = max(begin, arrived if isinstance(arrived, float) else time.perf_counter())
        self.stalled += begin - ready
        self._free = begin + seconds
        left = self._free - time.perf_counter()
        if left > 0:
            time.sleep(left)


@final
class _Mark(LaneCompletion):
    """Compute up to a moment: what is issued on a device is ordered behind it there."""

    def __init__(self, computed: LaneCompletion) -> None:
        self._computed = computed

    def wait(self) -> Any:
        return self._computed.wait()

    def done(self) -> bool:
        return self._computed.done()

    def failure(self) -> BaseException | None:
        return self._computed.failure()

    def job(self) -> WorkerCompletion | None:
        return self._computed.job()


@final
class _Copy(LaneCompletion):
    """A copy and what it comes after."""

    def __init__(self, copied: Completion, after: Sequence[Completion]) -> None:
        self._copied = copied
        self._after = after

    def wait(self) -> Any:
        return self._copied.wait()

    def done(self) -> bool:
        return self._copied.done()

    def failure(self) -> BaseException | None:
        return dependency_failure(self._copied)

    def job(self) -> WorkerCompletion | None:
        return self._copied.job() if isinstance(self._copied, LaneCompletion) else None

    def wait_for_issue(self) -> None:
        """Waits until a device could be told to copy."""
        for completion in self._after:
            if not isinstance(completion, _Mark):
                dependency_failure(completion)


@final
class QueuedDevice(Device):
    """A device with ``compute``, which is the caller's, and the memory and lanes of a ``CpuDevice`` of its own."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._host = CpuDevice()
        host = self._host
        self.name, self.ledger, self.history, self.turn = host.name, host.ledger, host.history, host.turn

    def allocate(self, nbytes: int, kind: Kind, what: str) -> torch.Tensor:
        return self._host.allocate(nbytes, kind, what)

    def free(self, buffer: torch.Tensor) -> None:
        self._host.free(buffer)

    def translate_oom(self, what: str) -> AbstractContextManager[None]:
        return self._host.translate_oom(what)

    def submit(
        self,
        lane: Lane,
        job: Callable[[], Any],
        *,
        after: Sequence[Completion] = (),
        nbytes: int = 0,
        what: str = "",
    ) -> Completion:
        return self._host.submit(lane, job, after=after, nbytes=nbytes, what=what)

    def copy(
        self,
        lane: Lane,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        after: Sequence[Completion] = (),
        what: str = "",
        inline: bool = False,
    ) -> Completion:
        """Like that of ``CpuDevice``; ``wait`` returns the moment at which it was done."""
        move = partial(_copied, target, source, copies_bytes(target, source))
        return _Copy(self._host.submit(lane, move, after=after, nbytes=source.nbytes, what=what), tuple(after))

    def launch(
        self, job: Callable[[], None], *, after: Sequence[Completion] = (), nbytes: int = 0, what: str = ""
    ) -> Completion:
        return self._host.launch(job, after=after, nbytes=nbytes, what=what)

    def mark(self) -> Completion:
        return _Mark(self._compute.mark())

    def hold_compute(self, completion: Completion) -> None:
        if isinstance(completion, _Copy):
            completion.wait_for_issue()
        self._compute.hold(completion)

    def now(self) -> float:
        return self._host.now()

    def record(self, event: Event) -> None:
        self._host.record(event)

    def drain_events(self) -> list[Event]:
        return self._host.drain_events()

    def level(self) -> tuple[dict[Kind, int], int]:
        return self._host.level()

    def usage(self) -> TierUsage:
        return self._host.usage()

    def reset_peak(self) -> None:
        self._host.reset_peak()

    def synchronize(self) -> None:
        self._compute.synchronize()
        self._host.synchronize()

    def close(self) -> None:
        """Finishes what is queued; the compute goes on being the caller's."""
        self._compute.synchronize()
        self._host.close()


def _copied(target: torch.Tensor, source: torch.Tensor, whole_bytes: bool) -> float:
    if not whole_bytes:
        target.copy_(source)
        return time.perf_counter()
    moment = np.zeros(2, np.int64)
    # The clock is read before the interpreter's lock is asked for, which a copy engine does without.
    moved(target.data_ptr(), source.data_ptr(), source.nbytes, moment.ctypes.data)
    return float(moment[0] + moment[1] / 1e9)
