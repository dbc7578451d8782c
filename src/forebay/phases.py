"""How many bytes each tier holds while a model is loaded, trained, evaluated, saved and resumed. No torch.

A phase has two parts. What the *ledgers* count: the arenas, the slots, the files and, on the device, what the passes
make. And what is *beside* them: host memory that loading and saving pass bytes through and that no budget counts. The
second is small (at most about one block) and short, but it is there, so it is said.

Not counted anywhere: the interpreter and its libraries, the page cache (files of weights are mapped), what the caller
holds: a model that was built with real weights (build it on the meta device), or a ``state_dict`` of the whole model or
optimizer (load it with ``mmap=True``), and a parameter that transformers puts together of several tensors of a file, or
takes apart for an export (``checkpoint.conversion``): a trace does not know of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forebay.arenas import arenas_of, home_tier
from forebay.layout import PAGE, STATE_ITEMSIZE, align, in_order, needs_master, state_layout
from forebay.memory import Tier
from forebay.model import Block, Parameter
from forebay.plans import Placement, Plan
from forebay.states import Masters, masters_for
from forebay.trace import Phase, Trace
from forebay.units import MiB

__all__ = ["PASSING", "PHASES", "PhasePeaks", "phases"]

PHASES = ("initialize", "load", "step", "eval", "save", "resume")
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

    ``initialize``  ``forebay.initialize`` of a model built on the meta device: ``standing``; beside, the values of one
                block (of a layer in tiles, all of them), and ``_loading``.
    ``load``    ``forebay.load`` into a model built on the meta device: ``standing``; beside, ``_loading``.
    ``eval``    a forward without gradients, after ``zero_grad``: ``standing``, inputs and workspaces, and the forward's
                activations where autograd saves none of them, while the output of the pass before is still held.
    ``save``    the model written as ``from_pretrained`` reads it (``forebay.export`` but for ``dcp``, which writes one
                tensor at a time): ``standing``; beside, ``_saving``. ``forebay.save`` takes what ``resume`` takes.
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
    accelerated = trace.device != "cpu"
    loading = max((_loading(b, accelerated=accelerated) for b in pairs), default=0)
    drawn = max((_initializing(b, accelerated=accelerated) for b in pairs), default=0)
    passing = PASSING if accelerated and _is_any_there(pairs, trace) else 0
    there = [b.halving for b in pairs if b.placement.resident and accelerated]
    halving = max(there, default=0)
    joined = masters_for(trace.state_names, trace.model.trained_dtypes) is Masters.LOWER
    joining = PASSING if joined else 0
    saving = max((_saving(b, p, accelerated=accelerated) for b in pairs for p in b.block.parameters), default=0)

    def peaks(device: int, beside: int = 0) -> PhasePeaks:
        return PhasePeaks(device, step[Tier.HOST], step[Tier.PINNED], step[Tier.DISK], beside)

    return {
        "initialize": peaks(standing + halving, drawn),
        "load": peaks(standing + halving, loading),
        "step": peaks(step[Tier.DEVICE]),
        "eval": peaks(standing + beside_model + forward_peak(trace) + trace.held_nbytes),
        "save": peaks(standing + halving, max(passing, saving)),
        "resume": peaks(standing + halving, passing + max((_resuming(b, joining) for b in pairs), default=joining)),
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
    """A block with its placement, and what reading or writing its masters takes beside the arenas."""

    def __init__(self, block: Block, placement: Placement, state_names: tuple[str, ...], plan: Plan) -> None:
        self.block = block
        self.placement = placement
        streaming = plan.streaming
        layout = state_layout(block, state_names, streaming.update_chunk, streaming.masters)
        self.has_masters = layout.has_masters
        # A master is read and written a piece at a time; one that is kept as halves is put together and taken apart:
        # it, what is spare, what keeps ties, and what is read or written.
        pieces = [piece for chunk in layout.chunks for piece in chunk.pieces if needs_master(piece.parameter)]
        self.piece = STATE_ITEMSIZE * max((piece.stop - piece.start for piece in pieces), default=0)
        self.halving = _PIECES * self.piece if layout.masters is Masters.LOWER else 0


def _loading(homed: _Homed, *, accelerated: bool) -> int:
    """Bytes beside the arenas while one block is filled (``checkpoint.fill``, ``Store.fill``).

    Its tensors are mapped from the file one after the other and written where they are at home, states on disk through
    the ring of updates. What does not lie in order is copied before; what has another dtype there is converted on its
    way to an accelerator, ``PASSING`` bytes of parameters and a piece of a master at a time.
    """
    ordered = max((p.nbytes for p in homed.block.parameters if not in_order(p)), default=0)
    part = min(PASSING, max((p.nbytes for p in homed.block.parameters), default=0))
    converted = max(part, homed.piece) if homed.placement.resident and accelerated else 0
    return ordered + max(converted, homed.halving)


def _initializing(homed: _Homed, *, accelerated: bool) -> int:
    """Bytes beside the arenas while one block is initialised: its values, and a byte for each of ``PASSING`` elements
    at most of which it is asked whether one is no number, and for the answer, or what writing the values takes."""
    parameters = homed.block.parameters
    asked = 1 + min(PASSING, max((p.numel for p in parameters), default=0))
    return sum(p.nbytes for p in parameters) + max(asked, _loading(homed, accelerated=accelerated))


def _resuming(homed: _Homed, joining: int) -> int:
    """Bytes beside the arenas while the masters of a block are read: a piece of one that is kept as halves is read into
    memory of its own, out of ``joining`` bytes where it was saved as halves, and taken apart behind that."""
    return max(joining + homed.piece, homed.halving) if homed.halving else joining


def _saving(homed: _Homed, parameter: Parameter, *, accelerated: bool) -> int:
    """Bytes on the host, beside the arenas, while one tensor is written, part by part (``Store.full_precision_parts``),
    each of which is there until the next one is.

    A master is read from the block's states piece by piece, what has none in parts of ``PASSING``; what is in memory is
    written as it is there, what is on an accelerator or on disk (in whole pages) is copied. A tensor whose elements do
    not lie in order is gathered, and copied once more to be written.
    """
    there = homed.placement.resident and accelerated
    on_disk = home_tier(homed.placement) is Tier.DISK
    if needs_master(parameter) and homed.has_masters:
        whole = STATE_ITEMSIZE * parameter.numel
        passing = max(homed.halving, 2 * homed.piece if there else 0)
        return passing if in_order(parameter) else whole + max(homed.halving, whole)
    part = min(PASSING, parameter.nbytes) if in_order(parameter) else parameter.nbytes
    copied = _read(parameter, part) if on_disk else part
    if not in_order(parameter):
        return copied + parameter.nbytes
    return (1 + (part < parameter.nbytes)) * copied if on_disk or there else 0


def _read(parameter: Parameter, nbytes: int) -> int:
    """Bytes of the pages that so many bytes of a parameter are in."""
    first = parameter.offset // PAGE * PAGE
    return align(parameter.offset + nbytes, PAGE) - first
