"""Bytes op by op where single ops are kept or moved: closed forms of chains, and bounds that hold for any timing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.lowering import Liveness, Profile, device_bound, lower
from forebay.lowering.index import TraceIndex
from forebay.machine import Curve, Link
from forebay.memory import Tier
from forebay.plans import Placement, Streaming
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.strategies import RESIDENT, Case, cases, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.treated_bytes import moved_bytes

# A layer makes FIRST and SECOND, which it saves, takes TEMPORARY while it makes OUT, and hands that on.
FIRST, SECOND, OUT, TEMPORARY, N = 8192, 4096, 256, 4160, 4
EVERY = tuple(f"layers.{i}" for i in range(N))
NAMES = {"first": ("linear", 0), "second": ("linear", 1), "temporary": ("mix", 0), "out": ("out", 0)}


def chain(n: int = N, *, late: bool = False, first: int = FIRST, second: int = SECOND, **more: object) -> Trace:
    blocks = [block(f"layers.{i}", ((4,), "float32", True)) for i in range(n)]
    saved = (first, second) if second else (first,)
    layers = [Layer(b.name, saved, TEMPORARY, OUT, late=late) for b in blocks]
    return chain_trace(blocks, layers, **more)  # type: ignore[arg-type]


def chosen(fate: Fate, *names: str, blocks: tuple[str, ...] = EVERY) -> tuple[Selection, ...]:
    return (Selection(blocks, tuple(Treatment(*NAMES[name], fate) for name in names)),)


def at_turning(profile: Profile) -> int:
    """Bytes between forward and backward."""
    return sum(level[profile.forward] for level in profile.levels.values())


# Which ops may be named.


def test_names_are_overloads_and_occurrences() -> None:
    index = TraceIndex(chain())
    assert dict(index.named(0)) == {name: place for place, name in enumerate(NAMES.values())}
    assert index.named(1) is index.named(2)  # layers that are alike are looked at once
    second = index.trace.visits[1].first_tensor
    assert [index.made_by(1, op) for op in range(4)] == [(second + op,) for op in range(4)]


def test_views_are_not_named_and_count_for_themselves() -> None:
    blocks = [block("layers.0", ((4,), "float32", True))]
    trace = chain_trace(blocks, [Layer("layers.0", (FIRST, SECOND), TEMPORARY, OUT, view=True)])
    places = {("linear", 0): 0, ("linear", 1): 2, ("mix", 0): 4, ("out", 0): 5}
    assert dict(TraceIndex(trace).named(0)) == places
    # An op that returns what it was given and is no view has written to it.
    works = tuple(replace(w, nbytes=8) if w.op == "view" else w for w in trace.works)
    written = TraceIndex(replace(trace, works=works)).named(0)
    assert dict(written) == {name: place for name, place in places.items() if name[0] != "linear"}


def test_what_a_later_visit_writes_to_is_not_named() -> None:
    trace = chain(2)
    loss = trace.visits[2].segment
    # The loss overwrites the last result: its first op returns its port.
    first, *rest = trace.segments[loss].ops
    segments = list(trace.segments)
    segments[loss] = replace(segments[loss], ops=(replace(first, outputs=(*first.outputs, first.inputs[0])), *rest))
    index = TraceIndex(replace(trace, segments=tuple(segments)))
    assert NAMES["out"] in index.named(0) and NAMES["out"] not in index.named(1)


# Blocks that recompute.


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.OFFLOAD])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("names", [("first",), ("second",), ("first", "second"), ("first", "temporary")])
def test_named_ops_do_not_run_again(names: tuple[str, ...], late: bool, fate: Fate) -> None:
    liveness = Liveness(chain(late=late))
    plain, profile = liveness.profile(EVERY), liveness.profile(EVERY, chosen(fate, *names))
    again = [run for run in profile.runs if run.again]
    places = {op for op, name in enumerate(NAMES) if name in names and op < 2 + late}
    assert [run.skipped for run in again] == [frozenset(places)] * N
    assert [replace(run, skipped=frozenset()) for run in profile.runs] == list(plain.runs)
    # From forward to backward a layer leaves its result, and what is kept.
    sizes = dict(zip(NAMES, (FIRST, SECOND, TEMPORARY, OUT), strict=True))
    kept = sum(sizes[name] for name in names if name != "temporary" or late) if fate is Fate.KEEP else 0
    assert at_turning(plain) == N * OUT + OUT + 4
    assert at_turning(profile) - at_turning(plain) == N * kept
    assert all(level[-1] == 0 for level in profile.levels.values())
    moved = [sizes[name] for _ in EVERY for name in names] if fate is Fate.OFFLOAD else []
    assert [move.nbytes for move in profile.moves] == moved
    assert liveness.host_activations(EVERY, chosen(fate, *names)) == sum(-(-n // 64) * 64 for n in moved)


def test_what_is_kept_has_one_life() -> None:
    liveness = Liveness(chain())
    profile, plain = liveness.profile(EVERY, chosen(Fate.KEEP, "first")), liveness.profile(EVERY)
    again = {run.visit: run for run in profile.runs if run.again}
    # While a layer runs again, what is kept of the layers before it is there as well, and its own is not there twice.
    for layer, run in again.items():
        for position in (run.position, run.position + 1):
            more = layer * FIRST + (FIRST if position == run.position else 0) - (position == run.position) * FIRST
            assert profile.during[position] - plain.during[position] == more


def test_what_is_moved_is_back_when_the_op_would_have_run_again() -> None:
    profile = Liveness(chain()).profile(EVERY, chosen(Fate.OFFLOAD, "second"))
    again = {run.visit: run for run in profile.runs if run.again}
    for move in profile.moves:
        run = again[move.visit]
        assert move.asked == run.position + 1  # the second op
        assert (move.made, move.ops[0]) == (run.first_op + 1,) * 2
        assert move.dropped == run.first_op + 3  # its layer's last op
        # Its backward reads it first, and autograd lets go of it with its own gradients: of the input, a parameter.
        assert profile.during[move.gone] - profile.during[move.gone + 1] >= SECOND - FIRST
    assert [move.what for move in profile.moves] == [f"{name} linear#1" for name in EVERY]


def test_an_op_after_the_last_save_is_moved_for_nothing() -> None:
    """Torch's recomputation stops before it: nobody asks for it again, kept or moved."""
    liveness = Liveness(chain())
    kept, moved = (liveness.profile(EVERY, chosen(fate, "temporary")) for fate in (Fate.KEEP, Fate.OFFLOAD))
    assert kept.during == liveness.profile(EVERY).during == moved.during
    assert [(move.asked, move.gone) for move in moved.moves] == [(-1, -1)] * N


# Blocks that do not recompute.


def test_what_is_moved_is_away_between_forward_and_backward() -> None:
    liveness = Liveness(chain())
    plain, profile = liveness.profile(), liveness.profile((), chosen(Fate.OFFLOAD, "first", "second"))
    assert at_turning(plain) == N * (FIRST + SECOND + OUT) + OUT + 4
    assert at_turning(profile) == N * OUT + OUT + 4
    assert profile.peak < plain.peak
    assert all(level[-1] == 0 for level in profile.levels.values())
    # Backward asks in reverse order.
    asked = [move.asked for move in profile.moves]
    assert asked == sorted(asked, reverse=True) and min(asked) > profile.forward


def test_small_tensors_stay() -> None:
    liveness = Liveness(chain(first=4095, second=4096))
    both = chosen(Fate.OFFLOAD, "first", "second")
    assert [move.nbytes for move in liveness.profile((), both).moves] == [4096] * N
    assert at_turning(liveness.profile((), both)) == N * (4095 + OUT) + OUT + 4
    # In a block that recomputes they are kept.
    assert at_turning(liveness.profile(EVERY, both)) == N * (4095 + OUT) + OUT + 4


# What may be under way.


@pytest.mark.parametrize("window", [0, FIRST, FIRST + SECOND, 1 << 20])
def test_windows_at_the_turning_point(window: int) -> None:
    """A loss outside of the model takes so much that the most is there between forward and backward."""
    unseen = 1 << 20
    liveness = Liveness(chain(unseen_nbytes=unseen))
    moving = chosen(Fate.OFFLOAD, "first", "second")
    standing = N * OUT + OUT + 4 + unseen
    moved = N * (FIRST + SECOND)

    def bound(streaming: Streaming) -> int:
        return liveness.beside((), (), streaming, moving)

    assert bound(Streaming(offload_window=window)) == standing + min(window, moved)
    assert bound(Streaming(reload_window=window)) == standing  # nothing comes back in forward
    assert bound(Streaming(gradient_window=window)) == standing


@pytest.mark.parametrize("window", [0, FIRST, FIRST + SECOND, 1 << 20])
def test_what_comes_back_ahead(window: int) -> None:
    """The most is there when backward has asked for the last layer's and for none of the others."""
    liveness = Liveness(chain(first=1 << 16))
    moving = chosen(Fate.OFFLOAD, "first", "second")
    none = liveness.beside((), (), Streaming(), moving)
    profile = liveness.profile((), moving)
    assert none == profile.peak
    ahead = [sum(m.nbytes for m in profile.moves if m.asked > p) for p in range(len(profile.during))]
    expected = max(
        live + (min(window, ahead[p]) if p >= profile.forward else 0) for p, live in enumerate(profile.with_outputs)
    )
    assert liveness.beside((), (), Streaming(reload_window=window), moving) == expected <= none + window


def test_an_extreme_without_the_op_has_nothing_to_treat() -> None:
    """The extreme saves one tensor a layer, a large one: no second product is there to be moved, and that is what the
    promise counts."""
    alone = chain(first=1 << 16, second=0)
    liveness = Liveness(replace(chain(), extremes=(alone,)))
    moving = chosen(Fate.OFFLOAD, "second")
    assert liveness.beside((), (), Streaming(), moving) == Liveness(alone).profile().peak
    assert liveness.host_activations((), moving) == N * SECOND
    both = chosen(Fate.OFFLOAD, "first", "second")
    assert liveness.host_activations((), both) == N * (1 << 16) > N * (FIRST + SECOND)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("again", [(), EVERY])
@pytest.mark.parametrize("reload_window", [0, FIRST, 1 << 20])
def test_nothing_comes_back_while_something_leaves(reload_window: int, again: tuple[str, ...], device: str) -> None:
    """Everything is still on its way to the host when forward ends. What comes back first would fit, but has to wait:
    it is not there beside what leaves."""
    trace = chain(device=device, input_nbytes=8)
    streaming = Streaming(offload_window=1 << 20, reload_window=reload_window, host_activations=1 << 20)
    homes = tuple(Placement(name, *RESIDENT) for name in EVERY)
    plan = plan_for(trace, homes, streaming, again, chosen(Fate.OFFLOAD, "first", "second"), roomy=True)
    for back in (1e3, 1e9):
        machine = replace(roomy_machine(device), d2h=Link(Curve(((1, 1e3),))), h2d=Link(Curve(((1, back),))))
        usage = play(lower(trace, plan), Costs(trace, machine, Masters.WHOLE)).usage(Tier.DEVICE)
        assert usage.peak <= device_bound(trace, plan)


@settings(max_examples=60, deadline=None)
@given(cases(activations=True), st.integers(1, 2))
def test_no_timing_goes_over_the_bound(case: Case, micro_batches: int) -> None:
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    usage = play(program, Costs(case.trace, case.machine, Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak <= device_bound(case.trace, case.plan)


@settings(max_examples=60, deadline=None)
@given(cases(activations=True))
def test_every_life_ends(case: Case) -> None:
    liveness = Liveness(case.trace)
    profile = liveness.profile(case.plan.recompute, case.plan.activations)
    assert all(level[-1] == 0 for level in profile.levels.values())
    for fate, room, unit in (
        (Fate.OFFLOAD, liveness.host_activations, 64),
        (Fate.DISK, liveness.disk_activations, 4096),
    ):
        moved = moved_bytes(case.trace, case.plan.activations, fate)
        assert sorted(move.moved for move in profile.moves if move.fate is fate) == sorted(moved)
        assert room(case.plan.recompute, case.plan.activations) == sum(-(-n // unit) * unit for n in moved)
