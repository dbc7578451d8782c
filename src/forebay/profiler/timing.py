"""Seconds of the ops of a trace, measured on this machine: what goes before any roofline.

Every distinct op (``Work.signature``) runs for real on random values of the shapes, strides and dtypes that the trace
saw, its result thrown away, so that the time includes the memory that it takes anew each time. Ops that move nothing
are not timed, and the most expensive come first, so that a limit on the time cuts what matters least.

What other programs do to a run must not be taken for the op: a run that had to wait for a core does not count, and
an op of which no run counts is left to the roofline.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from forebay.errors import ConfigError
from forebay.machine import Machine
from forebay.profiler.stopwatch import Stopwatch
from forebay.profiler.work import Call, TensorSpec
from forebay.simulation.costs import Costs
from forebay.states import Masters
from forebay.trace import Trace, Work

__all__ = ["Timed", "TimingPolicy", "arguments", "time_each", "time_ops", "waited"]

_FILL = 32
"""Times as slow as an elementwise op is the making of its arguments: on ``cpu`` the system hands out fresh pages."""

_HEAD = 1 << 16
"""Elements of an argument that are random; the rest repeats them, which costs no more than a copy."""

_LOST = 0.1
"""Share of a run that its threads may have waited for a core before the run does not count."""

_BYTES = ("uint8", "int8")
"""Dtypes of workspaces."""

_TRIES = 2
"""Times as many runs as are wanted are made where some of them do not count."""

_FEW, _ENOUGH = 3, 0.02
"""Runs after the first that every op gets, and the share of all the time after which it gets no more of them."""


@final
@dataclass(frozen=True)
class TimingPolicy:
    """How long timing may take: ``total`` seconds, at most ``share`` of it for one op, ``runs`` of each at most.

    An op whose arguments and results take more than ``nbytes`` is left to the roofline. ``burst`` calls make one run:
    on a GPU, where the host issues ops ahead, one call alone would show the time that it takes to issue it.
    """

    total: float = 15.0
    share: float = 0.1
    runs: int = 9
    nbytes: int = 2 << 30
    burst: int = 1

    def __post_init__(self) -> None:
        if self.total <= 0 or not 0 < self.share <= 1 or min(self.runs, self.nbytes, self.burst) < 1:
            raise ConfigError(f"total is above 0, share in (0, 1], runs, nbytes and burst 1 or more; got {self}")


@final
@dataclass(frozen=True)
class Timed:
    """Seconds by ``Work.signature``, and the signatures of ops that have none: those that cannot run ``alone`` on
    random values, and those of which every run was ``disturbed``. What there was no room for is in neither."""

    seconds: Mapping[str, float]
    alone: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()


def waited() -> float:
    """Seconds that threads of this process could have run and had no core, all in all.

    The system's own count (``/proc/PID/schedstat``, second field: ns on a run queue); 0 where it keeps none.
    """
    nanoseconds = 0
    with contextlib.suppress(OSError):
        for thread in os.scandir("/proc/self/task"):
            with contextlib.suppress(OSError, IndexError):  # a thread may end meanwhile
                nanoseconds += int(Path(thread.path, "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def time_ops(
    trace: Trace,
    calls: Mapping[str, Call],
    machine: Machine,
    device: torch.device,
    stopwatch: Stopwatch,
    policy: TimingPolicy | None = None,
    *,
    waiting: Callable[[], float] = waited,
) -> Machine:
    """``machine`` with the measured seconds of the ops of ``trace`` that it does not know yet (see ``time_each``)."""
    timed = time_each(trace, calls, machine, device, stopwatch, policy, waiting=waiting)
    return replace(machine, op_seconds={**machine.op_seconds, **timed.seconds})


def time_each(
    trace: Trace,
    calls: Mapping[str, Call],
    machine: Machine,
    device: torch.device,
    stopwatch: Stopwatch,
    policy: TimingPolicy | None = None,
    *,
    waiting: Callable[[], float] = waited,
) -> Timed:
    """Times the ops of ``trace`` that ``machine`` does not know, each alone, those first that weigh most.

    An op that cannot run alone (it needs values that random ones are not) is left to the roofline. ``waiting``
    says how many seconds were lost to other programs so far. The caller's random numbers stay as they are.
    """
    timer = _Timer(device, stopwatch, policy or TimingPolicy(), waiting)
    measured: dict[str, float] = {}
    alone: list[str] = []
    disturbed: list[str] = []
    with _apart(device):
        for work, estimate in _by_weight(trace, machine):
            call = None if work.signature in machine.op_seconds else calls.get(work.signature)
            if call is None or not timer.has_room(call, work, estimate, machine.device_bandwidth / _FILL):
                continue
            seconds = timer.seconds(call)
            if seconds:
                measured[work.signature] = median(seconds)
            else:
                (alone if seconds is None else disturbed).append(work.signature)
    return Timed(measured, tuple(alone), tuple(disturbed))


def arguments(call: Call, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``call`` can be made with: tensors of random values in the place of its ``TensorSpec``."""
    args, kwargs = tree_map_only(TensorSpec, lambda spec: _tensor(spec, device), (call.args, dict(call.kwargs)))
    return args, kwargs


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Nothing of what happens inside stays: no graph, no other random numbers for the caller."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
        torch.manual_seed(0)
        yield


def _by_weight(trace: Trace, machine: Machine) -> list[tuple[Work, float]]:
    """The works of ``trace`` that move anything and the seconds of one run as they are estimated; those that take
    most of the step come first."""
    per_segment = [Counter(op.work for op in segment.ops) for segment in trace.segments]
    times: Counter[int] = Counter()
    for visit in trace.visits:
        times.update(per_segment[visit.segment])
    costs = Costs(trace, machine, Masters.WHOLE)  # of ops alone, for which masters are nothing
    order = sorted(times, key=lambda index: -times[index] * costs.work(index).seconds)
    return [(trace.works[index], costs.work(index).seconds) for index in order if trace.works[index].nbytes]


@final
class _Timer:
    """Times one op after another within what its policy allows for all of them."""

    def __init__(
        self, device: torch.device, stopwatch: Stopwatch, policy: TimingPolicy, waiting: Callable[[], float]
    ) -> None:
        self._device = device
        self._stopwatch = stopwatch
        self._policy = policy
        self._waiting = waiting
        self._left = policy.total

    @property
    def _bound(self) -> float:
        """Seconds that the next op may take."""
        return min(self._policy.share * self._policy.total, self._left)

    def has_room(self, call: Call, work: Work, estimate: float, fill_rate: float) -> bool:
        """Whether arguments and two runs of ``call`` fit into the memory and the seconds that are left."""
        given = _nbytes(call)
        if given + work.nbytes > self._policy.nbytes:
            return False
        return given / fill_rate + 2 * self._policy.burst * estimate <= self._bound

    def seconds(self, call: Call) -> list[float] | None:
        """Seconds of each run that counts; None when the op cannot run alone."""
        if not _is_harmless(call):
            return None
        policy, bound = self._policy, self._bound
        runs: list[float] = []
        making = spent = 0.0
        try:
            made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
            making = spent = self._stopwatch.seconds(lambda: made.append(arguments(call, self._device)))
            args, kwargs = made.pop()

            def run() -> None:
                for _ in range(policy.burst):
                    call.func(*args, **kwargs)

            for number in range(1 + _TRIES * policy.runs):
                long_enough = number > _FEW and spent - making >= _ENOUGH * policy.total
                if len(runs) == policy.runs or spent >= bound or long_enough:
                    break
                before = self._waiting()
                seconds = self._stopwatch.seconds(run)
                spent += seconds
                lost = self._waiting() - before
                # The first run warms up. It counts only where there is no time for another.
                if lost <= _LOST * seconds and (number or spent >= bound):
                    runs.append(seconds / policy.burst)
        except Exception:
            # An op may want more of its arguments than their shapes say; there is no one error for that.
            return None
        finally:
            self._left -= spent
        return runs


def _is_harmless(call: Call) -> bool:
    """Whether made-up values can do no worse than raise.

    Only torch's own ops check what they are given. Not even those look into the bytes that a forward has left for its
    backward (cuDNN's and oneDNN's workspaces), and read memory that is not there if they are others.
    """
    if not isinstance(call.func, torch._ops.OpOverload) or call.func.namespace != "aten":
        return False
    opaque = any(isinstance(leaf, TensorSpec) and leaf.dtype in _BYTES for leaf in tree_leaves(call.args))
    return not (opaque and "backward" in call.func.overloadpacket.__name__)


def _extent(spec: TensorSpec) -> int:
    """Elements of the storage under a tensor."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=False))


def _nbytes(call: Call) -> int:
    """Bytes of the arguments of ``call``."""
    specs = [leaf for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, TensorSpec)]
    return sum(_extent(spec) * int(getattr(torch, spec.dtype).itemsize) for spec in specs)


def _tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """A tensor as ``spec`` says. Raises ``ValueError`` for one that is not strided."""
    if len(spec.stride) != len(spec.shape):
        raise ValueError("a sparse tensor cannot be made up")
    dtype: torch.dtype = getattr(torch, spec.dtype)
    flat = torch.empty(_extent(spec), dtype=dtype, device=device)
    if spec.ascending:
        # Offsets of groups: all of a size, as routes are taken to be.
        last = (spec.high or 1) - 1
        flat.copy_(torch.arange(1, flat.numel() + 1, device=device) * last // max(flat.numel(), 1))
    else:
        _fill(flat, spec.high)
    made = flat.as_strided(spec.shape, spec.stride)
    if spec.true is not None:
        chosen = torch.zeros(made.numel(), dtype=dtype, device=device)
        chosen[torch.randperm(made.numel(), device=device)[: spec.true]] = True
        made.copy_(chosen.view(spec.shape))
    return made


def _fill(flat: torch.Tensor, high: int | None) -> None:
    head = flat[:_HEAD]
    if flat.is_floating_point() or flat.is_complex():
        # No zeros, no denormals: arithmetic on those takes other paths.
        head.copy_(torch.empty(head.shape, dtype=torch.float32, device=flat.device).uniform_(0.1, 1.0))
    else:
        # 0 is a place in whatever there is, should the op read it as one after all.
        head.random_(0, high or 1)
    filled = head.numel()
    while filled < flat.numel():
        more = min(filled, flat.numel() - filled)
        flat[filled : filled + more].copy_(flat[:more])
        filled += more
