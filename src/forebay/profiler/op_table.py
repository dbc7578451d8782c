"""Seconds of ops on this machine, kept beside its figures: an op of known shape is timed once, whatever the model.

The table is a file of its own in the folder of ``machine_cache``, and is of use under the same circumstances only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import final

import torch

from forebay.errors import ConfigError
from forebay.machine import Machine
from forebay.profiler.capture import Captured
from forebay.profiler.machine_cache import Circumstances, cache_file, cache_folder, keep, recall_as
from forebay.profiler.probe import circumstances
from forebay.profiler.stopwatch import ColdStopwatch, CudaStopwatch, Stopwatch
from forebay.profiler.timing import TimingPolicy, time_each, waited
from forebay.units import format_seconds

__all__ = ["MOST_OPS", "TABLE_SCHEMA", "MeasuredOps", "OpTable", "measure_ops", "with_measured_ops"]

TABLE_SCHEMA = 1
"""Goes up when ops are timed in another way, or their signatures are written in another."""

MOST_OPS = 10_000
"""Ops that the table keeps, about 2 MB; a transformer's step has some hundred. Those not used for longest go first."""

_LARGEST_PART = 4
"""One op may take a quarter of the device's memory while it is timed."""

_BURST = 20
"""Calls in one run on a GPU: 10 us to issue one and 5 us to see its end, spread over all, are less than one."""


@final
@dataclass(frozen=True)
class OpTable:
    """Seconds by ``Work.signature``, those used last at the end."""

    circumstances: Circumstances
    seconds: Mapping[str, float]
    schema: int = TABLE_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != TABLE_SCHEMA:
            raise ConfigError(f"the table of ops has schema {self.schema}, this forebay reads schema {TABLE_SCHEMA}")
        wrong = next((op for op, taken in self.seconds.items() if not (taken > 0 and isfinite(taken))), None)
        if wrong is not None:
            raise ConfigError(f"the table of ops says that {wrong} takes {self.seconds[wrong]} s")

    def used(self, seconds: Mapping[str, float]) -> OpTable:
        """This table after ``seconds`` were used: with all of them, and of the others as many as it may keep."""
        rest = {op: taken for op, taken in self.seconds.items() if op not in seconds}
        merged = list({**rest, **seconds}.items())
        return replace(self, seconds=dict(merged[-MOST_OPS:]))


@final
@dataclass(frozen=True)
class MeasuredOps:
    """A machine with the seconds of a step's ops: how many were ``known``, how many were ``timed`` now, how many
    could not be because of what else runs here (``disturbed``), and the wall-clock ``seconds`` that timing took."""

    machine: Machine
    known: int = 0
    timed: int = 0
    disturbed: int = 0
    seconds: float = 0.0

    @property
    def note(self) -> str:
        """The same in words; empty where there is nothing to say."""
        parts = []
        if self.timed or self.disturbed:
            parts.append(f"{self.timed} kinds of ops were timed here in {format_seconds(self.seconds)}")
        if self.known:
            parts.append(f"{self.known} kinds of ops were timed here before")
        if self.disturbed:
            parts.append(f"{self.disturbed} could not be: other programs had the cores in every run")
        return "; ".join(parts)


def with_measured_ops(
    captured: Captured,
    machine: Machine,
    device: str | torch.device | None = None,
    *,
    folder: Path | None = None,
    seconds: float = 5.0,
) -> Machine:
    """``machine`` with what the ops of a step take on ``device``, which is here (None: ``cuda`` where there is one).

    What is known already comes from the table in ``folder`` (None: the user's cache folder). What is not is timed,
    for ``seconds`` at most, and kept there. A machine whose own figures were not measured, or that is another kind of
    device than ``device`` or the trace's, is returned as it is.

    Raises ``ModelError`` for a device that is not there.
    """
    return measure_ops(captured, machine, device, folder=folder, seconds=seconds).machine


def measure_ops(
    captured: Captured,
    machine: Machine,
    device: str | torch.device | None = None,
    *,
    folder: Path | None = None,
    seconds: float = 5.0,
    stopwatch: Stopwatch | None = None,
    waiting: Callable[[], float] = waited,
    tell: Callable[[str], None] | None = None,
) -> MeasuredOps:
    """``with_measured_ops`` with what came of it.

    ``tell`` is told in one line when a table cannot be used or kept (None: the log does). ``stopwatch`` None: one that
    suits the device. ``waiting``: see ``time_each``.
    """
    say = tell or logging.getLogger("forebay").warning
    name, here = circumstances(None if device is None else str(device))
    wanted = torch.device(name)
    if machine.source != "measured" or {machine.device_kind, captured.trace.device} != {wanted.type}:
        return MeasuredOps(machine)
    file = cache_file(folder or cache_folder(), name, "ops")
    table = _recall(file, here, say)
    asked = {work.signature for work in captured.trace.works}
    known = {op: taken for op, taken in table.seconds.items() if op in asked}
    start = time.perf_counter()
    timed = time_each(
        captured.trace,
        captured.calls,
        replace(machine, op_seconds={**machine.op_seconds, **known}),
        wanted,
        stopwatch or (CudaStopwatch(wanted.index or 0) if wanted.type == "cuda" else ColdStopwatch()),
        _policy(machine, seconds),
        waiting=waiting,
    )
    took = time.perf_counter() - start
    if timed.seconds:
        try:
            keep(table.used({**known, **timed.seconds}), file)
        except OSError as error:
            say(f"cannot keep what was timed in {file}: {error.strerror}; it is timed again next time")
    found = replace(machine, op_seconds={**machine.op_seconds, **known, **timed.seconds})
    return MeasuredOps(found, len(known), len(timed.seconds), len(timed.disturbed), took)


def _policy(machine: Machine, seconds: float) -> TimingPolicy:
    room = machine.device_capacity // _LARGEST_PART
    standard = TimingPolicy(total=seconds, burst=_BURST if machine.device_kind == "cuda" else 1)
    return replace(standard, nbytes=max(1, min(standard.nbytes, room)))


def _recall(file: Path, here: Circumstances, say: Callable[[str], None]) -> OpTable:
    """The table in ``file``; one that cannot be used is thrown away and an empty one takes its place."""
    found, reason = recall_as(OpTable, file, here)
    if reason:
        say(f"{reason}; timing the ops anew")
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    return OpTable(here, {}) if found is None else found
