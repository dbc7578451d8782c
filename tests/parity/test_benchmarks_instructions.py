"""Instructions are counted one by one, and a kernel's are those that it has more of for more parameters."""

from __future__ import annotations

import os
from functools import partial
from itertools import repeat

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.updates.contenders import KERNELS, Buffers
from benchmarks.updates.instructions import counted, per_parameter
from forebay.kernels.team import Team

EIGHT_BITS = 4
"""The kernel of 8-bit states."""


def turns(count: int) -> None:
    for _ in repeat(None, count):
        pass


@pytest.fixture(scope="module", autouse=True)
def traced() -> None:
    try:
        counted(partial(turns, 1))
    except BenchmarkError as error:
        pytest.skip(str(error))


def test_more_work_has_more_instructions() -> None:
    none, once, twice = (counted(partial(turns, 1000 * times)) for times in range(3))
    assert twice - once == pytest.approx(once - none, rel=0.05)
    assert once - none > 1000  # a turn of the loop is several


def test_a_kernel_has_a_number_for_each_parameter() -> None:
    team = Team(1)
    few, more = (KERNELS[EIGHT_BITS](Buffers(elements), team) for elements in (512, 1536))
    assert "8-bit" in few.name
    # The arithmetic alone, with 16 parameters an instruction, is some 2; one at a time it would be beyond 30.
    assert 2 < per_parameter(few.step, more.step, 1024) < 30


def test_what_fails_is_not_counted() -> None:
    parent, work = os.getpid(), []

    def fail() -> None:
        work.append(1)
        if os.getpid() != parent:
            raise ValueError

    with pytest.raises(BenchmarkError, match="instructions cannot be counted"):
        counted(fail)
    assert work == [1]  # and no child of this process goes on here
