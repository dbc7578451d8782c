"""``smart-infinity``: states are on disk and updated there; what crosses its link are gradients and parameters.

Jang, Song, Jung, Park, Kim and Lee, "Smart-Infinity: fast large language model training using near-storage processing
on a real system", HPCA 2024 (arXiv 2403.06664). With optimizer states on SSDs, the update reads and writes all of them
over the one link that the SSDs share: 6M bytes in and as many out for an fp16 model of M bytes. SmartUpdate moves
the update into the drives, whose FPGAs read states over a link of their own: gradients go to the drives, updated
parameters come back, and the rest stays. A handler overlaps transfers with updates through buffers that are used in
turn. SmartComp sends the largest gradients only.

Who updates beside the storage is a process of its own here (``runtime.storage_worker``), which has the file of states
to itself: a drive of the usual kind has no processor for it. It computes what the host would, bit for bit. Where the
machine says what its drives update themselves (``Disk.update_rate``), the plan is priced for those.

Ours departs in four things.

- SmartComp makes other numbers and is not offered: gradients are sent whole.
- Gradients land on the host, where they can be clipped, and go to the storage when the step is asked for; the paper has
  them there before, under backward.
- Parameters are at home on the host, and on disk where that has no room for them (then by way of the host, in either
  direction); the paper has them on the drives. Activations stay on the device or run again, where the paper's are on
  the host.
- Without drives that compute, the process and the rest of the program share the processor, and no byte less goes to the
  disk: what is gained then is a plan to compare, and host memory.

Everything streams, as in ``zero-infinity``, which the paper builds upon, and updates are over before the next forward
begins. Several devices are not planned for.
"""

from __future__ import annotations

from forebay.errors import CannotServe, DoesNotFit
from forebay.memory import Tier
from forebay.planners.auto import refused
from forebay.planners.bench import Bench
from forebay.planners.homes import at_storage, least_at_storage
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import cannot_serve, finished, serial, streamed
from forebay.plans import Plan, Streaming
from forebay.remedies import Remedy
from forebay.units import format_bytes

__all__ = ["smart_infinity"]

NAME = "smart-infinity"


def smart_infinity(problem: Problem, bench: Bench | None = None) -> Plan:
    """Everything streams; states on disk, updated there. Raises ``CannotServe`` without a disk, or for an optimizer
    that keeps no states, and ``DoesNotFit``."""
    bench = bench or Bench(problem)
    sizer = bench.sizer(Streaming().update_chunk)
    if not any(sizer.state_nbytes(block.name) for block in bench.model.blocks):
        why = "updates optimizer states where they are stored, and this optimizer keeps none"
        raise cannot_serve(NAME, why, "zero-infinity or auto")
    if problem.update == "backward":
        why = "has gradients updated beside the storage, and update='backward' uses them up on the host"
        raise cannot_serve(NAME, why, "zero-infinity, or this one with update='step'")
    if problem.disk_copies > 1:
        why = "updates optimizer states where they lie, and crash_safe has updates write beside the last checkpoint"
        raise cannot_serve(NAME, why, "zero-infinity, or this one without crash_safe")
    draft = serial(streamed(bench))
    if not problem.limit(Tier.DISK):
        raise _without_a_disk(bench, draft)
    try:
        settled = at_storage(bench, draft)
    except DoesNotFit as error:
        raise refused(bench, error, least_at_storage(bench, draft)) from None
    return finished(bench, NAME, settled, _said(bench))


def _without_a_disk(bench: Bench, draft: Draft) -> CannotServe:
    why = "updates optimizer states where they are stored, on disk, and no disk is allowed"
    try:
        nbytes = bench.arenas(at_storage(bench, draft, any_disk=True)).disk
    except DoesNotFit:  # for the host: then no disk helps
        return cannot_serve(NAME, why, "zero-offload or auto")
    return cannot_serve(
        NAME, why, "zero-offload or auto", Remedy("disk", nbytes, 0, f"a disk of {format_bytes(nbytes)}")
    )


def _said(bench: Bench) -> str:
    machine = bench.problem.machine
    within = machine is not None and machine.disk is not None and machine.disk.update_rate is not None
    by = "the drives themselves" if within else "a process of its own, which shares the processor"
    return f"states are on disk and updated there, by {by}: gradients go there, parameters come back"
