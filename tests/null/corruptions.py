"""Ways to spoil a program that is right, each of which matters. No torch.

A corruption is a function from a case and a program that was lowered from it to all the spoiled programs of its kind,
each with the subjects that the checker may name. How one knows that they matter is said at each: no candidate is a
program that would still train right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from forebay.checking.step import Step
from forebay.layout import state_layout
from forebay.memory import Kind
from forebay.program import Action, Change, Program, Use, Verb
from forebay.trace import Phase
from tests.null.ahead import changes_of_homes
from tests.null.programs import drop
from tests.null.rearranging import behind, changed, numbered, reaches, twice
from tests.null.strategies import Case
from tests.null.treating import TreatedOps

__all__ = ["CORRUPTIONS", "Spoiled"]

Spoiled = tuple[Program, frozenset[str]]
"""A program that is wrong, and what its fault may be ascribed to."""


def _reads(case: Case) -> list[frozenset[str]]:
    """Of every op the blocks whose parameters it reads."""
    owner = [b.name for b in case.trace.model.blocks for _ in b.parameters]
    roots = {i: t.root for i, t in case.trace.tensors()}
    return [
        frozenset(owner[r] for r in (roots[v.resolve(t)] for t in op.inputs) if r < len(owner))
        for _, v, op in case.trace.ops()
    ]


def _in_use(case: Case, program: Program) -> Iterator[tuple[int, int, Use]]:
    """(fetch, compute, use): compute reads the block's parameters, from the slot that the fetch filled last."""
    reads = _reads(case)
    for index, action in numbered(program, Verb.COMPUTE):
        for use in action.uses:
            if any(use.block in reads[op] for op in range(*action.ops)):
                filled = [i for i, a in numbered(program, Verb.FETCH) if i < index and a.slot == use.slot]
                yield filled[-1], index, use


def _names(case: Case, block: str) -> frozenset[str]:
    return frozenset((block, *(p.name for p in case.trace.model.block(block).parameters)))


def drop_fetch(case: Case, program: Program) -> list[Spoiled]:
    """The slot then holds another block, nothing, or what the same block was before its last update."""
    made, changes = [], changes_of_homes(case.plan, program)
    for fetch, use in {f: u for f, _, u in _in_use(case, program)}.items():
        before = [(i, a) for i, a in numbered(program, Verb.FETCH) if i < fetch and a.slot == use.slot]
        if before and before[-1][1].block == use.block:
            between = range(before[-1][0], fetch)
            if not any(i in between for i in changes.get(use.block, ())):
                continue  # the same bytes again
        made.append((drop(program, fetch), frozenset((use.block,))))
    return made


def swap_fetches(case: Case, program: Program) -> list[Spoiled]:
    """Two fetches of different blocks, both in use, each into the slot of the other."""
    used = sorted({fetch for fetch, _, _ in _in_use(case, program)})
    made = []
    for first, second in pairwise(used):
        a, b = program.actions[first], program.actions[second]
        if a.block != b.block:
            spoiled = changed(program, first, block=b.block, what=b.what, nbytes=b.nbytes)
            spoiled = changed(spoiled, second, block=a.block, what=a.what, nbytes=a.nbytes)
            made.append((spoiled, frozenset((a.block, b.block))))
    return made


def drop_update(case: Case, program: Program) -> list[Spoiled]:
    """A lowering updates only what has a gradient, and each of it once."""
    return [(drop(program, i), _names(case, a.block)) for i, a in numbered(program, Verb.UPDATE)]


def repeat_update(case: Case, program: Program) -> list[Spoiled]:
    """The same gradient would be applied twice."""
    return [(twice(program, i), _names(case, a.block)) for i, a in numbered(program, Verb.UPDATE)]


def drop_landing(case: Case, program: Program) -> list[Spoiled]:
    """The gradient would be lost."""
    return [(drop(program, i), frozenset((a.parameter,))) for i, a in numbered(program, Verb.LAND, Verb.ACCUMULATE)]


def repeat_landing(case: Case, program: Program) -> list[Spoiled]:
    """The gradient would be added twice, or copied after it was freed."""
    return [(twice(program, i), frozenset((a.parameter,))) for i, a in numbered(program, Verb.LAND, Verb.ACCUMULATE)]


def drop_state_io(case: Case, program: Program) -> list[Spoiled]:
    """States on disk that are not read, or not written back."""
    return [
        (drop(program, i), _names(case, a.block))
        for i, a in numbered(program, Verb.READ, Verb.WRITE)
        if a.chunk >= 0 and a.tensor < 0
    ]


def drop_detour(case: Case, program: Program) -> list[Spoiled]:
    """Activations that are not written to disk, or not read from there, or not made into codes, or not made of them."""
    name = Step(case.trace).name
    verbs = Verb.READ, Verb.WRITE, Verb.ENCODE, Verb.DECODE
    made = []
    for i, a in numbered(program, *verbs):
        if a.tensor >= 0:
            # What stays as it is weighs on what computes behind it: one of them has more beside it than it says.
            crowded = [c.what for j, c in numbered(program, Verb.COMPUTE, Verb.ENCODE, Verb.DECODE) if j > i]
            made.append((drop(program, i), frozenset((name(a.tensor), *crowded))))
    return made


def shrink_slot(case: Case, program: Program) -> list[Spoiled]:
    """One byte less than a block that is fetched into it."""
    made = []
    for slot in {a.slot for _, a in numbered(program, Verb.FETCH)}:
        blocks = {a.block for _, a in numbered(program, Verb.FETCH) if a.slot == slot}
        size = max(case.trace.model.block(name).nbytes for name in blocks) - 1
        slots = tuple(size if i == slot else n for i, n in enumerate(program.slots))
        made.append((replace(program, slots=slots), frozenset(blocks)))
    return made


def wrong_use(case: Case, program: Program) -> list[Spoiled]:
    """An op reads a parameter of a block that its action does not have, or takes from a slot of another."""
    made = []
    for _, index, use in _in_use(case, program):
        uses = program.actions[index].uses
        made.append((changed(program, index, uses=tuple(u for u in uses if u != use)), _names(case, use.block)))
        other = next((b for b in case.trace.model.blocks if b.name != use.block), None)
        if other is not None and other.name not in {u.block for u in uses}:
            others = tuple(Use(other.name, u.slot) if u == use else u for u in uses)
            made.append((changed(program, index, uses=others), _names(case, use.block)))
    return made


def shift_ops(case: Case, program: Program) -> list[Spoiled]:
    """An op is left out, or run twice; a recomputation ends before its last saved tensor, or after it."""
    works = [case.trace.works[op.work].op for _, _, op in case.trace.ops()]
    others = frozenset((*works, *(b.name for b in case.trace.model.blocks))) | _moved(case)
    made = []
    for index, action in numbered(program, Verb.COMPUTE):
        start, stop = action.ops
        for ops in ((start + 1, stop), (start, stop - 1), (start + 1, stop + 1)):
            made.append((changed(program, index, ops=ops), others | {action.what}))
    return made


def drop_recompute(case: Case, program: Program) -> list[Spoiled]:
    """In a chain every backward begins with an op that reads what its own forward saved last; and who comes next has
    not waited for what the recomputation has."""
    moved = _moved(case)
    return [(drop(program, i), moved | {a.block}) for i, a in numbered(program, Verb.COMPUTE) if a.recomputed]


def _moved(case: Case) -> frozenset[str]:
    """What the plan moves to the host, as the checker calls it."""
    step = Step(case.trace)
    return frozenset(map(step.name, TreatedOps(case.trace, case.plan).roots))


def drop_offload(case: Case, program: Program) -> list[Spoiled]:
    """Then nothing is on the host that could come back."""
    name = Step(case.trace).name
    return [(drop(program, i), frozenset((name(a.tensor),))) for i, a in numbered(program, Verb.OFFLOAD)]


def drop_reload(case: Case, program: Program) -> list[Spoiled]:
    """Somebody asks for it."""
    name = Step(case.trace).name
    return [(drop(program, i), frozenset((name(program.actions[i].tensor),))) for i, _ in _asked(case, program)]


def repeat_move(case: Case, program: Program) -> list[Spoiled]:
    """Twice the memory, on the host or on the device."""
    name = Step(case.trace).name
    moves = numbered(program, Verb.OFFLOAD, Verb.RELOAD)
    return [(twice(program, i), frozenset((name(a.tensor),))) for i, a in moves]


def confuse_moves(case: Case, program: Program) -> list[Spoiled]:
    """Moves another tensor in the place of the right one, which stays where it is, or bytes of no tensor."""
    step = Step(case.trace)
    made = []
    for verb in (Verb.OFFLOAD, Verb.RELOAD):
        for (i, a), (_, b) in pairwise(numbered(program, verb)):
            if a.tensor != b.tensor:
                names = frozenset((step.name(a.tensor), step.name(b.tensor)))
                made.append((changed(program, i, tensor=b.tensor, nbytes=b.nbytes), names))
                made.append((changed(program, i, nbytes=a.nbytes - 1), names))
                made.append((changed(program, i, tensor=-1), frozenset(("tensor -1",))))
    return made


def late_reload(case: Case, program: Program) -> list[Spoiled]:
    """Brought back right after the first who reads it. A fetch behind it in the lane may have waited with it."""
    blocks = frozenset(b.name for b in case.trace.model.blocks)
    subjects = _moved(case) | blocks
    return [(behind(program, i, reader), subjects) for i, reader in _asked(case, program)]


def _asked(case: Case, program: Program) -> Iterator[tuple[int, int]]:
    """(reload, compute): the first after it that reads, in backward or running again, what it brings back."""
    treated = TreatedOps(case.trace, case.plan)
    backward = [v.phase is Phase.BACKWARD for _, v, _ in case.trace.ops()]
    for index, reload in numbered(program, Verb.RELOAD):
        for reader, action in numbered(program, Verb.COMPUTE):
            if reader < index:
                continue
            if action.ops[0] == 0 and not action.recomputed:
                break  # the next pass
            if any(
                reload.tensor in treated.reads[n] and (action.recomputed or backward[n]) for n in range(*action.ops)
            ):
                yield index, reader
                break


def run_named(case: Case, program: Program) -> list[Spoiled]:
    """An op whose result is kept or moved runs again."""
    named = TreatedOps(case.trace, case.plan).named
    blocks = [frozenset((v.block,)) for _, v, _ in case.trace.ops()]
    made = []
    for index, action in numbered(program, Verb.COMPUTE):
        start, stop = action.ops
        if action.recomputed and start - 1 in named:
            made.append((changed(program, index, ops=(start - 1, stop)), blocks[start - 1]))
        if action.recomputed and stop in named:
            made.append((changed(program, index, ops=(start, stop + 1)), blocks[stop]))
    return made


def free_too_much(case: Case, program: Program) -> list[Spoiled]:
    """An offload that says that it frees more than there was."""
    name, sizes = Step(case.trace).name, {i: t.nbytes for i, t in case.trace.tensors()}
    made = []
    for index, action in numbered(program, Verb.OFFLOAD):
        # Of what leaves in part the copy frees all.
        freed = (Change(Kind.ACTIVATION, -sizes[action.tensor] - 1),)
        made.append((changed(program, index, changes=freed), frozenset((name(action.tensor),))))
    return made


def understate_memory(case: Case, program: Program) -> list[Spoiled]:
    """An action that says that it takes fewer bytes than what it makes: the roots that its ops make and none drops."""
    made = []
    sizes = {i: t.nbytes for i, t in case.trace.tensors() if t.root == i}
    outputs = [sum(sizes.get(v.resolve(t), 0) for t in op.outputs) for _, v, op in case.trace.ops()]
    for index, action in numbered(program, Verb.COMPUTE):
        least = outputs[action.ops[0]] if action.ops[0] < action.ops[1] else 0
        if least and index == 0:  # later actions may say more than they need: gradients of one window
            made.append((changed(program, index, peak=least - 1), frozenset((action.what,))))
    return made


def lose_dependency(case: Case, program: Program) -> list[Spoiled]:
    """A dependency without which nothing orders two actions that must be ordered: asked of the graph of lanes and
    dependencies by walking it, which is how one knows that it matters."""
    made = []
    treated, moved, asked = TreatedOps(case.trace, case.plan), _moved(case), set(_asked(case, program))
    used = list(_in_use(case, program))
    for index, action in enumerate(program.actions):
        for earlier in action.after:
            subjects = _needs(case, program, used, earlier, index)
            if subjects or (earlier, index) in asked or _moves(treated, program.actions[earlier], action):
                less = tuple(a for a in action.after if a != earlier)
                spoiled = changed(program, index, after=less)
                if not reaches(spoiled, earlier, index):
                    made.append((spoiled, subjects | moved))  # what is lost with a fetch may be a reload before it
    return made


def _moves(treated: TreatedOps, first: Action, second: Action) -> bool:
    """Whether a tensor is made and moved off the device, or encoded before, or moved there and back."""
    if second.verb is Verb.OFFLOAD and first.verb is Verb.COMPUTE and not first.recomputed:
        return any(second.tensor in treated.made[n] for n in range(*first.ops))
    pairs = (Verb.OFFLOAD, Verb.RELOAD), (Verb.OFFLOAD, Verb.WRITE), (Verb.WRITE, Verb.READ), (Verb.READ, Verb.RELOAD)
    # A part that leaves as it is does so beside the copy of the rest.
    coded = ((Verb.ENCODE, Verb.OFFLOAD),) if first.bits else ()
    both = (first.verb, second.verb) in (*pairs, *coded, (Verb.RELOAD, Verb.DECODE))
    return both and first.tensor == second.tensor >= 0


def _needs(case: Case, program: Program, used: list[tuple[int, int, Use]], first: int, second: int) -> frozenset[str]:
    """What would go wrong if ``second`` did not wait for ``first``; empty if that is not clear."""
    a, b = program.actions[first], program.actions[second]
    pair = (a.verb, b.verb)
    if pair == (Verb.FETCH, Verb.COMPUTE):
        needed = any((first, second) == (f, c) for f, c, _ in used)
        return frozenset((a.block,)) if needed else frozenset()
    if pair == (Verb.COMPUTE, Verb.FETCH):
        reader = any(c == first and u.slot == b.slot for _, c, u in used)
        return frozenset(u.block for u in a.uses) if reader else frozenset()
    if pair in ((Verb.COMPUTE, Verb.LAND), (Verb.COMPUTE, Verb.ACCUMULATE)):
        made = {
            case.trace.sources[v.resolve(g.parameter)].name
            for n, v, op in case.trace.ops()
            for g in op.gradients
            if a.ops[0] <= n < a.ops[1]
        }
        # Its update may come before the ops now: it changes what those read of its block.
        return frozenset((b.parameter, b.block)) if b.parameter in made else frozenset()
    if pair[0] in (Verb.LAND, Verb.ACCUMULATE) and b.verb is Verb.UPDATE and a.step == b.step:
        cut = case.plan.streaming.update_chunk, case.plan.streaming.masters
        layout = state_layout(case.trace.model.block(b.block), case.trace.state_names, *cut)
        inside = any(p.parameter.name == a.parameter for p in layout.chunks[b.chunk].pieces)
        return _names(case, b.block) if inside else frozenset()
    if pair in ((Verb.READ, Verb.UPDATE), (Verb.UPDATE, Verb.WRITE)) and a.block == b.block:
        states = a.chunk == b.chunk >= 0 and a.step == b.step
        return _names(case, a.block) if states else frozenset()
    if pair == (Verb.READ, Verb.FETCH) and a.block == b.block:
        return frozenset((a.block,))
    if pair == (Verb.UPDATE, Verb.FETCH) and a.block == b.block:
        late = any(f == second and program.actions[c].step > a.step for f, c, _ in used)
        return frozenset((a.block,)) if late else frozenset()
    if pair == (Verb.WRITE, Verb.READ) and (a.block, a.chunk) == (b.block, b.chunk):
        return frozenset((a.block,)) if a.chunk >= 0 and b.step == a.step + 1 else frozenset()
    return frozenset()


CORRUPTIONS: dict[str, Callable[[Case, Program], list[Spoiled]]] = {
    f.__name__: f
    for f in (
        drop_fetch,
        swap_fetches,
        drop_update,
        repeat_update,
        drop_landing,
        repeat_landing,
        drop_state_io,
        drop_detour,
        shrink_slot,
        wrong_use,
        shift_ops,
        drop_recompute,
        drop_offload,
        drop_reload,
        repeat_move,
        confuse_moves,
        late_reload,
        run_named,
        free_too_much,
        understate_memory,
        lose_dependency,
    )
}
