"""Seconds of one thing alone on a machine: an op, a range of ops, an action. No torch.

An op costs what was measured for its signature, else what a roofline says (Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009): arithmetic and memory traffic overlap, so the slower of the two counts, and no op is
faster than its launch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import final

from forebay.calls import CHECKSUMS
from forebay.compression import MASK_BITS, Codes
from forebay.errors import ConfigError
from forebay.machine import Disk, Machine
from forebay.model import Block
from forebay.program import Action, Outline, Verb
from forebay.simulation.update_rates import (
    apart,
    kept,
    rate_on_device,
    rates_by_block,
    states_share,
    storage_rate,
    touched,
    update_rate,
)
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Tensor, Trace, Work

__all__ = [
    "ADD_TRAFFIC",
    "SUM_TRAFFIC",
    "VIEW_SHARE",
    "Cost",
    "Costs",
    "Source",
    "coding_signature",
    "is_copy_beside",
]

VIEW_SHARE = 0.5
"""A view starts no kernel and moves no bytes; the host still dispatches it, which is about half of what the smallest
real op costs there (torch 2.13 on a CPU: a view 0.9 to 1.1 us, a multiplication of 64 elements 1.1, adding a number
2.9)."""

MEMORY_TRAFFIC = 2
"""Bytes of memory that copying a byte from one place there to another reads and writes."""

ADD_TRAFFIC = 3
"""Bytes of host memory that adding a gradient's byte to what has landed before reads (two) and writes (one)."""

CHOICE_TRAFFIC = 36
"""Bytes of host memory that could be copied in the time in which one element of a gradient is added to what was left
of it and looked at to find the largest ones (``runtime.sparse``), which is the work of one core. A hundredth of fp32
gradients on an EPYC: 1.8 ns an element (docs/log.md, 2026-11-22), at 20 GB/s."""

SUM_TRAFFIC = 2
"""Bytes of host memory that could be copied in the time in which a byte of a page is summed up (``tiers.sums``): a
GiB takes 0.038 s, a copy of it 0.039 (one thread of an EPYC, memory that is not in the cache; docs/log.md,
2026-11-22)."""

_ENCODING = MappingProxyType({MASK_BITS: (8, 15), 2: (96, 26), 4: (96, 24), 8: (96, 23)})
_DECODING = MappingProxyType({MASK_BITS: (13, 26), 2: (29, 22), 4: (29, 16), 8: (21, 11)})
"""By bits: bytes an element that the kernels of ``runtime.codec`` read and write beside the tensor and its codes, and
how many kernels work on a piece. Counted in its source, as the traffic of kernels that are not fused."""

_SUBSTITUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bfloat16": ("float16", "tf32", "float32"),
        "float16": ("bfloat16", "tf32", "float32"),
        "float32": ("tf32", "float64"),
        "tf32": ("float32",),
        "float64": ("float32",),
        "complex64": ("float32",),
        "complex128": ("float64", "float32"),
        "float8_e4m3fn": ("float8_e5m2", "bfloat16", "float16", "float32"),
        "float8_e5m2": ("float8_e4m3fn", "bfloat16", "float16", "float32"),
    }
)
"""Where a machine states no rate for a dtype: whose rate is taken, nearest first. After these the slowest stated."""


class Source(StrEnum):
    """Where the seconds of an op are from."""

    MEASURED = "measured"  # the op ran on the machine, with these shapes
    ROOFLINE = "roofline"  # from rates of the machine
    HOST = "host"  # a view: no kernel, only what the host needs to dispatch it


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an op that runs alone, and where they are from. ``note`` says whose rate stood in, if one did."""

    seconds: float
    source: Source
    note: str = ""


def is_copy_beside(action: Action | Outline) -> bool:
    """Whether it brings a part of a chunk to who updates it beside the storage, or from there."""
    return action.verb in (Verb.LOAD, Verb.STORE) and action.lane in (Lane.DISK_WRITE, Lane.DISK_READ)


def coding_signature(codes: Codes, *, encode: bool) -> str:
    """The name in ``Machine.op_seconds`` of making ``codes``, or of reading them."""
    return f"forebay.{'encode' if encode else 'decode'}({codes.dtype}[{codes.numel}], {codes.bits})"


@final
class Costs:
    """What the ops of ``trace`` and the actions of its programs take on ``machine``, each alone, where fp32 masters are
    kept as ``masters`` says (``Streaming.masters`` of the plan).

    On ``cpu`` the host's work for an op (``launch_seconds``) and the kernel follow each other; elsewhere the host
    works ahead, and an op takes the longer of the two. What was measured has the host's work in it.
    """

    def __init__(self, trace: Trace, machine: Machine, masters: Masters) -> None:
        self.trace = trace
        self.machine = machine
        self.masters = masters
        self.update_rate = update_rate(trace, machine, masters)
        """Bytes/s of an update on the host, in place, with the states of ``trace`` and ``masters`` kept so: of all
        blocks together."""
        self.device_update_rate = rate_on_device(trace, machine, masters)
        self._by_block = rates_by_block(trace, machine)
        self.apart = apart(trace.state_names)
        """How many times as long an update takes from one copy of a block to another as one in place."""
        self.storage_rate = storage_rate(trace, machine, masters, self.update_rate)
        """The most bytes/s of an update beside the storage: what it touches, with the states read before it and written
        after it where a process on the host does it."""
        self.states_share = states_share(trace, masters)
        """Bytes of states, over those that an update of them touches."""
        # Where a GPU computes the host works ahead.
        host = machine.device_kind == "cpu"
        self.handover_seconds = machine.handover_seconds if host else 0.0
        """Seconds of compute for each transfer of an activation."""
        self.replay_seconds = machine.replay_seconds if host else 0.0
        """Seconds that an op takes longer when it runs again."""
        self.treat_seconds = machine.treat_seconds if host else 0.0
        """Seconds that each op takes longer in the forward of a block of which a plan treats some and every op is
        seen."""
        self._rates: dict[str, tuple[float, str]] = {}
        # Seconds of transfers, updates, reads and writes: few differ, since layers are alike.
        self._moves: dict[tuple[Verb, Lane, int, bool, int, tuple[int, ...], str], float] = {}
        # Seconds of ranges of ops: every step of every program has much the same.
        self._computed: dict[tuple[int, int], float] = {}
        self._works = tuple(self._cost(work) for work in trace.works)
        self._seconds = _Sums(trace, [c.seconds for c in self._works])
        self._measured = _Sums(trace, [c.seconds if c.source is Source.MEASURED else 0.0 for c in self._works])
        self._arithmetic = _Sums(trace, [w.flops / self._rate(w.dtype)[0] if w.flops else 0.0 for w in trace.works])

    @property
    def notes(self) -> tuple[str, ...]:
        """Which rates stood in for others, in words."""
        return tuple(note for _, note in self._rates.values() if note)

    @property
    def arithmetic_seconds(self) -> float:
        """Seconds of the trace's floating-point operations at the machine's stated rates, and nothing else: no
        schedule computes one micro-batch faster."""
        return self._arithmetic.total

    @property
    def measured_share(self) -> float:
        """Share of the trace's op seconds, 0 to 1, that was measured and not worked out from rates."""
        return self._measured.total / self._seconds.total if self._seconds.total else 0.0

    def touched(self, block: Block) -> int:
        """Bytes that an update of ``block`` touches on the host: states, gradients and parameters."""
        return touched((block,), self.trace.state_names, self.masters)

    def states(self, block: Block) -> int:
        """Bytes of the optimizer states of ``block``, master included."""
        return kept((block,), self.trace.state_names, self.masters)

    @property
    def fastest_update_rate(self) -> float:
        """Bytes/s of an update on the host of the block whose are the most."""
        return max((host for host, _ in self._by_block.values()), default=self.update_rate)

    def update_seconds(self, block: str, nbytes: int) -> float:
        """Seconds of an update on the host, in place, that touches ``nbytes`` of ``block``."""
        host, _ = self._by_block.get(block, (self.update_rate, 0.0))
        return nbytes / host

    def device_update_seconds(self, block: str, nbytes: int) -> float:
        """The same on the device."""
        _, device = self._by_block.get(block, (0.0, self.device_update_rate))
        return max(nbytes / device, self.machine.launch_seconds)

    def work(self, index: int) -> Cost:
        """The cost of ``trace.works[index]``."""
        return self._works[index]

    def again(self, index: int) -> float:
        """Seconds of an op of ``trace.works[index]`` that runs again."""
        return self._works[index].seconds + self.replay_seconds

    def ops(self, first: int, last: int) -> float:
        """Seconds of the ops with the numbers ``first`` to ``last`` (not included), one after the other."""
        return self._seconds.between(first, last)

    def action(self, action: Action | Outline, *, watched: bool = False, summed: bool = CHECKSUMS) -> float:
        """Seconds of ``action`` with its lane, and all that the lane shares, to itself. ``watched`` says that
        parameters come and go on ``cpu``, where every op then takes ``Machine.watch_seconds`` longer, but for what
        runs again and takes ``Machine.replay_seconds``; ``summed`` that parameters and states on disk have checksums.

        Raises ``ConfigError`` for an action on a disk that the machine does not have.
        """
        verb = action.verb
        if verb is Verb.COMPUTE:
            first, last = action.ops
            seconds = self._computed.get(action.ops)
            if seconds is None:
                seconds = self._computed[action.ops] = self._seconds.between(first, last)
            # What runs again finds the parameters there that the backward behind it asks for in any case. Where nobody
            # has measured what it takes instead, it is taken for an op like others.
            replayed = action.recomputed and self.replay_seconds > 0
            more = self.replay_seconds if replayed else self.machine.watch_seconds * watched
            return seconds + (last - first) * (more + self.treat_seconds * action.treated)
        if verb is Verb.ENCODE or verb is Verb.DECODE:
            return self._coding(action)
        whose = action.block if self._by_block else ""
        key = verb, action.lane, action.nbytes, action.apart, action.chosen_from, action.pieces, whose
        known = self._moves.get(key)
        if known is None:
            known = self._moves[key] = self._move(action)
        # Activations are read once, by the step that made them.
        return known + self._sums(action) if summed and action.tensor < 0 else known

    def _sums(self, action: Action | Outline) -> float:
        """Seconds that checksums of parameters and states add to what moves these to or from a disk."""
        disk, second = self.machine.disk, self.machine.host_bandwidth / SUM_TRAFFIC
        if disk is None:
            return 0.0
        if action.verb is Verb.UPDATE and action.lane is Lane.STORAGE_UPDATE:
            # A process on the host reads, holds against, updates, sums up and writes.
            return 0.0 if disk.update_rate is not None else 2 * self.states_share * action.nbytes / second
        if action.verb not in (Verb.READ, Verb.WRITE):
            return 0.0
        calls = disk.reads if action.verb is Verb.READ else disk.writes
        # The thread that makes a call sums up its bytes: where several are in flight, beside the other calls.
        return (action.nbytes if calls.depth == 1 else min(action.nbytes, calls.block)) / second

    def _move(self, action: Action | Outline) -> float:
        """Seconds of a transfer, an update, a read or a write."""
        if isinstance(action, Outline) and action.pieces:
            return sum(self._move(action._replace(nbytes=piece, pieces=())) for piece in action.pieces)
        nbytes, machine = action.nbytes, self.machine
        match action.verb:
            case Verb.LOAD | Verb.STORE if action.lane in (Lane.DISK_WRITE, Lane.DISK_READ):
                return self._to_storage(action)
            case Verb.FETCH | Verb.RELOAD | Verb.LOAD:
                return machine.h2d.seconds(nbytes)
            case Verb.OFFLOAD:
                return machine.leaving.seconds(nbytes)
            case Verb.LAND | Verb.STORE:
                return machine.d2h.seconds(nbytes)
            case Verb.ACCUMULATE:
                # Copy and sum are jobs of one lane: the one staging buffer keeps them one after the other.
                return machine.d2h.seconds(nbytes) + ADD_TRAFFIC * nbytes / machine.host_bandwidth
            case Verb.UPDATE if action.lane is Lane.STORAGE_UPDATE:
                return self._beside_storage(action)
            case Verb.UPDATE:
                # Where the device is the host's processor, what is on it is updated as at home.
                if action.lane is Lane.COMPUTE or (action.lane is Lane.DEVICE_UPDATE and machine.device_kind != "cpu"):
                    return self.device_update_seconds(action.block, nbytes)
                return self.update_seconds(action.block, nbytes) * (self.apart if action.apart else 1.0)
            case Verb.READ:
                return self._disk(action).read.seconds(nbytes)
        return self._disk(action).write.seconds(nbytes)

    def _coding(self, action: Action | Outline) -> float:
        """Seconds of making codes of an activation, or of reading them, and of copying its rest."""
        seconds = self.copying(action.rest) if action.rest else 0.0
        if action.bits:
            tensor = self._tensor(action)
            codes = Codes.of(tensor.nbytes - action.rest, tensor.dtype, action.bits)
            seconds += self.coding(codes, encode=action.verb is Verb.ENCODE)
        return seconds

    def copying(self, nbytes: int) -> float:
        """Seconds of copying ``nbytes`` from one place on the device to another: each is read and written."""
        return self._with_host(MEMORY_TRAFFIC * nbytes / self.machine.device_bandwidth)

    def coding(self, codes: Codes, *, encode: bool) -> float:
        """Seconds of making ``codes`` on the device (``encode``), or of reading them: as measured
        (``coding_signature``), or from the bytes that are touched and the kernels that are started."""
        traffic, kernels = (_ENCODING if encode else _DECODING)[codes.bits]
        kernels *= codes.pieces
        known = self.machine.op_seconds.get(coding_signature(codes, encode=encode))
        if known is not None:
            return known
        touched = codes.numel * (traffic + codes.itemsize) + codes.nbytes
        return self._with_host(touched / self.machine.device_bandwidth, kernels)

    def _to_storage(self, action: Action | Outline) -> float:
        """Seconds of a part of a chunk on its way to who updates it beside the storage, or from there: over the link of
        the disk, or from memory to memory where that is a process on the host. Where the largest elements go, they are
        chosen first."""
        disk, bandwidth = self._disk(action), self.machine.host_bandwidth
        chosen = CHOICE_TRAFFIC * action.chosen_from / bandwidth
        if disk.update_rate is None:
            return chosen + MEMORY_TRAFFIC * action.nbytes / bandwidth
        return chosen + (disk.write if action.verb is Verb.LOAD else disk.read).seconds(action.nbytes)

    def _beside_storage(self, action: Action | Outline) -> float:
        """Seconds of an update of a chunk beside the storage. A process on the host is told, and reads the states,
        updates and writes them one after the other."""
        disk = self._disk(action)
        if disk.update_rate is not None:
            return action.nbytes / disk.update_rate
        states = round(self.states_share * action.nbytes)
        moved = (disk.read.seconds(states) + disk.write.seconds(states)) / disk.alternation
        return disk.order_seconds + moved + self.update_seconds(action.block, action.nbytes)

    def _tensor(self, action: Action | Outline) -> Tensor:
        visits = self.trace.visits
        place = bisect_right(visits, action.tensor, key=lambda visit: visit.first_tensor) - 1
        return self.trace.segments[visits[place].segment].tensors[action.tensor - visits[place].first_tensor]

    def _disk(self, action: Action | Outline) -> Disk:
        if self.machine.disk is None:
            raise ConfigError(
                f"the plan needs a disk ({action.what}) and machine {self.machine.name} has none; give the machine a "
                f"disk or plan without one"
            )
        return self.machine.disk

    def _cost(self, work: Work) -> Cost:
        machine = self.machine
        known = machine.op_seconds.get(work.signature)
        if known is not None:
            return Cost(known, Source.MEASURED)
        if not work.flops and not work.nbytes:
            return Cost(VIEW_SHARE * machine.launch_seconds, Source.HOST)
        rate, note = self._rate(work.dtype) if work.flops else (1.0, "")
        seconds = max(work.flops / rate, work.nbytes / machine.device_bandwidth)
        return Cost(self._with_host(seconds), Source.ROOFLINE, note)

    def _with_host(self, kernel: float, launches: int = 1) -> float:
        host = launches * self.machine.launch_seconds
        return host + kernel if self.machine.device_kind == "cpu" else max(host, kernel)

    def _rate(self, dtype: str) -> tuple[float, str]:
        """FLOP/s for arithmetic in ``dtype``, and a note if they are another dtype's."""
        known = self._rates.get(dtype)
        if known is None:
            known = self._rates[dtype] = self._find_rate(dtype)
        return known

    def _find_rate(self, dtype: str) -> tuple[float, str]:
        rates = self.machine.compute
        if dtype in rates:
            return rates[dtype], ""
        slowest = min(rates, key=lambda name: rates[name])
        stand_in = next((name for name in _SUBSTITUTES.get(dtype, ()) if name in rates), slowest)
        return rates[stand_in], f"{self.machine.name} states no rate for {dtype}: that of {stand_in} is used"


@final
class _Sums:
    """Sums of a figure over ranges of ops: prefix sums for each segment, and for the visits before each visit."""

    def __init__(self, trace: Trace, figures: list[float]) -> None:
        self._starts = [visit.first_op for visit in trace.visits]
        self._prefixes: list[list[float]] = []
        for segment in trace.segments:
            sums = [0.0]
            for op in segment.ops:
                sums.append(sums[-1] + figures[op.work])
            self._prefixes.append(sums)
        self._of_visit = [self._prefixes[visit.segment] for visit in trace.visits]
        self._before = [0.0]
        for prefix in self._of_visit:
            self._before.append(self._before[-1] + prefix[-1])

    @property
    def total(self) -> float:
        """The sum over all ops."""
        return self._before[-1]

    def between(self, first: int, last: int) -> float:
        """The sum over the ops ``first`` to ``last`` (not included)."""
        if first >= last:
            return 0.0
        starts = self._starts
        a = bisect_right(starts, first) - 1
        b = bisect_right(starts, last - 1, lo=a) - 1
        from_first = self._of_visit[a][first - starts[a]]
        to_last = self._of_visit[b][last - starts[b]]
        # Inside one visit without the visits before: no digits lost to a large sum.
        return to_last - from_first if a == b else (self._before[b] - self._before[a]) + to_last - from_first
