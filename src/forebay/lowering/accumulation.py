"""How many bytes it takes to accumulate the gradients of several micro-batches block by block. No torch.

While one micro-batch passes a block the others wait in front of it or behind it (``runtime/accumulate.py``). Each of
those holds what a forward or a backward that stands still there holds: activations saved so far, and what goes from
block to block. So n micro-batches take, on the device,

    what one takes under the plan                                     device_bound
    + the gradients of one block, which stay until all are summed up  gathered
    + those that stay and that backward would use up, until then too  adding_up
    + the gradient that a block's backward began with                 _entering: autograd is handed it, and keeps it
    + (n - 1) x (what waits where most waits, and its inputs)         _waiting

On the host and on disk each further micro-batch takes as much as the plan has there for the activations of one; and
gradients of parameters that several blocks use wait on the host, one for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from forebay.lowering.arrangement import positions
from forebay.lowering.index import NEVER
from forebay.lowering.liveness import Liveness, device_bound
from forebay.lowering.lives import Profile
from forebay.memory import Kind
from forebay.plans import Accumulation, Plan, used_up
from forebay.trace import Phase, Trace

__all__ = ["accumulation_of", "parked_nbytes"]


def accumulation_of(trace: Trace, plan: Plan, *, liveness: Liveness | None = None) -> Accumulation | None:
    """The bytes that ``forebay.accumulate`` takes under ``plan``, whatever the timing and the routes; None where all
    blocks stay on the device, so that it is the loop. ``liveness`` is that of the trace, if the caller has it."""
    streamed = _streamed(plan)
    blocks = [b for b in trace.model.blocks if b.name in streamed]
    if all(b.held for b in blocks):
        return None
    liveness = liveness or Liveness(trace)
    pairs = [(one, one.profile(plan.recompute, plan.activations)) for one in (liveness, *liveness.extremes)]
    parked = max(_parked(one.trace, streamed) for one, _ in pairs)
    gathered = max(b.gradient_nbytes for b in blocks)
    early = frozenset(used_up(plan.placements, resident=True))
    adding_up = sum(b.gradient_nbytes for b in trace.model.blocks if b.name in early)
    entering = max(_entering(one.trace, profile, streamed) for one, profile in pairs)
    streaming, locked = plan.streaming, trace.device == "cuda"
    return Accumulation(
        device=device_bound(trace, plan, liveness=liveness) + gathered + adding_up + entering,
        device_further=max(_waiting(one, profile, streamed) for one, profile in pairs) + trace.input_nbytes,
        host=plan.host + parked + streaming.disk_window,
        host_further=parked + streaming.host_activations,
        disk=plan.disk + streaming.disk_window,
        disk_further=streaming.disk_activations,
        # What moves passes through memory that is page-locked where the device has a link of its own.
        pinned=plan.pinned + (streaming.disk_window if locked else 0),
        pinned_further=streaming.host_activations if locked else 0,
        leaves=trace.leaves,
    )


def parked_nbytes(trace: Trace, plan: Plan) -> int:
    """Bytes of gradients that each micro-batch sends to the host and has back, before they are complete."""
    return _parked(trace, _streamed(plan))


def _streamed(plan: Plan) -> frozenset[str]:
    return frozenset(p.block for p in plan.placements if not p.resident)


def _turns(trace: Trace, profile: Profile, streamed: frozenset[str]) -> Iterator[int]:
    """The positions at which a micro-batch may wait: in forward in front of each block that is not at home on the
    device, in backward between any two visits once the last such block is behind."""
    now = ""
    for run in profile.runs:
        block = trace.visits[run.visit].block
        if trace.visits[run.visit].phase is Phase.FORWARD and not run.again and block in streamed and block != now:
            if now:
                yield run.position
            now = block
    last, passed, begun, again = now, False, False, False
    for run in profile.runs:
        visit = trace.visits[run.visit]
        if not run.again and visit.phase is Phase.FORWARD:
            continue
        # Also in front of what the model itself computed before that block: it goes with the block before.
        begun = begun or (passed and visit.block != last)
        passed = passed or visit.block == last
        # What was made again for a visit is there when it begins, and a micro-batch does not stop in between.
        if begun and not again:
            yield run.position
        again = run.again


def _waiting(one: Liveness, profile: Profile, streamed: frozenset[str]) -> int:
    levels, outputs = profile.levels.values(), _outputs(one, profile)
    most = 0
    for place in _turns(one.trace, profile, streamed):
        # In a trace the outputs of the model are there to the end; a loss function lets go of all but the loss.
        gone = sum(nbytes for until, nbytes in outputs if place >= profile.forward and until < place)
        most = max(most, sum(level[place] for level in levels) - gone)
    return most


def _outputs(one: Liveness, profile: Profile) -> list[tuple[int, int]]:
    """Of what only the caller of the model holds in the end: until when autograd holds it too, and its bytes."""
    index = one.index
    place = positions(profile.runs, index.ops)
    again = [number for number, visit in enumerate(one.trace.visits) if visit.block in profile.recompute]
    kept = {root for number in again if one.trace.visits[number].phase is Phase.FORWARD for root in index.kept(number)}
    found = []
    for number, root in index.roots.items():
        ended = root.drop in (NEVER, index.ops - 1) and place[root.birth] < profile.forward
        if not ended or root.completes != NEVER or number in kept:
            continue
        until = root.released if one.trace.visits[root.visit].block in profile.recompute else root.unsave
        if until not in (NEVER, index.ops - 1) or not root.saved or root.visit in again:
            found.append((place[until] if until != NEVER else 0, root.nbytes))
    return found


def _entering(trace: Trace, profile: Profile, streamed: frozenset[str]) -> int:
    """The most bytes of gradients that are there where the backward of a block begins."""
    levels = [level for kind, level in profile.levels.items() if kind in (Kind.TEMPORARY, Kind.GRADIENT)]
    places = (p for p in _turns(trace, profile, streamed) if p >= profile.forward)
    return max((sum(level[p] for level in levels) for p in places), default=0)


def _parked(trace: Trace, streamed: frozenset[str]) -> int:
    """Bytes of gradients to which several parts of one forward contribute: of tied parameters, and of blocks that are
    come to more than once."""
    came: dict[str, int] = {}
    now = ""
    for visit in trace.visits:
        if visit.phase is Phase.FORWARD and visit.block and visit.block != now:
            came[visit.block] = came.get(visit.block, 0) + 1
            now = visit.block
    several = [b for b in trace.model.blocks if came.get(b.name, 0) > 1]
    tied = [[p for p in b.parameters if p.aliases] or b.parameters for b in several]
    return sum(p.nbytes for parameters in tied for p in parameters if p.trainable)
