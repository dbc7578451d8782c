"""``smart-infinity``: states are on disk and updated there; what crosses its link are gradients and parameters.

Jang, Song, Jung, Park, Kim and Lee, "Smart-Infinity: fast large language model training using near-storage processing
on a real system", HPCA 2024 (arXiv 2403.06664). With optimizer states on SSDs, the update reads and writes all of them
over the one link that the SSDs share: 6M bytes in and as many out for an fp16 model of M bytes. SmartUpdate moves
the update into the drives, whose FPGAs read states over a link of their own: gradients go to the drives, updated
parameters come back, and the rest stays. A handler overlaps transfers with updates through buffers that are used in
turn. SmartComp, for drives so many that the link is in the way again, sends the elements of a gradient that are largest
in magnitude, with their places; the drive puts zeros for the others and updates as ever.

Who updates beside the storage is a process of its own here (``runtime.storage_worker``), which has the file of states
to itself: a drive of the usual kind has no processor for it. It computes what the host would, bit for bit. Where the
machine says what its drives update themselves (``Disk.update_rate``), the plan is priced for those.

``smart-infinity`` is SmartUpdate alone, with the numbers of every other policy. ``smart-infinity-compressed`` is the
same with SmartComp, which makes other numbers, so it is asked for by its name, and plan and report say it. Of every
hundred elements one is sent (``Streaming.gradient_density`` of the plan): 2 % of the bytes in fp32, with the places.

Ours departs in four things.

- Gradients land on the host, where they can be clipped, and go to the storage when the step is asked for; the paper has
  them there before, under backward. So the largest elements are chosen on the host too, which the paper has the GPU do:
  of each parameter by itself (of what of it is in one chunk), where the authors' code takes those of a group of
  parameters together.
- What is not sent is added to the gradient of the next step (error feedback: Seide et al., Interspeech 2014; Aji and
  Heafield, EMNLP 2017, who drop 99 % of the elements so; Karimireddy et al., ICML 2019), for which the host keeps an
  fp32 number an element. The authors' code drops it.
- Parameters are at home on the host, and on disk where that has no room for them (then by way of the host, in either
  direction); the paper has them on the drives. Activations stay on the device or run again, where the paper's are on
  the host.
- Without drives that compute, the process and the rest of the program share the processor, and no byte less goes to the
  disk: what is gained then is a plan to compare, and host memory.

Everything streams, as in ``zero-infinity``, which the paper builds upon, and updates are over before the next forward
begins. Several devices are not planned for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from forebay.errors import CannotServe, DoesNotFit
from forebay.layout import has_residual
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.homes import at_storage, least_at_storage, on_host
from forebay.planners.nearest import larger, refused
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.planners.states.drafting import cannot_serve, finished, serial, streamed
from forebay.plans import Plan, Streaming
from forebay.remedies import Remedy

__all__ = ["DENSITY", "smart_infinity", "smart_infinity_compressed"]

NAME, COMPRESSED = "smart-infinity", "smart-infinity-compressed"

DENSITY: Final = 0.01
"""Share of the elements of a gradient that are sent."""

WHY_A_DISK: Final = "updates optimizer states where they are stored, on disk"


def smart_infinity(problem: Problem, bench: Bench | None = None) -> Plan:
    """Everything streams; states on disk, updated there. Raises ``CannotServe`` without a disk, or for an optimizer
    that keeps no states, and ``DoesNotFit``."""
    return _made(bench or Bench(problem), NAME, None)


def smart_infinity_compressed(problem: Problem, bench: Bench | None = None) -> Plan:
    """The same with the largest elements of gradients, which changes the numbers. Raises what that raises, and
    ``CannotServe`` for parameters of more bits than what is not sent is kept in."""
    return _made(bench or Bench(problem), COMPRESSED, DENSITY)


def _made(bench: Bench, name: str, density: float | None) -> Plan:
    _expect_served(bench, name, compressed=density is not None)
    house = partial(_at_storage, density=density)
    draft = _sent(streamed(bench, house), density)
    if not bench.problem.limit(Tier.DISK):
        raise _without_a_disk(bench, name, draft)
    try:
        settled = at_storage(bench, draft)
    except DoesNotFit as error:
        raise refused(bench, error, least_at_storage(bench, draft), house=house) from None
    return finished(bench, name, settled, _said(bench, density))


def _at_storage(bench: Bench, draft: Draft, density: float | None) -> Draft:
    return at_storage(bench, _sent(on_host(bench, draft), density))


def _sent(draft: Draft, density: float | None) -> Draft:
    """``draft`` with updates behind backward and such a share of each gradient sent (None: all of it)."""
    settled = serial(draft)
    return replace(settled, streaming=replace(settled.streaming, gradient_density=density))


def _expect_served(bench: Bench, name: str, *, compressed: bool) -> None:
    """Raises ``CannotServe`` for an optimizer without states, for gradients that are used up in backward, and for those
    of which a part cannot wait."""
    sizer = bench.sizer(Streaming().update_chunk)
    if not any(sizer.state_nbytes(block.name) for block in bench.model.blocks):
        why = "updates optimizer states where they are stored, and this optimizer keeps none"
        raise cannot_serve(name, why, "zero-infinity or auto")
    if bench.problem.update == "backward":
        why = "has gradients updated beside the storage, and update='backward' uses them up on the host"
        raise cannot_serve(name, why, "zero-infinity, or this one with update='step'")
    if bench.problem.disk_copies > 1:
        why = "updates optimizer states where they lie, and crash_safe has updates write beside the last checkpoint"
        raise cannot_serve(name, why, "zero-infinity, or this one without crash_safe")
    wide = [p.name for b in bench.model.blocks for p in b.parameters if p.trainable and not has_residual(p)]
    if compressed and wide:
        why = f"keeps in fp32 what of a gradient is not sent, and {wide[0]} is trained in more bits"
        raise cannot_serve(name, why, NAME)


def _without_a_disk(bench: Bench, name: str, draft: Draft) -> CannotServe:
    disk = _disk_for(bench, draft)
    return cannot_serve(name, f"{WHY_A_DISK}, and no disk is allowed", "zero-offload or auto", *disk)


def _disk_for(bench: Bench, draft: Draft) -> tuple[Remedy, ...]:
    """The disk on which the states of ``draft`` have room; nothing where it is the host that is too small."""
    try:
        nbytes = bench.arenas(at_storage(bench, draft, any_disk=True)).disk
    except DoesNotFit:
        return ()
    return (larger(bench.problem, Tier.DISK, nbytes),)


def _said(bench: Bench, density: float | None) -> str:
    machine = bench.problem.machine
    within = machine is not None and machine.disk is not None and machine.disk.update_rate is not None
    by = "the drives themselves" if within else "a process of its own, which shares the processor"
    sent = "gradients" if density is None else f"the largest {100 * density:.4g} % of each gradient, with their places,"
    return f"states are on disk and updated there, by {by}: {sent} go there, parameters come back"
