"""Ctrl-C before any one instruction of a few functions."""

from __future__ import annotations

from collections.abc import Callable
from dis import opname
from types import CodeType, FrameType
from typing import Any, TypeAlias

__all__ = ["NEVER", "TraceFunction", "interrupt_at"]

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]

LOOKING = ("RESUME", "CALL", "JUMP_BACKWARD")
"""Beginnings of the names of instructions behind which CPython looks for signals; nowhere else does it interrupt."""


NEVER = 1 << 60
"""The number of an instruction that nothing comes to."""


def interrupt_at(number: int, *codes: CodeType, anywhere: bool = False) -> TraceFunction:
    """A trace function that interrupts before instruction ``number`` of what runs of ``codes``, of those that an
    interrupt can come before or of all (``anywhere``).

    From Python 3.12 on a function tells of its instructions in calls that follow on one that was traced: let all of
    them run under a trace function for ``NEVER`` before, and none of them in between.
    """
    left = [number]
    latest: dict[FrameType, int] = {}

    def local(frame: FrameType, event: str, argument: object) -> TraceFunction:
        if event == "opcode":
            before = opname[frame.f_code.co_code[latest[frame]]] if frame in latest else ""
            latest[frame] = frame.f_lasti
            left[0] -= anywhere or before.startswith(LOOKING)
            if left[0] < 0:
                raise KeyboardInterrupt
        return local

    def begun(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        return local

    return begun
