"""What saving after every step costs, with all optimizer states on disk.

The model of ``timed``, in bf16, with fp32 masters and moments on disk: a checkpoint is these states and nothing else.
Forward and backward take 1 and 2 times as long as the step's bytes take at the rate that the disk was measured with.
Contenders, all with updates under the next forward:

``never``      saves nothing, which is what ratios are taken to;
``in place``   ``forebay.save(..., background=True)`` to the folder of ``crash_safe``: states are named where they are;
``copied``     ``forebay.save`` to any other folder: states are copied.

``ahead`` saves nothing either, and updates two of three blocks under backward, which a run that saves in place does
not: the second place of its states is where a step writes that leaves the checkpoint alone.

The first two take short turns with nobody else, in changing order: the disk of a virtual machine drifts by more than
what is measured, and what ``copied`` leaves behind is still the disk's to do in the turn after it. The rounds of one
heat differ by 5 to 10 %, so that a few of them tell nothing about 3 %: beside the median of their ratios is the
interval in which that of any number of rounds lies with 95 %, between two ratios in their order (a sign test).

What a save does is measured beside, step by step: ``save`` is what the call takes, ``to the disk`` what comes behind
the last write of a step (the disk has all that the checkpoint names, the manifest, the names), which runs beside
backward: its note says how long before the end of the step's next update call it was over, at the least. Below 0 a step
would have waited.

A turn is timed as in ``hidden``: it begins and ends behind a step whose save is under way.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import comb
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from benchmarks.fasthost.disk_step import AHEAD, CHUNK, STATE_BYTES
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.stepped import Stepped
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay import api
from forebay.budgets import DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.machine import Disk
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.disk_rates import measure_disk
from forebay.profiler.effort import CPU_EFFORT
from forebay.timeline import Lane, Timeline
from forebay.units import MiB, format_seconds

__all__ = ["compare"]

LAYERS: Final = 8
ELEMENTS: Final = 4 << 20
STEPS: Final = 4
TIMES: Final = (1, 2)
"""Forward and backward, in times of the disk."""

ROUNDS: Final = 24
FEW: Final = 2
"""Rounds of ``copied`` and ``ahead``, which are far from what they are compared with."""

SURE: Final = 0.95
TARGET: Final = 1.03


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Measures on the disk of ``folder``, in which files of some 3 GiB are made and removed again."""
    elements = (1 << 18) if quick else ELEMENTS
    return compared(
        "checkpoints",
        "What does it cost to save after every step, with all optimizer states on disk?",
        "seconds of a step and its save over those of a step that nothing saves",
        command,
        lambda: _measured(folder, elements, 2 if quick else ROUNDS, say),
        keep=not quick,
        say=say,
    )


def _measured(folder: Path, elements: int, rounds: int, say: Say) -> Measured:
    nbytes = LAYERS * elements * STATE_BYTES
    with tempfile.TemporaryDirectory(dir=folder, prefix="forebay-bench-") as inside:
        device = CpuDevice()
        found = measure_disk(device, inside, CPU_EFFORT).disk
        device.close()
        seconds_of_disk = found.read.seconds(nbytes) + found.write.seconds(nbytes)
        saves = _Saves(Path(inside) / "in place")
        subjects = _subjects(Path(inside), elements, found, saves)
        rows: list[Row] = []
        try:
            for times in TIMES:
                for stepped in subjects.values():
                    stepped.model.pace.spread(times * seconds_of_disk, LAYERS)
                seconds = _heat(subjects, ("never", "in place"), rounds, say)
                saved = saves.rows(times)
                seconds |= _heat(subjects, ("again", "copied", "ahead"), min(rounds, FEW), say)
                rows += _rows(seconds, times, nbytes, saved)
        finally:
            for stepped in subjects.values():
                stepped.close()
    setting = (
        f"{LAYERS} layers of {elements / 2**20:g}M bf16 parameters, {nbytes / MiB:.0f} MiB of states read and written "
        f"a step; {rounds} and {min(rounds, FEW)} rounds of {STEPS} steps; disk read in {found.reads}, written in "
        f"{found.writes}"
    )
    return Measured(rows, setting)


def _heat(subjects: Mapping[str, Stepped], names: Sequence[str], rounds: int, say: Say) -> dict[str, list[float]]:
    """Seconds of a step of each, round by round. ``again`` is ``never`` beside others."""
    turns = {name: partial(subjects["never" if name == "again" else name].turn, STEPS) for name in names}
    return rotated(turns, rounds, 1, say)


def _subjects(inside: Path, elements: int, disk: Disk, saves: _Saves) -> dict[str, Stepped]:
    made: dict[str, Stepped] = {}
    copied = inside / "copied"
    one = partial(_plan, folder=inside, disk=disk)
    made["never"] = Stepped(LAYERS, elements, one)
    made["ahead"] = Stepped(LAYERS, elements, partial(one, ahead=True))
    made["in place"] = Stepped(LAYERS, elements, partial(one, disk_copies=2), saves, saves.folder)
    made["copied"] = Stepped(LAYERS, elements, one, lambda m, o: api.save(m, o, copied, step=1))
    return made


@final
class _Saves:
    """Saves behind every step to ``folder``, and what that took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls: list[float] = []
        self._model: nn.Module | None = None
        self._told = 0

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        start = time.perf_counter()
        api.save(model, optimizer, self.folder, step=1, background=True)
        self._calls.append(time.perf_counter() - start)
        self._model = model

    def rows(self, times: int) -> list[Row]:
        """Of the saves since the last call."""
        if self._model is None:
            return []
        timeline = api.report(self._model).timeline
        events = [e for e in timeline.events if e.lane is Lane.DISK_WRITE and e.what == "checkpoint"][self._told :]
        self._told += len(events)
        calls, self._calls = self._calls, []
        early = _earliness(timeline, [event.end for event in events])
        note = f"over {format_seconds(early)} before the next update call, at the least" if early is not None else ""
        what = "the states' files, the manifest and the names are on the disk, behind the last write of a step"
        return [
            Row(f"save, {times} x disk", "the call of forebay.save", tuple(calls)),
            Row(f"to the disk, {times} x disk", what, tuple(e.end - e.start for e in events), note=note),
        ]


def _earliness(timeline: Timeline, ends: Sequence[float]) -> float | None:
    """How long before the end of the update call that came next something had ended, at the least. None: none came."""
    calls = [start + taken for start, taken in zip(timeline.step_starts, timeline.step_seconds, strict=True)]
    found = [min(call for call in calls if call > end) - end for end in ends if calls and calls[-1] > end]
    return min(found, default=None)


def _plan(model: TimedModel, *, folder: Path, disk: Disk, disk_copies: int = 1, ahead: bool = False) -> Plan:
    return plan_by_hand(
        model,
        states=Tier.DISK,
        overlap=True,
        speculate=spread(model, AHEAD) if ahead else (),
        chunk=CHUNK,
        disk=DiskBudget(str(folder)),
        reads=disk.reads,
        writes=disk.writes,
        disk_copies=disk_copies,
    )


def _rows(seconds: Mapping[str, list[float]], times: int, nbytes: int, saved: Sequence[Row]) -> list[Row]:
    rows = [Row(f"no save, {times} x disk", "updates under the next forward", tuple(seconds["never"]))]
    for name, beside, what, target in (
        ("in place", "never", "forebay.save(background=True) in the folder of crash_safe, every step", TARGET),
        ("copied", "again", "forebay.save in another folder, every step", None),
        ("ahead", "again", "no save, two of three blocks updated under backward", None),
    ):
        own = seconds[name]
        ratios = tuple(a / b for a, b in zip(own, seconds[beside], strict=True))
        sure = _sure(ratios) if target is not None else None
        note = f"median of {len(ratios)} rounds, {sure[0]:.3f} to {sure[1]:.3f} with {SURE:.0%}" if sure else ""
        rows.append(Row(f"{name}, {times} x disk", what, tuple(own), ratios, target, nbytes=2 * nbytes, note=note))
        if name == "in place":
            rows += saved
    return rows


def _sure(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Between which of ``ratios`` their median lies with ``SURE`` or more, whatever they are drawn from; None where
    they are too few to say."""
    count, left = len(ratios), 0.0
    low = -1
    # So many of them lie below the median with these probabilities: those of as many heads.
    while left + comb(count, low + 1) / 2**count <= (1 - SURE) / 2:
        low += 1
        left += comb(count, low) / 2**count
    if low < 0:
        return None
    ordered = sorted(ratios)
    return ordered[low], ordered[count - 1 - low]
