"""Threads of the update: shares side by side, errors, an end; and a kernel leaves the interpreter to the others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forebay.kernels import adam_low, lion, sgd
from forebay.kernels.adam import COLUMNS, adam_kernel, adam_scalars
from forebay.kernels.adam_low import adam_low_kernel
from forebay.kernels.jit import compiled
from forebay.kernels.lion import lion_kernel
from forebay.kernels.native import Form
from forebay.kernels.sgd import sgd_kernel, sgd_scalars
from forebay.kernels.shares import WHOLE
from forebay.kernels.team import ALONE, TURN, Team, cores, cores_beside_compute
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


def test_little_work_takes_no_turns(team: Team) -> None:
    seen: list[tuple[int, int, str]] = []

    def work(counter: int, shares: int) -> float:
        seen.append((counter, shares, threading.current_thread().name))
        return 0.0

    me = threading.current_thread().name
    team.take_turns(work, ALONE - 1)
    assert seen == [(0, 1, me)]
    seen.clear()
    team.take_turns(work, 7 * TURN)
    # Three threads, or one in the place of another that woke up late; one counter, which is somewhere.
    assert [shares for _, shares, _ in seen] == [7] * 3 and len({counter for counter, _, _ in seen} - {0}) == 1
    with pytest.raises(ArithmeticError):
        team.take_turns(lambda counter, shares: _fails(), 7 * TURN)


def test_shares_are_taken_until_none_is_left() -> None:
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
    scalars = adam_scalars(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, coupled=False, maximize=False)
    # One row that is cut, one that one thread does whole, and one that ends within a block.
    held = [memory(n, Form.FP32, Form.FP32, states=2, seed=n) for n in (3 * WHOLE, 300, 2 * WHOLE + 77)]
    expected = [m.copy() for m in held]
    alone = kernel(np.array([m.row(len(COLUMNS)) for m in expected], dtype=np.int64), 0, 1, 0, scalars, 0)
    rows, number = np.array([m.row(len(COLUMNS)) for m in held], dtype=np.int64), np.zeros(1, dtype=np.int64)
    # Whoever comes first finds two of them taken; they are done last, each by its name.
    number[0] = 2
    squares = kernel(rows, 0, 5, number.ctypes.data, scalars, 0)
    assert number[0] == 6
    assert kernel(rows, 0, 5, number.ctypes.data, scalars, 0) == 0.0
    squares += kernel(rows, 0, 5, 0, scalars, 0) + kernel(rows, 1, 5, 0, scalars, 0)
    assert squares == pytest.approx(alone, rel=1e-6)
    for m, want in zip(held, expected, strict=True):
        assert all(same(a, b) for a, b in zip(m.everything(), want.everything(), strict=True))


def test_threads_that_take_turns_do_every_share_once(team: Team) -> None:
    """An update is not idempotent: a share that is done twice, or not at all, is another result."""
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
    scalars = adam_scalars(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, coupled=False, maximize=False)
    held = memory(9 * TURN + 5, Form.FP32, Form.FP32, states=2)
    expected = held.copy()
    rows = np.array([held.row(len(COLUMNS))], dtype=np.int64)
    for _ in range(3):
        team.take_turns(lambda counter, shares: kernel(rows, 0, shares, counter, scalars, 0), 9 * TURN)
        kernel(np.array([expected.row(len(COLUMNS))], dtype=np.int64), 0, 1, 0, scalars, 0)
    assert all(same(a, b) for a, b in zip(held.everything(), expected.everything(), strict=True))


def test_nobody_waits_for_a_thread_that_has_not_begun(team: Team) -> None:
    begun, held = threading.Barrier(4, timeout=30), threading.Event()

    def busy(share: int, shares: int) -> float:
        begun.wait()
        assert held.wait(30)
        return 0.0

    other = threading.Thread(target=lambda: team.run(busy, ALONE))
    other.start()
    begun.wait()  # it and both threads of the team are in there now
    seen: list[tuple[int, str]] = []

    def work(share: int, shares: int) -> float:
        seen.append((share, threading.current_thread().name))
        return 1.0

    try:
        assert team.run(work, ALONE) == 3.0
    finally:
        held.set()
        other.join()
    assert seen == [(share, threading.current_thread().name) for share in range(3)]


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
        assert cores() == cores_beside_compute(1) == cores_beside_compute(0) == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert cores() == len(mine)
    assert cores_beside_compute(1) == max(1, len(mine) - 1)
    assert cores_beside_compute(0) == len(mine)


def test_several_callers_at_once_disturb_nobody(team: Team) -> None:
    """Four threads, each with a parameter of its own, on one team: everyone gets what he would get alone."""
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
    scalars = adam_scalars(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, coupled=False, maximize=False)
    held = [memory(ALONE + 13 * n, Form.FP32, Form.FP32, states=2, seed=n) for n in range(4)]
    alone = [m.copy() for m in held]

    def update(number: int) -> None:
        rows = np.array([held[number].row(len(COLUMNS))], dtype=np.int64)
        for _ in range(5):
            team.run(lambda share, shares: kernel(rows, share, shares, 0, scalars, 0), ALONE)

    threads = [threading.Thread(target=update, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(alone):
        rows = np.array([expected.row(len(COLUMNS))], dtype=np.int64)
        for _ in range(5):
            kernel(rows, 0, 1, 0, scalars, 0)
        assert all(same(a, b) for a, b in zip(held[number].everything(), expected.everything(), strict=True))


def test_a_kernel_runs_without_the_interpreter_lock() -> None:
    """While one call runs, another thread sees its work grow: with the lock it would see the begin and the end."""
    held = memory(1 << 18, Form.FP32, Form.FP32, states=2)
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
    scalars = adam_scalars(1, 1e-2, 0.9, 0.999, 1e-8, 0.1, coupled=False, maximize=False)
    # The same memory many times over, in one call: every row moves the first element again.
    rows = np.array([held.row(len(COLUMNS))] * 400, dtype=np.int64)
    kernel(rows[:0], 0, 1, 0, scalars, 0)
    begun, ended = threading.Event(), threading.Event()

    def update() -> None:
        begun.wait()
        kernel(rows, 0, 1, 0, scalars, 0)
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


def test_a_kernel_lets_go_of_its_table() -> None:
    """numba keeps an array for ever that a generator in compiled code is given (``shares.portions``)."""
    adam_numbers = adam_scalars(1, 1e-3, 0.9, 0.999, 1e-8, 0.0, coupled=False, maximize=False)
    momentum = sgd_scalars(1e-3, 0.9, 0.0, 0.0, first=True, maximize=False)
    one = Form.FP32
    calls: dict[str, tuple[Any, int, tuple[Any, ...]]] = {
        "adam": (adam_kernel(one, one, coupled=False, amsgrad=False), len(COLUMNS), (adam_numbers, 1)),
        "8bit": (
            adam_low_kernel(one, one, 8, coupled=False),
            len(adam_low.COLUMNS),
            (adam_numbers, adam_low.codebook(8), 1),
        ),
        "lion": (lion_kernel(one, one), len(lion.COLUMNS), (lion.lion_scalars(1e-3, 0.9, 0.99, 0.0), 1)),
        "sgd": (sgd_kernel(one, one, decay=False, momentum=True, nesterov=False), len(sgd.COLUMNS), (momentum,)),
    }
    for name, (kernel, columns, numbers) in calls.items():
        rows = np.zeros((2, columns), dtype=np.int64)  # rows without an element
        arrays = [rows, *(number for number in numbers if isinstance(number, np.ndarray))]
        before = list(map(sys.getrefcount, arrays))
        for _ in range(5):
            kernel(rows, 0, 1, 0, *numbers)
        assert list(map(sys.getrefcount, arrays)) == before, name
