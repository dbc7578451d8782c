"""Bytes op by op: closed forms of chains, with and without recomputation, and bounds that hold for any timing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.arenas import arenas
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Tier
from forebay.plans import Streaming
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.trace import NO_SAVES
from tests.null.strategies import RESIDENT, Case, cases, roomy
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace, peak_live

# A layer keeps SAVED in two ops, hands on OUT, and takes TEMPORARY while it makes that.
SAVED, OUT, TEMPORARY, GRADIENT, N = 1000, 300, 700, 4 * 256, 4


def chain(n: int = N, *, late: bool = False, **more: int):  # type: ignore[no-untyped-def]
    blocks = [block(f"layers.{i}", ((16, 16), "float32", True)) for i in range(n)]
    layers = [Layer(b.name, saved=(SAVED, SAVED), temporary=TEMPORARY, out=OUT, late=late) for b in blocks]
    return chain_trace(blocks, layers, **more)


def test_peak_of_a_chain() -> None:
    # Both kept activations and the result of every layer, the loss's softmax (as large as the last result) and value.
    # The most is there during the first backward op of the last layer or later; peak_live finds it one by one.
    profile = Liveness(chain()).profile()
    at_the_end_of_forward = N * (2 * SAVED + OUT) + OUT + 4
    assert sum(level[profile.forward] for level in profile.levels.values()) == at_the_end_of_forward
    assert profile.peak == max(profile.during) == peak_live(chain())
    assert all(level[0] == level[-1] == 0 for level in profile.levels.values())


@pytest.mark.parametrize("late", [False, True])
def test_recomputed_blocks_keep_their_inputs_and_results_only(late: bool) -> None:
    trace = chain(late=late)
    every = [b.name for b in trace.model.blocks]
    profile = Liveness(trace).profile(every)
    assert sum(level[profile.forward] for level in profile.levels.values()) == N * OUT + OUT + 4
    ops = sum(len(trace.segments[v.segment].ops) for v in trace.visits)
    # Run again: the two that keep, and the temporary if what makes the result saves it. Never the result.
    assert len(profile.during) == ops + N * (2 + late)
    again = [run for run in profile.runs if run.again]
    assert [trace.visits[run.visit].block for run in again] == list(reversed(every))
    assert [run.length for run in again] == [2 + late] * N
    # While the last layer is computed again: results so far, the gradient of its own, and all that it makes; its first
    # result is gone by then.
    end = again[0].position + again[0].length - 1
    assert profile.during[end] == (N - 1) * OUT + OUT + 2 * SAVED + late * TEMPORARY
    # What its first backward op makes is as large as what it keeps last. The temporary went when the recomputation
    # stopped, although nothing in the trace drops it before its forward visit is over.
    assert profile.during[end + 1] == (N - 1) * OUT + OUT + 2 * SAVED + SAVED
    assert profile.peak < Liveness(trace).profile().peak


def test_what_saves_nothing_is_never_run_again() -> None:
    trace = chain()
    none = tuple(replace(s, saves_until=NO_SAVES) for s in trace.segments)
    profile = Liveness(replace(trace, segments=none)).profile([b.name for b in trace.model.blocks])
    assert not any(run.again for run in profile.runs)


def test_a_recomputation_may_be_of_no_ops_at_all() -> None:
    """A block whose first op saves what it is given: torch stops before that op, which needs its slot all the same."""
    trace = chain()
    first = tuple(replace(s, saves_until=min(s.saves_until, 0)) for s in trace.segments)
    trace = replace(trace, segments=first)
    profile = Liveness(trace).profile(["layers.3"])
    assert [run.length for run in profile.runs if run.again] == [0]
    assert len(profile.during) == sum(len(trace.segments[v.segment].ops) for v in trace.visits)
    plan = replace(roomy(trace), recompute=("layers.3",))
    assert not any(action.recomputed for action in lower(trace, plan).actions)


def test_one_recomputed_block_spares_what_it_saves() -> None:
    trace = chain()
    liveness = Liveness(trace)
    spared = liveness.saved_nbytes()
    assert spared == {f"layers.{i}": 2 * SAVED for i in range(N)}
    for name, nbytes in spared.items():
        kept, without = liveness.profile(), liveness.profile([name])
        difference = [sum(p.levels[k][p.forward] for k in p.levels) for p in (kept, without)]
        assert difference[0] - difference[1] == nbytes


def test_outputs_and_unseen_bytes_count_in_forward() -> None:
    plain = Liveness(chain()).profile()
    held = Liveness(chain(held_nbytes=10_000)).profile()
    unseen = Liveness(chain(unseen_nbytes=50_000)).profile()
    forward = plain.forward
    assert held.with_outputs[:forward] == tuple(n + 10_000 for n in plain.during[:forward])
    assert held.with_outputs[forward:] == plain.during[forward:]
    left = sum(level[forward] for level in plain.levels.values())
    assert unseen.with_outputs[forward - 1] == left + 50_000
    assert unseen.during == plain.during


@pytest.mark.parametrize("window", [0, 1, GRADIENT, 3 * GRADIENT, 1 << 20])
def test_gradients_under_way(window: int) -> None:
    liveness = Liveness(chain())
    names = [b.name for b in liveness.trace.model.blocks]
    peak = liveness.profile().peak
    streaming = Streaming(gradient_window=window)
    assert liveness.beside((), [], streaming) == peak  # resident gradients have a place of their own
    bound = liveness.beside((), names, streaming)
    assert peak <= bound <= peak + min(window, N * GRADIENT)


def test_resident_updates_widen_gradients() -> None:
    # 4 bytes for each of 200,000 elements, which is more than the step takes.
    trace = chain_trace([block("layers.0", ((200_000,), "bfloat16", True))])
    plan = roomy(trace, RESIDENT)
    sizes = arenas(trace.model, plan.placements, plan.streaming, trace.state_names)
    inputs = 256
    assert device_bound(trace, plan) == sizes.device + inputs + 200_000 * 4


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 2))
def test_no_timing_goes_over_the_bound(case: Case, micro_batches: int) -> None:
    program = lower(case.trace, case.plan, micro_batches=micro_batches)
    usage = play(program, Costs(case.trace, case.machine, Masters.WHOLE)).usage(Tier.DEVICE)
    assert usage.peak <= device_bound(case.trace, case.plan)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_profile_is_that_of_the_trace(case: Case) -> None:
    profile = Liveness(case.trace).profile()
    assert max(profile.during) == peak_live(case.trace)
    assert all(level[-1] == 0 for level in profile.levels.values())
