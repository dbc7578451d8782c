"""``forebay fragmentation``: a file or a run to a recording, and that to every model of an allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from forebay.buffer_csv import read_buffers
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.errors import ConfigError
from forebay.lowering import step_buffers
from forebay.memory import ALIGNMENT
from forebay.recording import Recording, recording_of
from forebay.reporting.fragmentation import Fragmentation
from forebay.simulation.allocators import ALLOCATORS, Allocator, PlannedAllocator, replay, room_for
from forebay.snapshot import read_snapshot
from forebay.trace import Trace

__all__ = ["examine", "played", "step_of_run"]

STEPS = 2
"""How often a step is played: from the second on, an allocator has what the one before has left."""

SECONDS = 5.0
"""How long addresses are searched for."""


def examine(source: Path) -> Fragmentation:
    """What every allocator would have reserved for what ``source`` recorded. Raises ``ConfigError`` for what is none of
    what ``forebay fragmentation`` reads."""
    if source.is_dir():
        return played(f"{source.name}: a step of the run", recording_of(step_of_run(source), STEPS))
    if source.suffix == ".csv":
        return played(source.name, recording_of(read_buffers(source), STEPS))
    if source.suffix == ".json":
        return played(source.name, recording_of(_of_trace(source), STEPS))
    return played(source.name, read_snapshot(source))


def played(title: str, recording: Recording) -> Fragmentation:
    """``recording`` played to every model, and to addresses from the default layout."""
    planned = _planned(recording)
    offsets = {int(b.id): offset for b, offset in zip(planned.given.buffers, planned.offsets, strict=True)}
    models: dict[str, Callable[[int | None], Allocator]] = {
        **{name: partial(make, recording) for name, make in ALLOCATORS.items()},
        "arena": lambda limit: PlannedAllocator(offsets, planned.height),
    }
    replays = tuple(replay(name, recording, make) for name, make in models.items())
    fits_in = tuple(min(r.peak_reserved, room_for(recording, models[r.allocator])) for r in replays)
    live = max(recording.live, default=0)
    return Fragmentation(title, live, replays, fits_in, recording.observed, recording.notes)


def _planned(recording: Recording) -> Addresses:
    """Addresses at the alignment of a device."""
    from forebay.planners.layout import lay_out

    aligned = tuple(replace(buffer, alignment=ALIGNMENT) for buffer in recording.buffers())
    found = lay_out(BufferSet(aligned), seconds=SECONDS)
    check_addresses(found)
    return found


def _of_trace(path: Path) -> tuple[Buffer, ...]:
    try:
        return step_buffers(Trace.from_json(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def step_of_run(folder: Path) -> tuple[Buffer, ...]:
    """The buffers of a step of the run in ``folder`` as its plan has it: the model is captured again from the run's
    settings. Raises ``ConfigError`` for a folder without a run, or without its plan."""
    from forebay.cli.recapture import captured_again
    from forebay.cli.runfolder import kept_config, kept_plan
    from forebay.profiler.here import this_machine

    begun = kept_config(folder)
    if begun is None:
        raise ConfigError(f"{folder} has no run in it; give the folder of --run, or a memory snapshot")
    plan = kept_plan(folder)
    machine, _ = this_machine(begun.device)  # not its disk, which may be gone
    trace = captured_again(begun, plan, machine.device_kind)
    return step_buffers(trace, plan.recompute, plan.activations)
