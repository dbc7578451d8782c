"""What saving after every step costs, with all optimizer states on disk.

The model of ``timed``, in bf16, with fp32 masters and moments on disk: a checkpoint is these states and nothing else.
Forward and backward take 1 and 2 times as long as the step's bytes take at the rate that the disk was measured with.
Contenders, all with updates under the next forward:

``never``      saves nothing, which is what ratios are taken to;
``in place``   ``forebay.save(..., background=True)`` to the folder of ``crash_safe``: states are named where they are;
``copied``     ``forebay.save`` to any other folder: states are copied.

``ahead`` saves nothing either, and updates two of three blocks under backward, which a run that saves in place does
not: the second place of its states is where a step writes that leaves the checkpoint alone.

A turn is timed as in ``hidden``: it begins and ends behind a step whose save is under way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from benchmarks.fasthost.disk_step import AHEAD, CHUNK, STATE_BYTES, STEPS
from benchmarks.fasthost.hidden import Stepped
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay import api
from forebay.budgets import DiskBudget
from forebay.device.cpu import CpuDevice
from forebay.machine import Disk
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.disk_rates import measure_disk
from forebay.profiler.effort import CPU_EFFORT
from forebay.units import MiB

__all__ = ["compare"]

LAYERS: Final = 8
ELEMENTS: Final = 4 << 20
TIMES: Final = (1, 2)
"""Forward and backward, in times of the disk."""

TARGET: Final = 1.03


def compare(folder: Path, command: str, *, quick: bool, say: Say) -> Comparison:
    """Measures on the disk of ``folder``, in which files of some 3 GiB are made and removed again."""
    elements = (1 << 18) if quick else ELEMENTS
    return compared(
        "checkpoints",
        "What does it cost to save after every step, with all optimizer states on disk?",
        "seconds of a step and its save over those of a step that nothing saves",
        command,
        lambda: _measured(folder, elements, 2 if quick else 5, say),
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
        subjects = _subjects(Path(inside), elements, found)
        try:
            turns: dict[str, Callable[[], float]] = {}
            for times in TIMES:
                for name, stepped in subjects.items():
                    turns[f"{name} {times}"] = partial(_turn, stepped, times * seconds_of_disk)
            seconds = rotated(turns, rounds, 1, say)
        finally:
            for stepped in subjects.values():
                stepped.close()
    setting = (
        f"{LAYERS} layers of {elements / 2**20:g}M bf16 parameters, {nbytes / MiB:.0f} MiB of states read and written "
        f"a step; {rounds} rounds of {STEPS} steps"
    )
    return Measured(_rows(seconds, nbytes), setting)


def _subjects(inside: Path, elements: int, disk: Disk) -> dict[str, Stepped]:
    made: dict[str, Stepped] = {}
    kept, copied = inside / "in place", inside / "copied"
    one = partial(_plan, folder=inside, disk=disk)
    made["never"] = Stepped(LAYERS, elements, one)
    made["ahead"] = Stepped(LAYERS, elements, partial(one, ahead=True))
    made["in place"] = Stepped(LAYERS, elements, partial(one, disk_copies=2), partial(_save, kept, True), kept)
    made["copied"] = Stepped(LAYERS, elements, one, partial(_save, copied, False))
    return made


def _save(folder: Path, background: bool, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    api.save(model, optimizer, folder, step=1, background=background)


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


def _turn(stepped: Stepped, seconds: float) -> float:
    stepped.model.pace.spread(seconds, LAYERS)
    return stepped.turn(STEPS)


def _rows(seconds: Mapping[str, list[float]], nbytes: int) -> list[Row]:
    rows = []
    for times in TIMES:
        never = seconds[f"never {times}"]
        rows.append(Row(f"no save, {times} x disk", "updates under the next forward", tuple(never)))
        for name, what, target in (
            ("in place", "forebay.save(background=True) in the folder of crash_safe, every step", TARGET),
            ("copied", "forebay.save in another folder, every step", None),
            ("ahead", "no save, two of three blocks updated under backward", None),
        ):
            own = seconds[f"{name} {times}"]
            ratios = tuple(a / b for a, b in zip(own, never, strict=True))
            rows.append(Row(f"{name}, {times} x disk", what, tuple(own), ratios, target, nbytes=2 * nbytes))
    return rows
