"""How many instructions an update kernel executes for each parameter: what there is to say where the cores bind.

scripts/bench instructions

A virtual machine has no counters of instructions. So a child takes a step of one thread in single steps (``ptrace(2)``,
``PTRACE_SINGLESTEP``) and each of them is one instruction, whatever the processor makes of it. It does so for two
numbers of parameters: what calling a kernel takes is in both, and the difference is the kernel's own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from benchmarks.case import BenchmarkError
from benchmarks.host import hardware
from benchmarks.updates.contenders import KERNELS, Buffers
from benchmarks.updates.record import ARCHIVE, MEMORY, Comparison
from forebay.kernels.team import Team

__all__ = ["compare", "counted", "per_parameter"]

FEW, MORE = 1 << 14, 1 << 15
"""Parameters: so few that one thread does all of them."""

_TRACEME: Final = 0
_SINGLESTEP: Final = 9
_FAILED: Final = 3
"""The exit status of a child that may not be traced, or whose work raises."""


def compare(say: Callable[[str], None]) -> None:
    """Counts for every kernel, and says at what rate the newest kept run of this machine has executed them. Raises
    ``BenchmarkError`` where nothing can be traced."""
    kept = next((c for c in ARCHIVE.latest() if c.hardware == hardware(with_gpu=False)), None)
    for number in range(len(KERNELS)):
        name, found = _counted_of(number)
        say(f"{name:52} {found:6.2f} instructions a parameter{'' if kept is None else _rate(kept, name, found)}")


def _counted_of(number: int) -> tuple[str, float]:
    team = Team(1)
    few, more = (KERNELS[number](Buffers(elements), team) for elements in (FEW, MORE))
    return few.name, per_parameter(few.step, more.step, MORE - FEW)


def _rate(kept: Comparison, name: str, found: float) -> str:
    row = kept.row(name)
    each = row.parameters_per_second(kept.elements) * found / kept.hardware.cores
    share = row.bytes_per_second(kept.elements) / kept.row(MEMORY).bytes_per_second(kept.elements)
    found_rate = f"{each / 1e9:5.2f} thousand million a second and core"
    return f", {found_rate}, {share:.2f} of the bandwidth ({kept.date:%Y-%m-%d})"


def per_parameter(few: Callable[[], object], more: Callable[[], object], beyond: int) -> float:
    """The instructions of each of the ``beyond`` parameters that ``more`` has beyond those of ``few``."""
    return (counted(more) - counted(few)) / beyond


def counted(work: Callable[[], object]) -> int:
    """The instructions of ``work``, which is called twice before, in a child of this process. Raises ``BenchmarkError``
    where no child can be traced, and where ``work`` does not come to its end there."""
    work()  # here: what is compiled is compiled once, and not by every child
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    child = os.fork()
    if child == 0:
        _be_traced(trace, work)
    try:
        return _steps(trace, child)
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        raise


def _steps(trace: Callable[..., int], child: int) -> int:
    """The single steps of ``child`` from its first stop to its end."""
    _, status = os.waitpid(child, 0)
    if not os.WIFSTOPPED(status):
        raise BenchmarkError("instructions cannot be counted: a child that is to be traced (ptrace) ended before")
    steps = 0
    while True:
        if trace(_SINGLESTEP, child, None, None) != 0:
            raise BenchmarkError(f"instructions cannot be counted: {os.strerror(ctypes.get_errno())}")
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return steps
        if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
            raise BenchmarkError(f"instructions cannot be counted: status {status} after {steps} of them")
        steps += 1


def _be_traced(trace: Callable[..., int], work: Callable[[], object]) -> NoReturn:
    """The life of the child."""
    try:
        gc.disable()
        work()  # its pages are its own from here on
        if trace(_TRACEME, 0, None, None) == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            os._exit(0)
    finally:
        os._exit(_FAILED)
