"""Which ops of a trace a plan treats otherwise than their block, and whether it may. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forebay.checking.step import Step
from forebay.errors import ConfigError, PlanInvalid
from forebay.layout import MOVED_LEAST
from forebay.memory import ALIGNMENT
from forebay.plans import Fate, Plan, Treatment
from forebay.trace import NO_SAVES, Phase

__all__ = ["NOTHING", "Treated", "check_host_room", "check_treatments", "treated_by"]


@dataclass(frozen=True)
class Treated:
    """What a plan names in one trace: ``named`` ops of blocks that recompute, which do not run again, and ``moved``
    roots (of any block), which are on the host between forward and backward."""

    named: frozenset[int] = field(default_factory=frozenset)
    moved: frozenset[int] = field(default_factory=frozenset)

    def host_nbytes(self, step: Step) -> int:
        """Bytes that the moved roots of one pass take on the host, each from a multiple of ``ALIGNMENT``."""
        return sum(-(-step.nbytes[root] // ALIGNMENT) * ALIGNMENT for root in self.moved)


NOTHING = Treated()


def check_treatments(plan: Plan, steps: Sequence[Step]) -> None:
    """Raises where a treatment is not one for the model, whatever its traces (``steps``) are like: ``PlanInvalid`` for
    a block that there is not, that is not one module or that never runs, ``ConfigError`` for compression."""
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
        if treatment.bits:
            raise ConfigError(
                f"block {block}, {_name(treatment)}: compressed activations ({treatment.bits} bits) are not supported "
                f"yet; use 0 bits"
            )


def treated_by(step: Step, plan: Plan, *, extreme: bool = False) -> Treated:
    """The ops and roots of ``step`` that ``plan`` names. Raises ``PlanInvalid`` for a name that is none in some forward
    of its block (with other routes, ``extreme``, an op need not be there), and for an op that may not be treated so."""
    if not plan.activations:
        return NOTHING
    named: set[int] = set()
    moved: set[int] = set()
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
            if treatment.fate is Fate.OFFLOAD:
                large = [root for root in step.ops[op].made if step.nbytes[root] >= MOVED_LEAST]
                for root in large if block not in plan.recompute else ():
                    if not step.saved[root]:
                        text = f"nobody saves its {step.name(root)} for backward, which would be moved for nothing"
                        raise _invalid(block, treatment, f"{text}; leave the op out")
                moved.update(large)
    return Treated(frozenset(named), frozenset(moved))


def check_host_room(plan: Plan, steps: Sequence[Step], treated: Sequence[Treated]) -> None:
    """Raises ``PlanInvalid`` if the arena of the plan does not hold what one pass moves, in the trace where that is
    most."""
    needed, step, what = max(
        ((t.host_nbytes(s), s, t) for s, t in zip(steps, treated, strict=True)), key=lambda entry: entry[0]
    )
    room = plan.streaming.host_activations
    if needed > room:
        largest = max(what.moved, key=lambda root: (step.nbytes[root], -root))
        raise PlanInvalid(
            f"the plan moves {needed} bytes of activations to the host in one micro-batch and has room for {room} "
            f"there (host_activations); the largest is {step.name(largest)}; make it {needed}, or move "
            f"less",
            action=-1,
            subject="host_activations",
        )


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
