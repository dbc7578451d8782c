"""Programs of chains whose activations are kept or moved op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from forebay.budgets import Budget, DiskBudget
from forebay.errors import ConfigError
from forebay.lowering import Grain, Liveness, lower, sketch
from forebay.memory import Kind, Tier
from forebay.plans import Plan
from forebay.program import Action, Change, Outline, Program, Sketch, Verb
from forebay.simulation import Costs, Score, pace
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.simulating import MACHINE, flat_link
from tests.null.strategies import RESIDENT, Case, cases, roomy
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

# A layer saves two tensors and hands on OUT. Its ops: linear, linear, out.
FIRST, SECOND, OUT, N = 8192, 4096, 256, 3
EVERY = tuple(f"layers.{i}" for i in range(N))


def chain(device: str = "cuda", *, behind: bool = False, out: int = OUT) -> Trace:
    blocks = [block(name, ((4,), "float32", True), ((4,), "float32", True)) for name in EVERY]
    return chain_trace(blocks, [Layer(b.name, (FIRST, SECOND), 0, out, behind=behind) for b in blocks], device=device)


def planned(
    trace: Trace,
    fate: Fate = Fate.OFFLOAD,
    *,
    ops: tuple[int, ...] = (0, 1),
    recompute: tuple[str, ...] = (),
    offload_window: int = 0,
    reload_window: int = 0,
) -> Plan:
    """Everything is resident, and of every layer the products ``ops`` have ``fate``."""
    plan = roomy(trace, RESIDENT)
    chosen = Selection(EVERY, tuple(Treatment("linear", op, fate) for op in ops))
    arena = Liveness(trace).host_activations(recompute, (chosen,))
    streaming = replace(
        plan.streaming, offload_window=offload_window, reload_window=reload_window, host_activations=arena
    )
    return replace(plan, recompute=recompute, activations=(chosen,), streaming=streaming)


def last_step(program: Program) -> list[tuple[int, Action]]:
    return [(i, a) for i, a in enumerate(program.actions) if a.step == program.steps - 1]


def on(program: Program, lane: Lane) -> list[str]:
    return [a.what for _, a in last_step(program) if a.lane is lane]


def words(verb: str, *, backwards: bool = False) -> list[str]:
    made = [f"{verb} {name} linear#{op}" for name in EVERY for op in (0, 1)]
    return made[::-1] if backwards else made


@pytest.mark.parametrize("windows", [(0, 0), (4096, 4096), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_leaves_in_order_and_comes_back_in_reverse(device: str, windows: tuple[int, int]) -> None:
    trace = chain(device)
    program = lower(trace, planned(trace, offload_window=windows[0], reload_window=windows[1]))
    assert on(program, Lane.D2H) == words("offload")
    assert on(program, Lane.H2D) == words("reload", backwards=True)


@pytest.mark.parametrize("behind", [False, True])
def test_an_offload_is_queued_as_soon_as_autograd_saves_what_it_moves(behind: bool) -> None:
    trace = chain(behind=behind)
    program = lower(trace, planned(trace, offload_window=1 << 20))
    root_of = {move.what: move for move in Liveness(trace).profile((), planned(trace).activations).moves}
    before: Action | None = None
    for index, action in last_step(program):
        if action.verb is Verb.OFFLOAD:
            move = root_of[action.what.removeprefix("offload ")]
            assert before is not None and before.ops[1] == action.ops[0] + 1 + behind  # compute is cut there
            assert index - 1 in action.after
            assert (action.tensor, action.nbytes, action.block) == (move.root, move.nbytes, move.block)
            assert action.changes == (Change(Kind.ACTIVATION, -move.nbytes),)
            # Python lets go with the layer's last op, and compute is cut there too.
            assert action.ops[1] == trace.visits[move.visit].first_op + 3
            assert any(a.ops[1] == action.ops[1] for _, a in last_step(program) if a.verb is Verb.COMPUTE)
        if action.lane is Lane.COMPUTE:
            before = action


def sent(plan: Plan, trace: Trace) -> list[tuple[int, int]]:
    """Of every offload of the last step: the op that makes what leaves, and the number of ops that have run."""
    program, ran, found = lower(trace, plan), 0, list[tuple[int, int]]()
    for _, action in last_step(program):
        if action.verb is Verb.COMPUTE:
            ran = action.ops[1]
        if action.verb is Verb.OFFLOAD:
            found.append((action.ops[0], ran))
    return found


@pytest.mark.parametrize("bits", [0, 8])
def test_blocks_whose_ops_are_all_seen_are_treated_as_soon_as_an_op_has_run(bits: int) -> None:
    """Those that run again, and all others where anything becomes codes."""
    trace = chain(behind=True)
    plan = planned(trace)
    coded = replace(plan.activations[0].treatments[0], bits=bits)
    chosen = replace(plan.activations[0], treatments=(coded, *plan.activations[0].treatments[1:]))
    plan = replace(plan, activations=(chosen,), changes_numbers=("codes",) if bits else ())
    assert [ran - op for op, ran in sent(plan, trace)] == [2 - bool(bits)] * 2 * N
    again = replace(plan, recompute=EVERY[:1])
    assert [ran - op for op, ran in sent(again, trace)] == [1] * 2 + [2 - bool(bits)] * 2 * (N - 1)


def test_what_is_handed_to_a_block_that_runs_again_leaves_before_that_begins() -> None:
    """A checkpoint saves its arguments first, whatever the block itself saves of them later."""
    trace = chain(out=4096)
    maker, saver = trace.segments[:2]
    *others, out = maker.ops
    maker = replace(maker, ops=(*others, replace(out, packed=())))
    first, *others, out = saver.ops  # port -1: what the layer before has made
    saver = replace(saver, ops=(replace(first, packed=(-1, *first.packed)), *others, replace(out, packed=())))
    trace = replace(trace, segments=(maker, saver, *trace.segments[2:]))
    plan = planned(trace)
    plan = replace(plan, activations=(Selection(EVERY[:1], (Treatment("out", 0, Fate.OFFLOAD),)),))
    made = len(maker.ops) - 1
    assert sent(plan, trace) == [(made, made + 2)]
    assert sent(replace(plan, recompute=EVERY[1:2]), trace) == [(made, made + 1)]


def test_a_reload_waits_for_its_offload_and_for_compute() -> None:
    trace = chain()
    program = lower(trace, planned(trace, reload_window=FIRST))
    actions, offloads, computed = program.actions, dict[int, int](), -1
    for index, action in enumerate(actions):
        if action.verb is Verb.OFFLOAD:
            offloads[action.tensor] = index
        if action.verb is Verb.RELOAD:
            # Of its own or, all having been waited for when backward began, of a later one.
            assert computed in action.after
            assert any(i >= offloads[action.tensor] and actions[i].lane is Lane.D2H for i in action.after)
            assert action.nbytes == action.peak == sum(c.nbytes for c in action.changes)
        if action.lane is Lane.COMPUTE:
            computed = index


@pytest.mark.parametrize("window", [0, 1 << 20])
def test_what_comes_back_says_which_op_is_next(window: int) -> None:
    """That before which backward begins, for what comes back ahead of who asks for it."""
    trace = chain()
    ran, found = 0, 0
    for _, action in last_step(lower(trace, planned(trace, reload_window=window))):
        if action.verb is Verb.COMPUTE:
            ran = action.ops[1]
        if action.verb is Verb.RELOAD:
            assert action.ops == (ran, ran)
            found += 1
    assert found == 2 * N


def readers(program: Program, trace: Trace) -> dict[int, int]:
    """Of every root that comes back the action that reads it first afterwards."""
    found: dict[int, int] = {}
    back: dict[int, int] = {}
    numbers = {number: (visit, op) for number, visit, op in trace.ops()}
    for index, action in last_step(program):
        if action.verb is Verb.RELOAD:
            back[action.tensor] = index
        for number in range(*action.ops) if action.verb is Verb.COMPUTE else ():
            visit, op = numbers[number]
            for root in map(visit.resolve, op.inputs):
                if root in back:
                    found.setdefault(root, index)
    return found


@pytest.mark.parametrize("window", [0, FIRST, 1 << 20])
def test_compute_waits_for_what_it_reads(window: int) -> None:
    trace = chain()
    program = lower(trace, planned(trace, reload_window=window))
    reload_of = {a.tensor: i for i, a in last_step(program) if a.verb is Verb.RELOAD}
    found = readers(program, trace)
    assert found.keys() == reload_of.keys()
    waited = -1
    for index, action in last_step(program):
        if action.lane is Lane.COMPUTE:
            waited = max((waited, *(i for i in action.after if program.actions[i].verb is Verb.RELOAD)))
            assert all(reload_of[root] <= waited for root, reader in found.items() if reader == index)


# In reverse order the last layer's second comes first, then its first, which is larger and is not overtaken.
@pytest.mark.parametrize(
    ("window", "fits"),
    [(0, 0), (SECOND, SECOND), (FIRST, SECOND), (FIRST + SECOND, FIRST + SECOND), (1 << 20, N * (FIRST + SECOND))],
)
def test_no_more_than_the_windows_is_under_way(window: int, fits: int) -> None:
    """Whatever the timing: of the offloads that the next compute need not wait for, and of the reloads that were not
    asked for."""
    trace = chain()
    program = lower(trace, planned(trace, offload_window=window, reload_window=window))
    found, waited, most = readers(program, trace), -1, 0
    actions = last_step(program)
    for index, action in actions:
        if action.lane is not Lane.COMPUTE:
            continue
        waited = max((waited, *(i for i in action.after if program.actions[i].verb is Verb.OFFLOAD)))
        leaving = sum(a.nbytes for i, a in actions if a.verb is Verb.OFFLOAD and waited < i < index)
        ahead = sum(a.nbytes for i, a in actions if a.verb is Verb.RELOAD and i < index < found[a.tensor])
        assert leaving <= window and ahead <= window
        most = max(most, ahead)
    assert most == fits


def test_backward_begins_when_everything_has_left() -> None:
    trace = chain()
    program = lower(trace, planned(trace, offload_window=1 << 20))
    last = [i for i, a in last_step(program) if a.verb is Verb.OFFLOAD][-1]
    forward = [a for _, a in last_step(program) if a.what.startswith("forward")]
    assert not any(program.actions[i].verb is Verb.OFFLOAD for a in forward for i in a.after)
    assert last in next(a for _, a in last_step(program) if a.what == "backward").after


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.OFFLOAD])
def test_a_recomputation_leaves_out_what_is_named(fate: Fate) -> None:
    trace = chain()
    plan = planned(trace, fate, ops=(0,), recompute=EVERY)
    program = lower(trace, plan)
    # Run again would be the two products; the first is there.
    again = [a.ops for _, a in last_step(program) if a.recomputed]
    firsts = [visit.first_op for visit in trace.visits[:N]]
    assert again == [(first + 1, first + 2) for first in reversed(firsts)]
    assert on(program, Lane.H2D) == (words("reload", backwards=True)[1::2] if fate is Fate.OFFLOAD else [])
    assert sum(c.nbytes for a in program.actions for c in a.changes) == 0


def test_a_recomputation_in_which_nothing_runs() -> None:
    trace = chain()
    program = lower(trace, planned(trace, recompute=EVERY))
    assert not any(a.recomputed for a in program.actions)
    assert sorted(on(program, Lane.H2D)) == sorted(words("reload"))
    # What has gone with ops that were left out is gone before the next one comes back, or with the next compute.
    assert sum(c.nbytes for a in program.actions for c in a.changes) == 0


def test_the_arena_stands_on_the_host() -> None:
    trace = chain()
    plan = planned(trace)
    arena = N * (FIRST + SECOND)
    assert plan.streaming.host_activations == arena
    for pinned, kinds in ((None, {Kind.ACTIVATION: arena}), (arena - 1, {})):
        standing = lower(trace, replace(plan, budget=Budget(1 << 40, pinned=pinned))).standing
        assert standing[Tier.HOST][Kind.ACTIVATION] == arena
        assert {k: n for k, n in standing[Tier.PINNED].items() if k is Kind.ACTIVATION} == kinds
    assert Kind.ACTIVATION not in lower(chain("cpu"), planned(chain("cpu"))).standing[Tier.PINNED]


def test_treatments_of_a_block_that_is_not_there() -> None:
    trace = chain()
    plan = replace(planned(trace), activations=(Selection(("layers.9",), (Treatment("linear", 0, Fate.OFFLOAD),)),))
    with pytest.raises(ConfigError, match=r"the plan treats ops of block layers\.9, which the model does not have"):
        lower(trace, plan)


@settings(max_examples=60, deadline=None)
@given(cases(activations=True), st.integers(1, 2))
def test_every_op_runs_once_and_every_byte_goes(case: Case, micro_batches: int) -> None:
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    for index, action in enumerate(program.actions):
        assert all(i < index for i in action.after)
        assert action.peak >= 0 and (action.verb is not Verb.COMPUTE or action.ops[1] > action.ops[0])
    ops = [n for a in program.actions if a.verb is Verb.COMPUTE and not a.recomputed for n in range(*a.ops)]
    assert ops == list(range(sum(1 for _ in case.trace.ops()))) * (program.steps * micro_batches)
    assert sum(c.nbytes for a in program.actions for c in a.changes) == case.trace.held_nbytes
    for out, back in ((Verb.OFFLOAD, Verb.RELOAD), (Verb.ENCODE, Verb.DECODE), (Verb.WRITE, Verb.READ)):
        moved = [[a.tensor for a in program.actions if a.verb is verb and a.tensor >= 0] for verb in (out, back)]
        assert set(moved[1]) <= set(moved[0])
        assert all(moved[0].count(root) == program.steps * micro_batches for root in moved[0])


SAVED = st.lists(st.sampled_from([4096, 4160, 8192, 512]), min_size=2, max_size=5)


@settings(max_examples=80, deadline=None)
@given(st.lists(SAVED, min_size=2, max_size=4), st.sampled_from(["cpu", "cuda"]), st.data())
def test_activations_that_move_together_are_the_same_bytes_in_fewer_parts(
    saved: list[list[int]], device: str, data: st.DataObject
) -> None:
    """None larger than asked for but what is so by itself, and the seconds of one are those of all of its pieces."""
    names = [f"layers.{i}" for i in range(len(saved))]
    blocks = [block(name, ((4,), "float32", True)) for name in names]
    layers = [Layer(name, tuple(own), 0, OUT) for name, own in zip(names, saved, strict=True)]
    trace = chain_trace(blocks, layers, device=device)
    again, most = data.draw(st.sets(st.sampled_from(names))), data.draw(st.sampled_from([8192, 20_000, 32_768, 0]))
    fates = data.draw(st.lists(st.sampled_from([Fate.OFFLOAD, Fate.OFFLOAD, Fate.DISK]), min_size=5, max_size=5))
    plan = moving(trace, tuple(names), tuple(sorted(again)), fates)
    slow = flat_link(1e9, latency=1e-5)  # so that two pieces take longer than both as one
    costs = Costs(trace, replace(MACHINE, h2d=slow, d2h=slow), Masters.WHOLE)
    each, gathered = sketch(trace, plan), sketch(trace, plan, grain=Grain(0, most))
    event(f"some together: {any(a.pieces for a in gathered.actions)}")
    for verb in (Verb.OFFLOAD, Verb.RELOAD):
        alone, parts = moves(each, verb), moves(gathered, verb)
        assert parts.keys() == alone.keys()
        for key, own in alone.items():
            together = parts[key]
            assert sum(a.nbytes for a in together) == sum(a.nbytes for a in own) and len(together) <= len(own)
            assert sorted(n for a in together for n in (a.pieces or (a.nbytes,))) == sorted(a.nbytes for a in own)
            assert sum(map(costs.action, together)) == pytest.approx(sum(map(costs.action, own)))
            assert all(a.nbytes <= most and sum(a.pieces) == a.nbytes for a in together if a.pieces)
    assert computed(gathered) == computed(each)


def moving(trace: Trace, blocks: tuple[str, ...], recompute: tuple[str, ...], fates: Sequence[Fate]) -> Plan:
    """Everything is resident, all that is saved moves through wide windows."""
    plan = roomy(trace, RESIDENT)
    chosen = (Selection(blocks, tuple(Treatment("linear", op, fate) for op, fate in enumerate(fates))),)
    live = Liveness(trace)
    written = live.disk_activations(recompute, chosen)
    streaming = replace(
        plan.streaming,
        offload_window=65_536,
        reload_window=65_536,
        disk_window=65_536 if written else 0,
        host_activations=live.host_activations(recompute, chosen),
        disk_activations=written,
    )
    disk = DiskBudget("disk", written) if written else None
    return replace(
        plan, recompute=recompute, activations=chosen, streaming=streaming, budget=replace(plan.budget, disk=disk)
    )


@settings(max_examples=60, deadline=None)
@given(cases(activations=True))
def test_compute_that_is_not_cut_where_something_goes_takes_as_long(case: Case) -> None:
    each, whole = sketch(case.trace, case.plan), sketch(case.trace, case.plan, grain=Grain())
    assert computed(whole) == computed(each) and len(whole.actions) <= len(each.actions)
    one, other = (pace(Score.of(program, Costs(case.trace, case.machine, Masters.WHOLE))) for program in (each, whole))
    assert one == pytest.approx(other)


def moves(program: Sketch, verb: Verb) -> dict[tuple[int, str], list[Outline]]:
    """What ``verb`` moves, by step and block."""
    found: dict[tuple[int, str], list[Outline]] = {}
    for action in program.actions:
        if action.verb is verb:
            found.setdefault((action.step, action.block), []).append(action)
    return found


def computed(program: Sketch) -> list[tuple[int, int, bool]]:
    """Step and number of every op in the order in which they run, and whether it runs again."""
    ranges = ((a.step, op, a.recomputed) for a in program.actions if a.verb is Verb.COMPUTE for op in range(*a.ops))
    return list(ranges)
