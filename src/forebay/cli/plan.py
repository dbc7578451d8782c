"""``forebay plan``: flags to a report of what a training run would need and how fast it would be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from forebay.budgets import Budget, DiskBudget
from forebay.cli.beside import made_beside
from forebay.config import MOST, SEQ, Size, StepSettings
from forebay.errors import ConfigError, ModelError
from forebay.loss import Cut
from forebay.names import meant
from forebay.plans import UpdateTime
from forebay.reporting.files import writing
from forebay.units import format_bytes, format_count

if TYPE_CHECKING:
    import torch

    from forebay.machine import Machine
    from forebay.profiler.capture import Captured
    from forebay.recipes.tasks import Sample
    from forebay.reporting.forecast import PlanReport
    from forebay.trace import Trace

__all__ = [
    "Asked",
    "PlanSettings",
    "capture_step",
    "chosen_machine",
    "disk_budget",
    "expect_policy",
    "make_settings",
    "plan",
    "read_settings",
    "report_of",
    "with_ops",
    "write_plan",
]


Settings = TypeVar("Settings", bound=BaseModel)


class PlanSettings(StepSettings):
    """One question to ``forebay plan``."""

    seq: int = Field(default=SEQ, ge=1, le=MOST)
    device_memory: Size | None = None
    machine: str | None = None
    update: UpdateTime = "step"
    devices: str | None = None

    @field_validator("machine")
    @classmethod
    def _here_is_no_other(cls, value: str | None) -> str | None:
        return None if value == "here" else value


def make_settings(*layers: Mapping[str, Any]) -> PlanSettings:
    """The settings of ``forebay plan`` in ``layers``; see ``read_settings``."""
    return read_settings(PlanSettings, *layers)


def read_settings(kind: type[Settings], *layers: Mapping[str, Any]) -> Settings:
    """The settings of one ``kind`` in ``layers``; a later one overrides an earlier one, None means 'not given'.

    Raises ``ConfigError`` naming the first flag that is wrong.
    """
    known = {k: v for layer in layers for k, v in layer.items() if v is not None and k in kind.model_fields}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
        if first["type"] == "value_error":  # raised by one of our own parsers: it quotes the value already
            raise ConfigError(f"{flag}: {first['msg'].removeprefix('Value error, ')}") from None
        raise ConfigError(f"{flag}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {first['input']!r}") from None


def plan(settings: PlanSettings) -> PlanReport:
    """Answers ``settings``; that nothing fits is an answer too. Raises a ``UsageError`` for what cannot be used."""
    import torch

    from forebay.cli.runfolder import expect_model
    from forebay.profiler.optimizers import STATES
    from forebay.recipes.tasks import sample
    from forebay.tiling import noted_tiles, notes_of, tile, with_tiles

    expect_policy(settings.policy)
    expect_model(settings.model, weights=False)
    folder = disk_budget(settings)
    machine, notes = chosen_machine(settings, folder)
    here = torch.device(machine.device_kind) if settings.machine is None else None
    found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype)
    if settings.tile is None:
        return _answer(settings, found, machine, notes, folder, here)
    cut = tile(found.model, settings.tile)
    report = _answer(settings, found, machine, (*notes, noted_tiles(cut, settings.tile)), folder, here)
    if report.plan is None:
        return report
    plan = with_tiles(report.plan, found.model, STATES[settings.optimizer], found.batch, here)
    return replace(report, plan=plan, reasons=plan.reasons, notes=(*report.notes, *notes_of(found.model)))


def _answer(
    settings: PlanSettings,
    found: Sample,
    machine: Machine,
    notes: tuple[str, ...],
    folder: DiskBudget | None,
    here: torch.device | None,
) -> PlanReport:
    """The report on the model of ``found``; ``here`` is the device where it will run, None: on another machine."""
    from forebay.planners import holds_all
    from forebay.planners.parts import gives_up_nothing
    from forebay.planning import choose_report, problem_of
    from forebay.profiler.loss import cut_for, forced_cut

    device = machine.device_capacity if settings.device_memory is None else settings.device_memory
    budget = Budget(device, settings.host_memory, None, folder)

    def asked(cut: Cut | None) -> Asked:
        captured, name = capture_step(settings, found, machine, cut)
        on, timed = (machine, ()) if settings.machine is not None else with_ops(captured, machine)
        return Asked(settings, name, captured.trace, on, budget, (*notes, *timed), cut)

    if settings.loss == "chunked":
        return report_of(asked(forced_cut(found.model, found.batch, device, here)))
    plain = asked(None)
    if settings.loss != "auto":
        return report_of(plain)
    problem = problem_of(plain.trace, plain.machine, budget, accumulates=settings.accumulate > 1)
    known = report_of(plain) if holds_all(problem) else None
    if known is not None and known.plan is not None and gives_up_nothing(known.plan):
        return known  # whatever the loss: it is not captured, and not planned, twice
    cut = cut_for(found.model, found.batch, device, here)
    if isinstance(cut, str):
        return known or report_of(plain)
    try:
        pieces = asked(cut)
    except ModelError as error:
        # The model itself is fine: it has been captured. Its loss is not one that can be cut.
        report = known or report_of(plain)
        return replace(report, notes=(*report.notes, str(error)))
    if known is not None:
        return choose_report(known, report_of(pieces), cut)
    began = time.perf_counter()
    at_once, in_pieces = made_beside(report_of, [plain, pieces])
    chosen = choose_report(at_once, in_pieces, cut)
    return replace(chosen, solve_seconds=min(chosen.solve_seconds, time.perf_counter() - began))


@dataclass(frozen=True)
class Asked:
    """A step of the model called ``name`` that there shall be a plan for, its loss as in ``cut``."""

    settings: PlanSettings
    name: str
    trace: Trace
    machine: Machine
    budget: Budget
    notes: tuple[str, ...]
    cut: Cut | None


def report_of(asked: Asked) -> PlanReport:
    """The report on what is ``asked`` for."""
    from forebay.planning import assess

    settings = asked.settings
    return assess(
        asked.name,
        asked.trace,
        asked.machine,
        asked.budget,
        settings.policy,
        asked.notes,
        asked.cut,
        settings.compress,
        settings.accumulate,
        settings.update,
        settings.checksums,
    )


def expect_policy(name: str) -> None:
    """Raises ``ConfigError`` where there is no policy ``name``."""
    from forebay.planners import PLANNERS
    from forebay.planners.parallel import ON_DEVICES

    if name in ON_DEVICES and name not in PLANNERS:
        raise ConfigError(
            f"--policy: {name} is for several devices, which are simulated; ask forebay plan with --devices 2, or more"
        )
    if name not in PLANNERS:
        hint = " ".join(filter(None, (meant(name, PLANNERS), f"policies are {', '.join(sorted(PLANNERS))}")))
        raise ConfigError(f"--policy: there is no {name!r}; {hint}")


def write_plan(report: PlanReport, path: Path) -> None:
    """Writes the plan of ``report`` to ``path``, for ``forebay.prepare(plan=...)``. Raises ``StorageError``."""
    if report.plan is None:
        raise ConfigError(f"there is no plan to write to {path}: nothing fits")
    with writing("the plan", path):
        path.write_text(report.plan.to_json() + "\n", encoding="utf-8")


def disk_budget(settings: PlanSettings) -> DiskBudget | None:
    """What ``--disk`` allows. Raises ``ConfigError``."""
    if settings.disk is None:
        return None
    try:
        return DiskBudget.of(settings.disk)
    except ConfigError as error:
        raise ConfigError(f"--disk: {error}") from None


def chosen_machine(settings: PlanSettings, disk: DiskBudget | None) -> tuple[Machine, tuple[str, ...]]:
    """The machine that ``--machine`` names: a file or an entry of the catalogue, None: this one; and remarks on it."""
    if settings.machine is None:
        from forebay.profiler.here import this_machine

        return this_machine(None, disk)
    from forebay.catalogue import in_host, read_machine

    try:
        machine = read_machine(settings.machine)
    except ConfigError as error:
        raise ConfigError(f"--machine: {error}") from None
    if disk is not None and machine.disk is None:
        raise ConfigError(f"--disk: machine {machine.name} has no disk; leave --disk out, or add one to its file")
    asked = in_host(machine, settings.host_memory, None if disk is None else disk.nbytes)
    return asked, _larger_than_listed(machine, asked)


def _larger_than_listed(listed: Machine, asked: Machine) -> tuple[str, ...]:
    """Remarks on a host that is larger than the one that the catalogue lists a card in."""
    sizes = [("host memory", listed.host_capacity, asked.host_capacity)]
    if listed.disk is not None and asked.disk is not None:
        sizes.append(("disk", listed.disk.capacity, asked.disk.capacity))
    return tuple(
        f"{listed.name} is listed with {format_bytes(there)} of {what}; {format_bytes(wanted)} are taken, as asked"
        for what, there, wanted in sizes
        if wanted > there
    )


def with_ops(captured: Captured, machine: Machine) -> tuple[Machine, tuple[str, ...]]:
    """This machine with the seconds of the step's ops, if its rates were measured too, and remarks on them.

    Beside typical rates they would say nothing: a plan weighs ops against transfers.
    """
    from forebay.profiler.op_table import measure_ops

    remarks: list[str] = []
    found = measure_ops(captured, machine, tell=remarks.append)
    return found.machine, (*remarks, *([found.note] if found.note else []))


def capture_step(settings: PlanSettings, found: Sample, machine: Machine, cut: Cut | None) -> tuple[Captured, str]:
    """One step of the model, and what the report calls it."""
    from forebay.profiler.capture import capture
    from forebay.runtime.own_checkpointing import as_planned

    piece = 0 if cut is None else cut.piece
    try:
        with as_planned(found.model):
            captured = capture(found.model, found.batch, settings.optimizer, machine.device_kind, loss_piece=piece)
    except ModelError as error:
        raise ModelError(f"{settings.model}: {error}") from None
    parameters = format_count(sum(p.numel for b in captured.trace.model.blocks for p in b.parameters))
    shape = f"batch {settings.batch}"
    if found.seq is not None:
        shape += f" of {found.seq} tokens"
    if settings.model.partition(":")[1] and found.seq is None:
        shape = "its own batch"
    return captured, f"{settings.model} ({parameters} parameters, {shape})"
