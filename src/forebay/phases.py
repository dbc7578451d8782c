"""How many bytes each tier holds while a model is loaded, trained, evaluated, saved and resumed. No torch.

A phase has two parts. What the *ledgers* count: the arenas, the slots, the files and, on the device, what the passes
make. And what is *beside* them: host memory that loading and saving pass bytes through and that no budget counts. The
second is small (at most about one block) and short, but it is there, so it is said.

Not counted anywhere: the interpreter and its libraries, the page cache, and what the caller holds: a model that was
built with real weights (build it on the meta device), a ``state_dict`` of the whole model or optimizer (load it with
``mmap=True``), and the copies of one block after the other that ``optimizer.load_state_dict`` makes of states on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.arenas import arenas_of, home_tier
from forebay.layout import PAGE, STATE_ITEMSIZE, align, in_order, needs_master, state_layout
from forebay.memory import Tier
from forebay.plans import Placement, Plan
from forebay.states import Masters, masters_for
from forebay.trace import Block, Parameter, Phase, Trace
from forebay.units import MiB

__all__ = ["PASSING", "PHASES", "PhasePeaks", "phases"]

PHASES = ("load", "step", "eval", "save", "resume")
"""What can go on with a prepared model, in the order of a run."""

PASSING = 1 * MiB
"""Bytes of host memory through which what is on an accelerator passes to a checkpoint and from it."""

_PIECES = 4
"""Copies in fp32 of a piece of a parameter, at most, while a master that is kept as halves is read or written."""


@dataclass(frozen=True)
class PhasePeaks:
    """Bytes of every tier at its peak in one phase, as the ledgers count them.

    ``beside`` are bytes of host memory that come on top and that no ledger counts.
    """

    device: int
    host: int
    pinned: int
    disk: int
    beside: int = 0


def phases(trace: Trace, plan: Plan, step: Mapping[Tier, int]) -> dict[str, PhasePeaks]:
    """The peaks of every phase in ``PHASES`` under ``plan``. ``step`` are the peaks of a training step.

    Host, page-locked memory and disk are arenas and files that stand from ``prepare`` on (second copies of blocks that
    speculate too): they are the same in every phase. The device holds, where nothing runs, ``standing`` bytes: resident
    parameters and states, slots and buffers.

    ``load``    ``forebay.load`` into a model built on the meta device: ``standing``; beside, ``_loading``.
    ``eval``    a forward without gradients, after ``zero_grad``: ``standing``, inputs and workspaces, and the forward's
                activations where autograd saves none of them, while the output of the pass before is still held.
    ``save``    ``forebay.parameters`` written tensor by tensor: ``standing``; beside, ``_saving``.
                ``forebay.save`` takes what ``resume`` takes.
    ``resume``  ``forebay.resume``: ``standing``. States pass chunk by chunk, parameters block by block, straight
                between the files and where they are at home or the buffers that updates and fetches pass through;
                beside, ``PASSING`` for what is on an accelerator.

    Masters that are kept as halves are put together and taken apart a piece at a time, where they are at home. In a
    checkpoint that another plan has saved they may be halves, too: ``PASSING`` in which they are put together.
    """
    sizes = arenas_of(trace.model, plan, trace.state_names)
    standing = sizes.device_resident + sizes.device_slots + sizes.device_updates + trace.model.buffer_nbytes
    beside_model = trace.input_nbytes + trace.workspace_nbytes
    pairs = [_Homed(trace.model.block(p.block), p, trace.state_names, plan) for p in plan.placements]
    loading = max((_loading(b) for b in pairs), default=0)
    passing = PASSING if trace.device != "cpu" and _is_any_there(pairs, trace) else 0
    there = [b.halving for b in pairs if b.placement.resident and trace.device != "cpu"]
    halving = max(there, default=0)
    joined = masters_for(trace.state_names, trace.model.trained_dtypes) is Masters.LOWER
    joining = PASSING if joined else 0
    saving = [_saving(b, p, trace.device) for b in pairs for p in b.block.parameters]

    def peaks(device: int, beside: int = 0) -> PhasePeaks:
        return PhasePeaks(device, step[Tier.HOST], step[Tier.PINNED], step[Tier.DISK], beside)

    return {
        "load": peaks(standing + halving, loading),
        "step": peaks(step[Tier.DEVICE]),
        "eval": peaks(standing + beside_model + forward_peak(trace) + trace.held_nbytes),
        "save": peaks(standing + max((d for d, _ in saving), default=0), max((passing, *(h for _, h in saving)))),
        "resume": peaks(standing + halving, passing + max((joining, *(b.halving for b in pairs)))),
    }


def forward_peak(trace: Trace) -> int:
    """Bytes that the forward makes on the device where autograd saves nothing, whatever the routes: a root dies when it
    is dropped."""
    return max(map(_forward_peak, trace.routings))


def _forward_peak(trace: Trace) -> int:
    live = peak = 0
    sizes: dict[int, int] = {}
    for visit in trace.visits:
        if visit.phase is not Phase.FORWARD:
            continue
        segment = trace.segments[visit.segment]
        for op in segment.ops:
            for reference in op.outputs:
                if reference < 0 or segment.tensors[reference].root != reference:
                    continue  # from outside the visit, or a view: nothing new
                made = visit.resolve(reference)
                if made not in sizes:
                    sizes[made] = segment.tensors[reference].nbytes
                    live += sizes[made]
            peak = max(peak, live)
            for reference in op.dropped:
                live -= sizes.pop(visit.resolve(reference), 0)
    return peak


def _is_any_there(homed: Iterable[_Homed], trace: Trace) -> bool:
    """Whether anything that a checkpoint has is at home on the device."""
    return trace.model.buffer_nbytes > 0 or any(
        h.placement.resident or h.placement.states is Tier.DEVICE for h in homed
    )


class _Homed:
    """A block with its placement, and what reading all of its states takes beside the arenas."""

    def __init__(self, block: Block, placement: Placement, state_names: tuple[str, ...], plan: Plan) -> None:
        self.block = block
        self.placement = placement
        streaming = plan.streaming
        self.layout = state_layout(block, state_names, streaming.update_chunk, streaming.masters)
        # What is in memory is read where it is; what is on disk is read into a copy of the whole block's.
        self.state_copy = self.layout.nbytes if placement.states is Tier.DISK else 0
        # Masters kept as halves are put together and taken apart a piece at a time: each master, what is spare, what
        # keeps ties, and what is read or written.
        halves = self.layout.masters is Masters.LOWER
        pieces = [piece for chunk in self.layout.chunks for piece in chunk.pieces if needs_master(piece.parameter)]
        largest = max((piece.stop - piece.start for piece in pieces), default=0) if halves else 0
        self.halving = _PIECES * STATE_ITEMSIZE * largest
        if halves and home_tier(placement) is Tier.DISK:
            self.state_copy += align(block.nbytes, PAGE)


def _loading(homed: _Homed) -> int:
    """Bytes beside the arenas while one block is filled (``checkpoint.fill``, ``Store.fill``).

    All of the block's tensors are read, in the dtype of the file, which is taken to be the parameters'. For fp32
    masters the block's states are edited (a copy of them where they are on disk), and each value is widened; the one
    before is let go only when the next one is there.
    """
    masters = [STATE_ITEMSIZE * p.numel for p in homed.block.parameters if needs_master(p)]
    widened = max((a + b for a, b in zip([0, *masters], [*masters, 0], strict=True)), default=0)
    values = sum(p.nbytes for p in homed.block.parameters)
    return values + (homed.state_copy + widened + homed.halving if masters else 0)


def _saving(homed: _Homed, parameter: Parameter, device: str) -> tuple[int, int]:
    """Bytes on the device and on the host, beside the arenas, while one tensor is written (``Store.full_precision``).

    With a master: it is gathered from the block's states (a copy of all of them where they are on disk). Without: its
    bytes are cloned, from a copy in whole pages where the home is on disk. What is on an accelerator is gathered or
    cloned there first. A tensor whose elements do not lie in order is copied once more to be written.
    """
    master = needs_master(parameter) and homed.layout.has_masters
    written = STATE_ITEMSIZE * parameter.numel if master else parameter.nbytes
    source = 0
    if master:
        source = homed.state_copy
    elif home_tier(homed.placement) is Tier.DISK:
        first = parameter.offset // PAGE * PAGE
        source = align(parameter.offset + parameter.nbytes, PAGE) - first
    ordered = 0 if in_order(parameter) else written
    on_device = written if homed.placement.resident and device != "cpu" else 0
    halving = homed.halving if master else 0
    return on_device + (halving if on_device else 0), written + max(source, ordered) + halving
