"""Which threads step back behind others."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.kernels.team import ALONE, Team
from forebay.priority import STEP, step_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_one_thread_steps_back_and_no_other() -> None:
    own = nice()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(nice).result() == own
        pool.submit(step_back).result()
        assert pool.submit(nice).result() == min(19, own + STEP)
        pool.submit(step_back).result()
        assert pool.submit(nice).result() == min(19, own + STEP)
        # A thread inherits the value of the one that starts it.
        with ThreadPoolExecutor(1) as inner:
            inherited = pool.submit(lambda: inner.submit(nice).result()).result()
            assert inherited == min(19, own + STEP)
            inner.submit(step_back).result()
            assert inner.submit(nice).result() == inherited
    assert nice() == own


def test_a_team_prepares_each_of_its_own_threads_once() -> None:
    prepared: list[int] = []
    both = threading.Barrier(2, timeout=10)
    team = Team(2, lambda: prepared.append(threading.get_ident()))

    def work(share: int, shares: int) -> float:
        both.wait()  # neither thread does the other's share
        return float(threading.get_ident() == caller)

    caller = threading.get_ident()
    assert team.run(work, ALONE) + team.run(work, ALONE) == 2.0
    team.close()
    assert len(prepared) == 1 and prepared[0] != caller
