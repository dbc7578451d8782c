"""Plans whose blocks are updated ahead of their step. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from forebay.plans import Plan, Update
from forebay.program import Program, Verb
from forebay.trace import Trace
from tests.null.strategies import Case, cases, plan_for
from tests.null.updating import updating

__all__ = ["ahead", "cases_ahead", "changes_of_homes", "ends_of_steps", "issued_earlier"]


def ahead(trace: Trace, plan: Plan, names: Collection[str] | None = None, *, roomy: bool = True) -> Plan:
    """``plan`` in which ``names`` (None: all blocks that may be) are updated ahead of their step."""
    streamed = tuple(p.block for p in plan.placements if not p.resident and (names is None or p.block in names))
    plan = updating(plan, Update.AHEAD, streamed)
    return plan_for(trace, plan.placements, plan.streaming, plan.recompute, plan.activations, roomy=roomy)


@st.composite
def cases_ahead(draw: st.DrawFn) -> Case:
    """A case of ``cases``, with treatments, in which any of the blocks that may are updated ahead of their step."""
    case = draw(cases(activations=True))
    names = [p.block for p in case.plan.placements if not p.resident]
    chosen = draw(st.sets(st.sampled_from(names))) if names else ()
    return replace(case, plan=ahead(case.trace, case.plan, chosen, roomy=draw(st.booleans())))


def ends_of_steps(program: Program) -> list[int]:
    """The last compute of every step."""
    last = {action.step: i for i, action in enumerate(program.actions) if action.verb is Verb.COMPUTE}
    return [last[step] for step in range(program.steps)]


def changes_of_homes(plan: Plan, program: Program) -> Mapping[str, list[int]]:
    """Of every block the actions by which what a fetch copies becomes another: its updates, or the ends of steps whose
    updates have gone to its other copy."""
    ends, early, found = ends_of_steps(program), plan.updated(Update.AHEAD), dict[str, list[int]]()
    for index, action in enumerate(program.actions):
        if action.verb is Verb.UPDATE:
            place = max(index, ends[action.step]) if action.block in early else index
            found.setdefault(action.block, []).append(place)
    return found


def issued_earlier(program: Program, index: int, place: int) -> Program:
    """Action ``index`` issued before the one at ``place``; it waits for nothing that comes later."""
    order = [*range(place), index, *range(place, index), *range(index + 1, len(program.actions))]
    where = {old: new for new, old in enumerate(order)}
    actions = []
    for old in order:
        action = program.actions[old]
        waits = (b for b in action.after if old != index or b < place)
        actions.append(replace(action, after=tuple(sorted(where[b] for b in waits))))
    return replace(program, actions=tuple(actions))


def too_early(case: Case, program: Program) -> Iterator[tuple[Program, str]]:
    """Programs that are wrong, each with the block that it is wrong of: of blocks that are updated ahead of their step,
    fetches of the next step that copy what this one began with, and updates in front of the last landing."""
    ends, actions = ends_of_steps(program), program.actions
    for block in case.plan.updated(Update.AHEAD):
        own = [(i, a) for i, a in enumerate(actions) if block in (a.block, *(u.block for u in a.uses))]
        done = {a.step: i for i, a in own if a.tensor < 0 and a.verb in (Verb.UPDATE, Verb.WRITE)}
        for step, last in done.items():
            landed = max(i for i, a in own if a.step == step and a.verb in (Verb.LAND, Verb.ACCUMULATE))
            update = next(i for i, a in own if a.step == step and a.verb is Verb.UPDATE)
            yield issued_earlier(program, update, landed), block
            use = next((i for i, a in own if a.step == step + 1 and a.uses), None)
            if use is None or last > ends[step]:
                continue
            fetch = max(i for i, a in own[: own.index((use, actions[use]))] if a.verb is Verb.FETCH)
            if fetch < ends[step]:
                continue
            yield issued_earlier(program, fetch, last + 1), block
