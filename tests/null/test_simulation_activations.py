"""Activations that move, on a clock: what the transfers cost, and when the device is rid of their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from forebay.memory import Kind, Tier
from forebay.program import Action, Change
from forebay.simulation import Costs
from forebay.simulation.play import play
from forebay.states import Masters
from forebay.timeline import Lane, Timeline
from tests.null.simulating import (
    MACHINE,
    RATE,
    compute,
    fetch,
    flat_link,
    offload,
    programmed,
    reload,
    run,
    seconds_trace,
    spans,
)

N = 200
TWO_SECONDS = N / RATE


def peak(timeline: Timeline) -> int:
    return timeline.peaks[Tier.DEVICE]


def making(op: int, nbytes: int, *after: int) -> Action:
    """Op ``op`` makes ``nbytes`` that stay."""
    return compute(op, *after, peak=nbytes, changes=[(Kind.ACTIVATION, nbytes)])


def test_both_ways_go_at_the_rates_of_the_link() -> None:
    done = run(
        making(0, N),
        offload(N, 0, ops=(0, 1)),
        reload(N, 0, 1),
        seconds=[1.0],
        d2h=flat_link(RATE),
        h2d=flat_link(RATE / 4),
    )
    assert spans(done, Lane.D2H) == [(1.0, 1.0 + TWO_SECONDS)]
    assert spans(done, Lane.H2D) == [(1.0 + TWO_SECONDS, 1.0 + TWO_SECONDS * 5)]


def test_a_reload_shares_its_lane_with_fetches() -> None:
    done = run(making(0, N), offload(N, 0, ops=(0, 1)), fetch(1000), reload(N, 0, 1), seconds=[1.0])
    assert spans(done, Lane.H2D) == [(0.0, 10.0), (10.0, 10.0 + TWO_SECONDS)]


@pytest.mark.parametrize(("seconds", "most"), [(1.0, N + 50), (3.0, N)])
def test_an_offload_frees_when_it_is_done(seconds: float, most: int) -> None:
    """Compute has let go at once; the op after the next makes 50 bytes, after the copy or before its end."""
    done = run(
        making(0, N),
        offload(N, 0, ops=(0, 1)),
        compute(1),
        making(2, 50),
        seconds=[1.0, seconds, 1.0],
    )
    assert peak(done) == most


@pytest.mark.parametrize(("held", "most"), [(1, 50), (2, 50), (3, N + 50)])
def test_and_not_before_compute_has_let_go(held: int, most: int) -> None:
    """The copy is done long before the last op begins; Python holds the tensor until after op ``held - 1``."""
    done = run(
        making(0, N),
        offload(N, 0, ops=(0, held)),
        compute(1),
        making(2, 50),
        seconds=[1.0, 9.0, 1.0],
    )
    assert peak(done) == max(N, most)
    assert done.usage(Tier.DEVICE).live == 50


def test_a_reload_takes_its_bytes_when_it_is_issued() -> None:
    """The lane is busy until second 10; the op behind which the reload is issued ends at 1, and the next one makes 50
    bytes beside what is on its way."""
    actions = [making(0, N), offload(N, 0, ops=(0, 1)), fetch(1000), compute(1), reload(N, 3, 1), making(2, 50)]
    assert peak(run(*actions, seconds=[1.0, 3.0, 1.0])) == N + 50


@pytest.mark.parametrize("fast", [True, False])
def test_a_reload_is_not_issued_before_the_offloads_that_it_waits_for_are_done(fast: bool) -> None:
    """Whoever issues it waits: its bytes are not there beside those that leave, however fast the lanes are."""
    actions = [making(0, N), offload(N, 0, ops=(0, 1)), reload(N, 0, 1)]
    assert peak(run(*actions, seconds=[1.0], d2h=flat_link(RATE * 100 if fast else RATE / 100))) == N


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_goes_between_two_reloads_is_gone_before_the_second(order: Sequence[int]) -> None:
    """Two reloads are issued behind the same compute; with one of them something goes that was there."""
    first, second = reload(N, 2, 1), reload(N, 2, 1)
    freeing = [first, second]
    freeing[order[1]] = replace(second, changes=(Change(Kind.ACTIVATION, -N), *second.changes))
    standing = {Tier.DEVICE: {Kind.ACTIVATION: N}}
    done = run(making(0, N), offload(N, 0, ops=(0, 1)), compute(1), *freeing, seconds=[1.0, 5.0], standing=standing)
    assert peak(done) == 2 * N
    assert done.usage(Tier.DEVICE).live == 2 * N


@pytest.mark.parametrize(("kind", "seconds"), [("cpu", 1.5), ("cuda", 1.0)])
def test_who_computes_hands_over_what_moves(kind: str, seconds: float) -> None:
    """On ``cpu`` it takes the computing thread that long; the copies are as fast as ever."""
    machine = replace(MACHINE, device_kind=kind, handover_seconds=0.25)
    moved = replace(offload(N, 0, ops=(0, 1)), tensor=0)
    program = programmed(making(0, N), moved, moved)
    still = play(program, Costs(seconds_trace([1.0]), replace(machine, handover_seconds=0.0), Masters.WHOLE))
    played = play(program, Costs(seconds_trace([1.0]), machine, Masters.WHOLE))
    assert spans(played, Lane.COMPUTE) == [(0.0, seconds)]
    lengths = [[end - start for start, end in spans(one, Lane.D2H)] for one in (still, played)]
    assert lengths[0] == pytest.approx(lengths[1]) and len(lengths[0]) == 2


def test_only_where_parameters_come_and_go_do_ops_take_longer() -> None:
    """On ``cpu``. Where activations move, or blocks run again, the byte ledger rests in the steps that count. What runs
    again is an op like others where it was not measured."""
    machine = replace(MACHINE, device_kind="cpu", watch_seconds=0.5)
    again = replace(making(0, N), recomputed=True)
    for slots, seconds in (((), 1.0), ((N,), 1.5)):
        for actions in ((making(0, N),), (again,), (making(0, N), offload(N, 0, ops=(0, 1)))):
            program = replace(programmed(*actions), slots=slots)
            played = play(program, Costs(seconds_trace([1.0]), machine, Masters.WHOLE))
            assert spans(played, Lane.COMPUTE) == [(0.0, seconds)]


@pytest.mark.parametrize(("kind", "more"), [("cpu", 1.0), ("cuda", 0.0)])
def test_what_runs_again_and_what_is_treated_take_longer(kind: str, more: float) -> None:
    """On ``cpu``, op by op; nothing more where parameters come and go, which backward asks for behind it anyway."""
    machine = replace(MACHINE, device_kind=kind, watch_seconds=0.5, replay_seconds=0.25, treat_seconds=0.125)
    seconds = {(False, True): 0.125, (True, False): 0.25, (True, True): 0.375}
    for (again, treated), added in seconds.items():
        action = replace(making(0, N), recomputed=again, treated=treated)
        for slots in ((), (N,)):
            streamed = 0.0 if again else 0.5 * len(slots)
            played = play(replace(programmed(action), slots=slots), Costs(seconds_trace([1.0]), machine, Masters.WHOLE))
            assert spans(played, Lane.COMPUTE) == [(0.0, 1.0 + more * (added + streamed))]
