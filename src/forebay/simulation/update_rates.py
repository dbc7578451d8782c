"""How fast updates go: bytes/s on the host, beside the storage, from one copy of a block to another. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from forebay.layout import needs_master, states_nbytes, touched_nbytes, with_masters
from forebay.machine import Machine
from forebay.model import Block, Parameter
from forebay.simulation.device_updates import bf16_rate, device_update_rate, ops_of
from forebay.states import Masters, Reach, form_of, plain_name, reach_of, update_kind
from forebay.trace import Trace
from forebay.workspaces import FUSED, LION

__all__ = [
    "APART",
    "apart",
    "kept",
    "rate_on_device",
    "rates_by_block",
    "states_share",
    "storage_rate",
    "touched",
    "update_rate",
]

APART: Mapping[str, float] = MappingProxyType(
    {"float32": 1.2, "8bit": 1.04, "4bit": 1.1, "rows": 1.45, "orthogonal": 1.0, "other": 1.0}
)
"""By the form of the moments: how many times as long an update takes that reads one copy of a block and writes another
as one in place. AdamW, one thread of an EPYC 9004, 8M elements, medians in nanoseconds an element: 1.09 beside 0.93 in
place (bf16 with fp32 masters), 0.94 beside 0.76 (fp32); with moments in codes the cores bind (docs/log.md, 2026-11-22).
Factored states (``rows``) are copied first and updated there: a matrix of 16M elements, two threads of an EPYC, 1.53
(fp32) and 1.38 (bf16 with fp32 masters; docs/log.md, 2026-11-28). Of Muon products of matrices take all the time, 0.99
(docs/log.md, 2026-11-29). Forms that nobody has measured are taken for fp32."""

FACTORED: Mapping[str, float] = MappingProxyType(
    {"adafactor": 1.15, "adafactor-torch": 9.2, "adafactor-transformers": 3.7, "came": 5.3}
)
"""By the name of the optimizer: how many times as long an element with factored states takes on the host as one of
AdamW with moments in fp32. Ours has kernels, the others are torch's ops; of torch's own the norms of columns take more
than half. A matrix of 16M elements, two threads of an EPYC: between two days on which AdamW took 0.63 and 0.44 ns an
element (docs/log.md, 2026-11-28 and 29)."""

HOST_FLOPS = 4e11
"""FLOP/s in bf16 of a host beside a device of its own, which nobody measures: between what two cores of an EPYC reach
with instructions for bf16 and what they reach in fp32, without (docs/log.md, 2026-11-29)."""


def update_rate(trace: Trace, machine: Machine, masters: Masters) -> float:
    """Bytes/s of an update on the host: those of the bytes, or what as many elements a second move where cores bind.

    With the lower halves of masters an element is taken to be updated in the time that it takes with whole ones: it
    moves a tenth less, and on two cores of an EPYC, which bind, took 0.93 to 1.02 times as long (docs/log.md,
    2026-11-27).

    Where nobody has measured states of few bits, an element with them takes as long as one whose states are fp32. The
    kernels have more instructions for fewer bytes: on two cores of an EPYC 0.8 to 0.9 times as many elements a second
    as with fp32 moments (docs/log.md, 2026-11-21).
    """
    elements = sum(block.trainable_numel for block in trace.model.blocks)
    if not elements:
        return machine.update_rate
    blocks, states = trace.model.blocks, trace.state_names
    share = touched(blocks, states, masters) / touched(blocks, states, Masters.WHOLE)
    return _rate_of_whole(trace, machine, elements) * share


def _rate_of_whole(trace: Trace, machine: Machine, elements: int) -> float:
    blocks, states = trace.model.blocks, trace.state_names
    own = touched(blocks, states, Masters.WHOLE) / elements
    known = machine.update_elements.get(update_kind(states))
    if known is not None:
        return min(machine.update_rate, known * own)
    match reach_of(states):
        case Reach.MATRICES:
            return _muon_rate(blocks, states, machine)
        case Reach.WHOLES | Reach.PARTS:
            return machine.update_rate * _factored_rate(trace)
        case Reach.PIECES:
            moments = tuple(plain_name(s) for s in states if form_of(s).name != "scale")
            return machine.update_rate * own * elements / touched(blocks, moments, Masters.WHOLE)
        case Reach.ELEMENTS if states in FUSED or states == LION:
            return machine.update_rate
        case Reach.ELEMENTS:
            return machine.update_rate * own * elements / _passed(trace)


def _passed(trace: Trace) -> float:
    """Bytes that torch's ops read and write in an update of all elements, one op after the other. A piece of a
    parameter is in caches meanwhile: they take about as long as a kernel does that moves as many (1.0 to 1.6 times, two
    threads of a Xeon, 16M elements; docs/log.md, 2026-11-30)."""
    trained = [p for block in trace.model.blocks for p in block.parameters if p.trainable]
    return sum(p.numel * ops_of(p, trace.state_names, Masters.WHOLE).nbytes for p in trained)


def _factored_rate(trace: Trace) -> float:
    """The bytes/s of an update with factored states on the host, over those of one with two moments in fp32."""
    states, usual = (
        touched(trace.model.blocks, names, Masters.WHOLE) for names in (trace.state_names, ("exp_avg", "exp_avg_sq"))
    )
    return states / usual / FACTORED.get(trace.optimizer, max(FACTORED.values()))


def rates_by_block(trace: Trace, machine: Machine) -> Mapping[str, tuple[float, float]]:
    """Of blocks by name, where one rate is not that of all: bytes/s of an update on the host, and on the device."""
    if reach_of(trace.state_names) is not Reach.MATRICES:
        return {}
    blocks = (block for block in trace.model.blocks if block.trainable_numel)
    return {block.name: _block_rates(block, trace.state_names, machine) for block in blocks}


def _block_rates(block: Block, states: tuple[str, ...], machine: Machine) -> tuple[float, float]:
    there = _muon_rate((block,), states, machine)
    cpu = machine.device_kind == "cpu"
    return there, there if cpu else device_update_rate((block,), states, machine, Masters.WHOLE)


def _muon_rate(blocks: Sequence[Block], states: tuple[str, ...], machine: Machine) -> float:
    """Bytes/s of an update of Muon by torch's ops on the host: by what they move and compute of matrices, and as long
    as with AdamW of all else."""
    flops = bf16_rate(machine) if machine.device_kind == "cpu" else HOST_FLOPS
    seconds = 0.0
    for streams, parameter in _streams(blocks, states, Masters.WHOLE):
        if parameter.orthogonal:
            ops = ops_of(parameter, states, Masters.WHOLE)
            seconds += parameter.numel * (ops.nbytes / machine.host_bandwidth + ops.flops / flops)
            seconds += ops.launches(parameter.numel) * machine.launch_seconds
        else:
            seconds += touched_nbytes(streams, parameter) / machine.update_rate
    return touched(blocks, states, Masters.WHOLE) / seconds


def rate_on_device(trace: Trace, machine: Machine, masters: Masters) -> float:
    """Bytes/s of an update on the device, by torch's ops. Where the device is the host's processor, what is on it is
    updated as at home: at the bytes/s of its memory."""
    blocks, states = trace.model.blocks, trace.state_names
    if machine.device_kind != "cpu":
        return device_update_rate(blocks, states, machine, masters) or machine.device_bandwidth
    reach = reach_of(states)
    if not (reach.takes_wholes and any(block.trainable_numel for block in blocks)):
        return machine.device_bandwidth
    if reach is Reach.MATRICES:
        return _muon_rate(blocks, states, machine)
    return machine.device_bandwidth * _factored_rate(trace)


def storage_rate(trace: Trace, machine: Machine, masters: Masters, on_host: float) -> float:
    """The most bytes/s of an update beside the storage: what it touches, with the states read before it and written
    after it; 0 without a disk. A process on the host, where an update makes ``on_host`` bytes/s, reads, updates and
    writes one after the other."""
    disk = machine.disk
    if disk is None:
        return 0.0
    if disk.update_rate is not None:
        return disk.update_rate
    moved = states_share(trace, masters) * (1 / disk.read.curve.best + 1 / disk.write.curve.best)
    return 1 / (1 / on_host + moved)


def states_share(trace: Trace, masters: Masters) -> float:
    """Bytes of states, over those that an update of them touches; 0 where nothing is trained."""
    of = trace.model.blocks, trace.state_names, masters
    over = touched(*of)
    return kept(*of) / over if over else 0.0


def touched(blocks: Iterable[Block], states: tuple[str, ...], masters: Masters) -> int:
    """Bytes that updates of ``blocks`` touch on the host (states, gradients, parameters), with an optimizer that keeps
    ``states``, and ``masters`` so."""
    return sum(touched_nbytes(streams, p) for streams, p in _streams(blocks, states, masters))


def kept(blocks: Iterable[Block], states: tuple[str, ...], masters: Masters) -> int:
    """Bytes of the ``states`` of ``blocks``, with ``masters`` that are kept so."""
    return sum(states_nbytes(streams, p) for streams, p in _streams(blocks, states, masters))


def apart(states: tuple[str, ...]) -> float:
    """``APART`` of an optimizer with ``states``."""
    factored = reach_of(states) in (Reach.PARTS, Reach.WHOLES)
    forms = {"rows"} if factored else {form_of(state).name for state in states} - {"scale"} or {"float32"}
    return max(APART.get(form, APART["float32"]) for form in forms)


def _streams(
    blocks: Iterable[Block], states: tuple[str, ...], masters: Masters
) -> Iterator[tuple[tuple[str, ...], Parameter]]:
    """Every parameter that is trained, with the streams that an update keeps for it."""
    for parameter in (p for block in blocks for p in block.parameters if p.trainable):
        yield (with_masters(states, masters) if needs_master(parameter) else states), parameter
