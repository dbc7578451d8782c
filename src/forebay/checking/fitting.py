"""Whether a plan is one for this trace, and whether what it keeps in every tier all the time has room. No torch.

The bytes are worked out here from the placements, on purpose not by ``forebay.arenas``: an error there must show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from forebay.arenas import DISK_BLOCK, DISK_BOUNCE, DISK_SUM, GRADIENT_STAGING, UPDATE_RING
from forebay.checking.cells import residual_nbytes, storage_window, widened
from forebay.checking.words import listed
from forebay.errors import DoesNotFit, PlanInvalid
from forebay.layout import PAGE, StateLayout, state_layout
from forebay.machine import Machine
from forebay.memory import ALIGNMENT, Kind, Tier
from forebay.model import Block
from forebay.plans import Placement, Plan, Update, used_up
from forebay.states import masters_fault
from forebay.trace import Trace
from forebay.units import format_apart

__all__ = ["allowances", "check_names", "check_standing", "layouts", "standing", "staying_gradients"]

_LIMIT_NAMES = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.PINNED: "pinned", Tier.DISK: "the disk"}


def check_names(trace: Trace, plan: Plan) -> None:
    """Raises ``PlanInvalid`` if the plan was made for another model, or does not name every block once."""
    if plan.fingerprint and plan.fingerprint != trace.fingerprint:
        raise _invalid(
            "plan",
            f"this plan was made for another model, batch shape or optimizer: its fingerprint is {plan.fingerprint} "
            f"and the trace's is {trace.fingerprint}; make the plan again for this one",
        )
    blocks = {b.name: b for b in trace.model.blocks}
    named = Counter(p.block for p in plan.placements)
    missing = [name for name in blocks if name not in named]
    unknown = [name for name in named if name not in blocks]
    twice = [name for name, count in named.items() if count > 1]
    if unknown or missing:
        what = f"it has no block {listed(unknown)}" if unknown else f"the plan does not place block {listed(missing)}"
        raise _invalid((unknown or missing)[0], f"this plan was made for another model: {what}; make the plan again")
    if twice:
        raise _invalid(twice[0], f"the plan places block {listed(twice)} more than once; keep one placement")
    _check_recomputed(trace, blocks, plan)
    for placement in plan.placements:
        _check_slots(blocks[placement.block], placement, plan)
    for name in used_up(plan.placements, resident=False):
        _check_gradient_slot(blocks[name], plan)
    for block in trace.model.blocks:
        if block.beside:
            _check_beside(block, blocks, plan)


def _check_recomputed(trace: Trace, blocks: Mapping[str, Block], plan: Plan) -> None:
    """A block that is run again is there, is one module, finds what it found, and is named once."""
    for name in plan.recompute:
        if name not in blocks:
            raise _invalid(
                name, f"the plan recomputes block {name}, which the model does not have; make the plan again"
            )
        if blocks[name].module is None:
            raise _invalid(
                name,
                f"the plan recomputes block {name}, which is not one module whose forward could run again: its "
                f"parameters are used in several places, or while other blocks run; leave it out of recompute",
            )
        if name in trace.unrepeatable:
            raise _invalid(
                name,
                f"the plan recomputes block {name}, whose forward changes in place a tensor that is no buffer, so that "
                f"the second run would find the change, or takes a gradient itself (torch.autograd.grad); leave the "
                f"block out of recompute, or make such a tensor a buffer (register_buffer) and the plan again",
            )
        if plan.recompute.count(name) > 1:
            raise _invalid(name, f"the plan names block {name} twice in recompute; keep one")


def _check_slots(block: Block, placement: Placement, plan: Plan) -> None:
    """A streamed block passes through a slot that holds it, one from disk through a host slot as well."""
    if placement.parameters is Tier.DEVICE:
        return
    places = [("slot", plan.streaming.slots, block.nbytes)]
    if placement.parameters is Tier.DISK:
        places.append(("host slot", plan.streaming.host_slots, _align(block.nbytes, PAGE)))
    for what, sizes, needed in places:
        if max(sizes, default=0) < needed:
            raise _invalid(
                block.name,
                f"block {block.name} passes through a {what} of {needed} bytes and the largest has "
                f"{max(sizes, default=0)}; make a {what} larger, or place the block elsewhere",
            )


def _check_gradient_slot(block: Block, plan: Plan) -> None:
    """The gradients of a block that is updated in backward pass through a slot that holds all of them."""
    needed = sum(_align(p.nbytes, ALIGNMENT) for p in block.parameters if p.trainable)
    largest = max(plan.streaming.gradient_slots, default=0)
    if largest < needed:
        raise _invalid(
            block.name,
            f"the gradients of block {block.name}, which is updated in backward, take {needed} bytes and the largest "
            f"of gradient_slots has {largest}; make it larger, or set the block's update to step",
        )


def _check_beside(block: Block, blocks: Mapping[str, Block], plan: Plan) -> None:
    """What the model itself runs again together is there together: each of them that streams has a slot."""
    streamed = {p.block for p in plan.placements if p.parameters is not Tier.DEVICE}
    together = [blocks[name] for name in (block.name, *block.beside) if name in streamed]
    needed = sorted((b.nbytes for b in together), reverse=True)
    slots = sorted(plan.streaming.slots, reverse=True)
    if len(needed) > len(slots) or any(slot < nbytes for nbytes, slot in zip(needed, slots, strict=False)):
        raise _invalid(
            block.name,
            f"the model runs blocks {listed([b.name for b in together])} again together, in a checkpoint of its own: "
            f"they need slots of {needed} bytes and there are {slots}; give the plan more slots, or make the model's "
            "checkpoints smaller",
        )


def layouts(trace: Trace, plan: Plan) -> dict[str, StateLayout]:
    """How the states of every block are cut into chunks. Raises ``PlanInvalid`` if the chunks of a block do not cover
    each of its trainable elements exactly once, or if it keeps of masters what is not enough of them."""
    fault = masters_fault(plan.streaming.masters, trace.state_names, trace.model.trained_dtypes)
    if fault:
        raise _invalid("masters", f"{fault}; keep masters whole")
    cut = trace.state_names, plan.streaming.update_chunk, plan.streaming.masters
    made = {b.name: state_layout(b, *cut) for b in trace.model.blocks}
    for block in trace.model.blocks:
        reached = dict.fromkeys((p.name for p in block.parameters if p.trainable), 0)
        for chunk in made[block.name].chunks:
            for piece in chunk.pieces:
                if piece.start != reached.get(piece.parameter.name):
                    raise _invalid(piece.parameter.name, f"chunks of block {block.name} skip or repeat elements")
                reached[piece.parameter.name] = piece.stop
        for parameter in block.parameters:
            if parameter.trainable and reached[parameter.name] != parameter.numel:
                raise _invalid(parameter.name, f"chunks of block {block.name} do not cover {parameter.name}")
    return made


def standing(trace: Trace, plan: Plan, state: Mapping[str, StateLayout]) -> dict[Tier, int]:
    """Bytes of every tier that are there all the time under ``plan``; pinned: what would like to be page-locked.

    ``state`` are the ``layouts``. Gradients that stay on the device are none of them: ``staying_gradients``. A block
    that is updated ahead of its step has its parameters and states at home twice; what is on disk is there once more
    where a checkpoint may have one copy (``Streaming.disk_copies``). One that is updated on the device passes through a
    window there, and its states are copied from home and back. The gradients of those that are updated in backward
    share slots. One that is updated beside the storage passes through memory that the host shares with whoever does it.
    """
    blocks = {b.name: b for b in trace.model.blocks}
    pairs = [(blocks[p.block], p) for p in plan.placements]
    device = trace.model.buffer_nbytes + sum(plan.streaming.slots)
    if trace.device == "cuda":
        device += sum(t.nbytes for t in trace.sources if t.kind is Kind.INPUT)
    device += trace.workspace_nbytes
    device += plan.streaming.update_window if plan.updated(Update.DEVICE) else 0
    host = disk = 0
    passing = frozenset(used_up(plan.placements, resident=False))
    pinned = sum(_align(slot, ALIGNMENT) for slot in plan.streaming.gradient_slots if passing)
    ring = workspace = largest_gradient = moved = 0
    through_ring = False
    for block, placement in pairs:
        copies = 2 if placement.update is Update.AHEAD else 1
        states = sum(c.nbytes for c in state[block.name].chunks) * copies
        # On disk a checkpoint may have one copy more.
        more_there = plan.streaming.disk_copies - 1
        trained = [p for p in block.parameters if p.trainable]
        if placement.parameters is Tier.DEVICE:
            device += block.nbytes
        if placement.states is Tier.DEVICE:
            device += states
            continue
        # A block on the device whose states are elsewhere keeps a copy at home, on the host: updates happen there.
        home = 0 if placement.parameters is Tier.DISK else block.nbytes * copies
        pinned += home + sum(_align(p.nbytes, ALIGNMENT) for p in trained if block.name not in passing)
        largest_gradient = max((largest_gradient, *(p.nbytes for p in trained)))
        disk += _align(block.nbytes, PAGE) * (copies + more_there) if placement.parameters is Tier.DISK else 0
        if placement.states is Tier.DISK:
            disk += states + more_there * sum(c.nbytes for c in state[block.name].chunks)
            if placement.update is not Update.STORAGE:
                ring = max((ring, *(c.nbytes for c in state[block.name].chunks)))
        else:
            host += states
        if placement.update is Update.DEVICE:
            moved += states if placement.states is Tier.HOST else 0
            through_ring = through_ring or (placement.states is Tier.DISK and states > 0)
        elif placement.update is Update.STORAGE:
            continue
        elif trained:
            layout = state[block.name]
            workspace = max((workspace, *(widened(chunk, layout) for chunk in layout.chunks)))
    pinned += min(GRADIENT_STAGING, largest_gradient) + plan.streaming.host_activations + plan.streaming.disk_window
    if plan.streaming.checksums:
        host += DISK_SUM * (disk // PAGE)  # not of activations, which no later step reads
    disk += plan.streaming.disk_activations
    if any(p.parameters is Tier.DISK for _, p in pairs):
        pinned += sum(plan.streaming.host_slots)
    host += storage_window(plan, state) + residual_nbytes(plan, state)
    host += pinned + UPDATE_RING * ring + workspace + (DISK_BLOCK * DISK_BOUNCE if disk else 0)
    pinned += moved + UPDATE_RING * ring * through_ring
    return {Tier.DEVICE: device, Tier.HOST: host, Tier.PINNED: pinned, Tier.DISK: disk}


def staying_gradients(trace: Trace, plan: Plan) -> int:
    """Bytes of the gradients that accumulate on the device until their step."""
    staying = {p.block for p in plan.placements if p.gradients is Tier.DEVICE and p.update is Update.STEP}
    return sum(p.nbytes for b in trace.model.blocks if b.name in staying for p in b.parameters if p.trainable)


def allowances(machine: Machine, plan: Plan) -> dict[Tier, int]:
    """Bytes that the plan may take of every tier: the budget, or what the machine has where that is less or there is no
    budget; of the device without the part that is the loop's."""
    budget = plan.budget
    disk = machine.disk.capacity if machine.disk is not None else 0
    if budget.disk is None:
        disk = 0
    elif budget.disk.nbytes is not None:
        disk = min(disk, budget.disk.nbytes)
    return {
        Tier.DEVICE: max(0, min(budget.device, machine.device_capacity) - budget.device_reserve),
        Tier.HOST: min(budget.host or machine.host_capacity, machine.host_capacity),
        Tier.PINNED: min(budget.pinned or machine.pinned_capacity, machine.pinned_capacity),
        Tier.DISK: disk,
    }


def check_standing(stands: Mapping[Tier, int], machine: Machine, plan: Plan) -> None:
    """Raises ``DoesNotFit`` where what stands, or what the plan predicts, is more than is allowed, and ``PlanInvalid``
    where the plan predicts less than what stands. An arena that may not be page-locked is pageable instead, so of
    pinned memory only the plan's own figure counts."""
    needed, allowed = dict(stands), allowances(machine, plan)
    predicted = {Tier.DEVICE: plan.device, Tier.HOST: plan.host, Tier.DISK: plan.disk}
    for tier, figure in predicted.items():
        if figure < needed[tier]:
            raise _invalid(
                tier.value,
                f"the plan predicts a {tier.value} peak of {figure} bytes and what it places there takes "
                f"{needed[tier]}; make the plan again",
            )
    needed[Tier.PINNED] = plan.pinned
    for tier in Tier:
        figure = max(needed[tier], predicted.get(tier, 0))
        if figure > allowed[tier]:
            raise _too_much(tier, figure, allowed, machine, plan)


def _too_much(tier: Tier, needed: int, allowed: Mapping[Tier, int], machine: Machine, plan: Plan) -> DoesNotFit:
    limit = allowed[tier]
    if tier is Tier.DISK and machine.disk is None:
        what = f"the plan keeps {needed} bytes on disk and machine {machine.name} has none; use another plan or machine"
    elif tier is Tier.DISK and plan.budget.disk is None:
        what = f"the plan keeps {needed} bytes on disk and its budget names none; give a disk, or make the plan again"
    else:
        much, little = format_apart(needed, limit)
        what = (
            f"{tier.value} memory: the plan needs {much} and {little} are allowed (its budget, or what machine "
            f"{machine.name} has); raise {_LIMIT_NAMES[tier]}, or make a plan that needs less"
        )
    return DoesNotFit(what, tier=tier.value, needed=needed, allowed=limit)


def _align(nbytes: int, to: int) -> int:
    return (nbytes + to - 1) // to * to


def _invalid(subject: str, message: str) -> PlanInvalid:
    return PlanInvalid(message, action=-1, subject=subject)
