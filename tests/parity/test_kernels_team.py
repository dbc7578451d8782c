"""Threads of the update: shares side by side, errors, an end; and a kernel leaves the interpreter to the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forebay.kernels.adam import COLUMNS, adam_kernel, adam_scalars
from forebay.kernels.jit import compiled
from forebay.kernels.native import Form
from forebay.kernels.team import ALONE, TURN, Team, cores
from tests.parity.kernel_rig import memory, same


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(3)
    yield made
    made.close()


def test_every_share_runs_once_and_the_sum_is_in_order(team: Team) -> None:
    # Added up in another order these would give another number.
    values, seen = (1e16, 1.0, -1e16), []
    lock = threading.Lock()

    def work(share: int, shares: int) -> float:
        with lock:
            seen.append((share, shares, threading.current_thread().name))
        return values[share]

    assert team.run(work, ALONE) == (1e16 + 1.0) - 1e16
    assert sorted(s[:2] for s in seen) == [(0, 3), (1, 3), (2, 3)]
    assert (0, 3, threading.current_thread().name) in seen


def test_shares_run_side_by_side(team: Team) -> None:
    barrier = threading.Barrier(3, timeout=30)
    assert team.run(lambda share, shares: barrier.wait() * 0.0 + 1.0, ALONE) == 3.0


def test_who_is_done_takes_the_next_share(team: Team) -> None:
    seen: list[tuple[int, int]] = []
    held = threading.Event()

    def work(share: int, shares: int) -> float:
        # Whoever has the first share keeps it until all others are done: by the other threads.
        if share == 0:
            assert held.wait(30)
        seen.append((share, shares))
        if len(seen) == shares - 1:
            held.set()
        return 0.0

    team.take_turns(work, 7 * TURN)
    assert sorted(seen) == [(share, 7) for share in range(7)] and seen[-1] == (0, 7)
    seen.clear()
    held.set()
    team.take_turns(work, ALONE - 1)
    assert seen == [(0, 1)]
    with pytest.raises(ArithmeticError):
        team.take_turns(lambda share, shares: _fails(), 7 * TURN)


def _fails() -> float:
    raise ArithmeticError


def test_little_work_is_done_alone(team: Team) -> None:
    before = threading.active_count()
    assert team.run(lambda share, shares: float(shares), ALONE - 1) == 1.0
    assert threading.active_count() == before


def test_an_error_reaches_who_asked_after_all_have_ended(team: Team) -> None:
    ended = []

    def work(share: int, shares: int) -> float:
        if share == 1:
            raise ArithmeticError("share 1")
        ended.append(share)
        return 0.0

    with pytest.raises(ArithmeticError, match="share 1"):
        team.run(work, ALONE)
    assert sorted(ended) == [0, 2]
    assert team.run(lambda share, shares: 1.0, ALONE) == 3.0


def test_close_ends_the_threads_and_work_goes_on_alone() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    team.run(lambda share, shares: 0.0, ALONE)
    started = set(threading.enumerate()) - before
    assert sorted(t.name for t in started) == ["forebay-team-1", "forebay-team-2"]
    team.close()
    team.close()
    assert not any(t.is_alive() for t in started)
    assert team.run(lambda share, shares: float(shares), ALONE) == 1.0
    with pytest.raises(ValueError, match="at least one thread"):
        Team(0)


def test_cores_are_those_of_the_affinity_mask() -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert cores() == len(mine)


def test_several_callers_at_once_disturb_nobody(team: Team) -> None:
    """Four threads, each with a parameter of its own, on one team: everyone gets what he would get alone."""
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
    scalars = adam_scalars(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, coupled=False, maximize=False)
    held = [memory(ALONE + 13 * n, Form.FP32, Form.FP32, states=2, seed=n) for n in range(4)]
    alone = [m.copy() for m in held]

    def update(number: int) -> None:
        rows = np.array([held[number].row(len(COLUMNS))], dtype=np.int64)
        for _ in range(5):
            team.run(lambda share, shares: kernel(rows, share, shares, scalars, 0), ALONE)

    threads = [threading.Thread(target=update, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(alone):
        rows = np.array([expected.row(len(COLUMNS))], dtype=np.int64)
        for _ in range(5):
            kernel(rows, 0, 1, scalars, 0)
        assert all(same(a, b) for a, b in zip(held[number].everything(), expected.everything(), strict=True))


def test_a_kernel_runs_without_the_interpreter_lock() -> None:
    """While one call runs, another thread sees its work grow: with the lock it would see the begin and the end."""
    held = memory(1 << 18, Form.FP32, Form.FP32, states=2)
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
    scalars = adam_scalars(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, coupled=False, maximize=False)
    # The same memory many times over, in one call: every row moves the first element again.
    rows = np.array([held.row(len(COLUMNS))] * 400, dtype=np.int64)
    kernel(rows[:0], 0, 1, scalars, 0)
    begun, ended = threading.Event(), threading.Event()

    def update() -> None:
        begun.wait()
        kernel(rows, 0, 1, scalars, 0)
        ended.set()

    thread = threading.Thread(target=update)
    thread.start()
    # numpy's look at a value holds the lock from begin to end; torch's lets go of it.
    values = held.parameter.numpy()
    seen = {float(values[0])}
    begun.set()
    while not ended.is_set():
        seen.add(float(values[0]))
    thread.join()
    assert len(seen) > 2, seen


def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same() -> None:
    """As where neither the package's folder nor the user's cache may be written: numba knows no place for this one."""
    names: dict[str, Any] = {}
    exec(compile("def twice(value):\n    return 2 * value / 0.0\n", "<nowhere>", "exec"), names)
    made = compiled(names["twice"])
    assert made is not names["twice"]
    assert made(1.0) == float("inf")
