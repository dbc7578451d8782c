"""Which ops of a trace a plan treats otherwise than their block, and whether it may. No torch.

Codes may take the place of what an op has made where backward makes do with them: those that lose precision, of any
floating-point numbers (the plan says that it changes the numbers); a mask, of what is true or false, and of what a ReLU
has made where nobody but its own backward reads it again, which asks only what is above 0. An op that makes both, as
dropout does on cuda, has masks made of what is true or false, and the rest stays where and as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forebay.checking.step import Step
from forebay.compression import MASK_BITS
from forebay.errors import ConfigError, PlanInvalid
from forebay.layout import MOVED_LEAST, PAGE
from forebay.memory import ALIGNMENT
from forebay.plans import Plan
from forebay.trace import NO_SAVES, Phase
from forebay.treatments import Fate, StandIn, Treatment

__all__ = ["NOTHING", "Treated", "check_room", "check_treatments", "treated_by"]

RELU, RELU_BACKWARD = "aten.relu.default", "aten.threshold_backward.default"


@dataclass(frozen=True)
class Treated:
    """What a plan names in one trace: ``named`` ops of blocks that recompute, which do not run again, and roots (of any
    block) that are not on the device as they are between forward and backward, each with what stands in for it."""

    named: frozenset[int] = field(default_factory=frozenset)
    ways: Mapping[int, StandIn] = field(default_factory=dict)

    def room(self, fate: Fate) -> int:
        """Bytes that one pass takes on the host, or in the file on disk: each root, or what of it leaves, or its codes,
        begins at a multiple of ``ALIGNMENT`` there, or of ``PAGE``."""
        to = PAGE if fate is Fate.DISK else ALIGNMENT
        return sum(-(-way.moved // to) * to for way in self.ways.values() if way.fate is fate)


NOTHING = Treated()


def check_treatments(plan: Plan, steps: Sequence[Step]) -> None:
    """Raises where a treatment is not one for the model, whatever its traces (``steps``) are like: ``PlanInvalid`` for
    a block that there is not, that is not one module or that never runs."""
    blocks = {b.name: b for b in steps[0].trace.model.blocks}
    for block, treatment in _treatments(plan):
        if block not in blocks:
            raise _invalid(block, treatment, "the model does not have this block; make the plan again")
        if blocks[block].module is None:
            text = (
                "the block is not one module whose forward is seen as a whole; leave it out of the plan's activations"
            )
            raise _invalid(block, treatment, text)
        if not any(_forward_visits(step, block) for step in steps):
            raise _invalid(block, treatment, "the block never runs; leave it out of the plan's activations")


def treated_by(step: Step, plan: Plan, *, extreme: bool = False) -> Treated:
    """The ops and roots of ``step`` that ``plan`` names. Raises ``PlanInvalid`` for a name that is none in some forward
    of its block (with other routes, ``extreme``, an op need not be there), and for an op that may not be treated so."""
    if not plan.activations:
        return NOTHING
    named: set[int] = set()
    ways: dict[int, StandIn] = {}
    writers = _writers(step)
    visits: dict[str, tuple[int, ...]] = {}
    ops: dict[int, Mapping[tuple[str, int], int]] = {}
    for block, treatment in _treatments(plan):
        if block not in visits:
            visits[block] = _whole_visits(step, block, treatment)
            ops.update((place, _names(step, place)) for place in visits[block])
        for place in visits[block]:
            if extreme and (treatment.op, treatment.occurrence) not in ops[place]:
                continue
            op = _op(step, ops[place], block, treatment, writers)
            if block in plan.recompute:
                if step.ops[op].writes:
                    text = f"op {op} changes what others have made in place, which has to happen again; leave it out"
                    raise _invalid(block, treatment, text)
                named.add(op)
            if treatment.changes_bytes:
                ways.update(_ways(step, plan, block, treatment, op, extreme=extreme))
    return Treated(frozenset(named), ways)


def _ways(step: Step, plan: Plan, block: str, treatment: Treatment, op: int, *, extreme: bool) -> dict[int, StandIn]:
    """What becomes of the roots that ``op`` makes and that are large enough. With other routes, ``extreme``, one that
    is saved for backward elsewhere need not be."""
    found: dict[int, StandIn] = {}
    made = step.ops[op].made
    if treatment.bits == MASK_BITS:
        made = tuple(r for r in made if step.dtypes[r] == "bool") or made
    for root in (r for r in made if step.nbytes[r] >= MOVED_LEAST):
        if block not in plan.recompute and not step.saved[root]:
            if extreme:
                continue
            text = f"nobody saves its {step.name(root)} for backward, which would be treated for nothing"
            raise _invalid(block, treatment, f"{text}; leave the op out")
        if treatment.bits == MASK_BITS and step.dtypes[root] != "bool":
            _check_mask(step, plan, block, treatment, root)
        found[root] = _way(step, block, treatment, root)
    return found


def _way(step: Step, block: str, treatment: Treatment, root: int) -> StandIn:
    try:
        return StandIn.of(treatment, step.nbytes[root], step.dtypes[root])
    except ConfigError as error:
        raise _invalid(block, treatment, f"it makes {step.name(root)}: {error}; leave the op out") from None


def _check_mask(step: Step, plan: Plan, block: str, treatment: Treatment, root: int) -> None:
    """Raises ``PlanInvalid`` unless ``root`` is a ReLU's, of which nobody but its own backward reads the numbers again,
    and that asks only what is above 0."""
    if treatment.op != RELU:
        text = f"1 bit holds what is true or false, or what a ReLU has made, and not its {step.name(root)}"
        raise _invalid(block, treatment, f"{text}; give 0, 8, 4 or 2 bits")
    for number, op in enumerate(step.ops):
        if root in op.reads and not op.view and step.phase(number) is Phase.BACKWARD and op.name != RELU_BACKWARD:
            text = f"op {number} ({op.name}) reads the numbers of its {step.name(root)} in backward, and 1 bit has none"
            raise _invalid(block, treatment, f"{text}; give 0, 8, 4 or 2 bits")
    for inputs, visit in zip(step.inputs, step.trace.visits, strict=True):
        own = visit.first_op <= step.birth[root] < visit.first_op + len(step.trace.segments[visit.segment].ops)
        if visit.block in plan.recompute and visit.phase is Phase.FORWARD and (own or root in inputs):
            text = f"block {visit.block} runs again on the numbers of its {step.name(root)}, and 1 bit has none"
            raise _invalid(block, treatment, f"{text}; give 0, 8, 4 or 2 bits")


def check_room(plan: Plan, steps: Sequence[Step], treated: Sequence[Treated]) -> None:
    """Raises ``PlanInvalid`` if the arena on the host, the file on disk or the ring on the way there does not hold what
    the plan moves there in one pass, in the trace where that is most."""
    for fate, where, name, room in (
        (Fate.OFFLOAD, "the host", "host_activations", plan.streaming.host_activations),
        (Fate.DISK, "disk", "disk_activations", plan.streaming.disk_activations),
    ):
        needed, step, what = max(
            ((t.room(fate), s, t) for s, t in zip(steps, treated, strict=True)), key=lambda entry: entry[0]
        )
        own = [root for root, way in what.ways.items() if way.fate is fate]
        if needed > room:
            largest = step.name(max(own, key=lambda root: (what.ways[root].moved, -root)))
            text = (
                f"the plan moves {needed} bytes of activations to {where} in one micro-batch and has room for {room} "
                f"there ({name}); the largest is {largest}; make it {needed}, or move less"
            )
            raise PlanInvalid(text, action=-1, subject=name)


def _treatments(plan: Plan) -> Iterator[tuple[str, Treatment]]:
    return ((b, t) for selection in plan.activations for b in selection.blocks for t in selection.treatments)


def _forward_visits(step: Step, block: str) -> tuple[int, ...]:
    visits = step.trace.visits
    return tuple(p for p, v in enumerate(visits) if v.block == block and v.phase is Phase.FORWARD)


def _whole_visits(step: Step, block: str, treatment: Treatment) -> tuple[int, ...]:
    """The forward visits of a block, each of which is all of one call of its module.

    Two visits with others between them are parts of one call if autograd lets go of what was saved in them after the
    same op. Where one of them saves nothing, nobody can tell, and it is taken for a part.
    """
    places = _forward_visits(step, block)
    visits = step.trace.visits
    for first, second in pairwise(places):
        ends = visits[first].kept_until, visits[second].kept_until
        if second > first + 1 and (ends[0] == ends[1] or NO_SAVES in ends):
            between = visits[first + 1].block
            other = f"block {between}" if between else "what is outside of all blocks"
            raise _invalid(block, treatment, f"{other} runs in the middle of its forward; leave the block out")
    return places


def _names(step: Step, place: int) -> Mapping[tuple[str, int], int]:
    """The op numbers of a visit by overload and occurrence."""
    visit = step.trace.visits[place]
    count = len(step.trace.segments[visit.segment].ops)
    runs: dict[str, int] = {}
    names = {}
    for number in range(visit.first_op, visit.first_op + count):
        op = step.ops[number].name
        names[op, runs.get(op, 0)] = number
        runs[op] = runs.get(op, 0) + 1
    return names


def _writers(step: Step) -> Mapping[int, int]:
    """Of every root that is changed in place, an op that does so."""
    return {root: number for number, op in enumerate(step.ops) for root in op.writes}


def _op(
    step: Step,
    names: Mapping[tuple[str, int], int],
    block: str,
    treatment: Treatment,
    writers: Mapping[int, int],
) -> int:
    """The op that is named in one visit."""
    number = names.get((treatment.op, treatment.occurrence))
    if number is None:
        runs = sum(op == treatment.op for op, _ in names)
        how = f"runs {runs} times" if runs else "does not run"
        raise _invalid(block, treatment, f"{treatment.op} {how} in a forward of the block; make the plan again")
    op = step.ops[number]
    if op.view:
        raise _invalid(block, treatment, f"op {number} is a view, which makes nothing of its own; leave it out")
    if not any(step.nbytes[root] for root in op.made):
        raise _invalid(block, treatment, f"op {number} makes no tensor with bytes of its own; leave it out")
    for root in op.made:
        if root in writers:
            later = writers[root]
            text = (
                f"op {later} ({step.ops[later].name}) changes its {step.name(root)} in place afterwards; leave it out"
            )
            raise _invalid(block, treatment, text)
    return number


def _name(treatment: Treatment) -> str:
    return f"op {treatment.op}#{treatment.occurrence}"


def _invalid(block: str, treatment: Treatment, text: str) -> PlanInvalid:
    return PlanInvalid(f"block {block}, {_name(treatment)}: {text}", action=-1, subject=block)
