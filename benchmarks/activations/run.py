"""Activations under budgets: forebay beside what PyTorch offers, on models whose activations fill the device."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from benchmarks.activations.models import BATCHES, ZooModel, chosen
from benchmarks.activations.planned import AUTO, COMPILED_AUTO, Candidate, candidates, same_plan
from benchmarks.activations.race import Entry, Pace, Start, count, heats, merged, race, set_up
from benchmarks.activations.record import Comparison, Field, Row, State
from benchmarks.allocator import hold_freed_memory
from benchmarks.case import BenchmarkError, Contender, DeviceKind, Job
from benchmarks.provenance import Timing
from forebay.machine import Machine

if TYPE_CHECKING:
    from benchmarks.measure import Runner

T = TypeVar("T")

__all__ = ["COMPILED", "QUICK", "Settings", "compare", "follow", "footprint", "paired", "rows_of"]

COMPILED = (0.25, 0.5, 0.75)
"""Activation memory budgets of ``torch.compile``."""

AS = "as "
"""Begins the label of a budget that is the peak of a rival."""

PROCESS = 640 << 20
"""Bytes of a contender's process beside what its tiers hold: Python, torch, the harness's copy of the parameters."""

FRAGMENTS = 1.2
"""What the allocator holds of the host's memory for a byte that is used."""

SHARE_OF_MEMORY = 0.7
"""Of the memory that is available when the rounds begin, how much the contenders of a heat may take."""

ROCKMATE = (
    "1.0.1 with rkgb 1.0.1 does not read the GPT-2 of transformers 5 (a cast without a dtype), and measures memory "
    "only on CUDA (without it a small MLP ends in a division by zero); 2.0.0 needs a module that its rkgb lacks"
)
"""Why Rockmate has no figures here."""

REDRAWN = (
    "with an activation memory budget below 1 torch.compile draws other numbers where it recomputes dropout, so that "
    "the gradients are not those of the loss (pytorch issue 190758)"
)
"""Why ``torch.compile`` has no figures of a model with dropout."""


PACE = Pace(seconds=420.0)
"""Of all heats of a model together."""

DUEL = 7
"""Rounds at the least of a heat in which a rival is: there ``auto`` and the rival are held against each other."""


@dataclass(frozen=True)
class Settings:
    """How much is measured. ``shares`` are budgets in percent of plain's peak; ``compiled`` activation memory budgets
    (0 to 1) of ``torch.compile``, which costs minutes; ``eager``: whether rivals that are not compiled run, too (plain
    always does); ``batches`` rows of a step by model; ``pace`` is that of all
    heats of a model together; ``timing`` seconds of op timing before plans are made; ``kept`` says that the figures are
    to be kept, so that no source may change."""

    shares: tuple[int, ...] = (20, 35, 50, 70, 90)
    compiled: tuple[float, ...] = ()
    eager: bool = True
    batches: tuple[tuple[str, int], ...] = tuple(BATCHES.items())
    pace: Pace = PACE
    timing: float = 10.0
    kept: bool = True


QUICK = Settings(shares=(50, 80), batches=tuple((name, 2) for name in BATCHES), pace=Pace(1, 1), timing=2.0, kept=False)
"""Whether everything works, not how fast it is."""


def compare(names: list[str], settings: Settings, command: str, *, say: Callable[[str], None]) -> Comparison:
    """Runs the models called ``names`` (all, if empty). A model that fails is named in the result."""
    models = chosen(names)
    timing = Timing(command)
    held = _apart(hold_freed_memory)
    machine = _apart(_measured)
    fields: list[Field] = []
    failed: list[str] = []
    for model in models:
        say(f"{model.name}:")
        with tempfile.TemporaryDirectory(prefix="forebay-activations-") as folder:
            job = Job(model, dict(settings.batches)[model.name], 0, DeviceKind.CPU, Path(folder))
            try:
                fields.append(_field(model, job, machine, settings, say))
            except BenchmarkError as error:
                failed.append(f"{model.name}: {error}")
                say(f"  {error}")
    return Comparison(
        **timing.ended(kept=settings.kept),
        rounds=min((len(row.seconds) for field in fields for row in field.rows if row.seconds), default=0),
        warmup=settings.pace.warmup,
        steps=settings.pace.steps,
        fields=tuple(fields),
        failed=tuple(failed),
        held=held,
        beside=", ".join(f"compile {share:g}" for share in settings.compiled) if not settings.eager else "",
    )


def _field(model: ZooModel, job: Job, machine: Machine, settings: Settings, say: Callable[[str], None]) -> Field:
    """All contenders on ``model``: peaks of the rivals, then plans within shares of plain's, then the rounds."""
    from benchmarks.isolated import IsolatedRunner

    def start(contender: Contender) -> Runner:
        return IsolatedRunner(contender, job, settings.pace.steps, hold_freed_memory)

    entries, left_out = _rivals(model, settings)
    counted = [entry for entry in entries if entry.row.name != "plain-again"]
    count(counted, start)
    peaks = {entry.row.name: entry.row.device for entry in counted}
    plain = peaks["plain"]
    if plain is None:
        raise BenchmarkError(f"plain did not run: {entries[0].row.detail}")
    say(f"  peaks of {', '.join(f'{name} {peak / 2**20:.0f} MiB' for name, peak in peaks.items() if peak)}")
    try:
        found = _apart(candidates, model, job.batch, machine, _budgets(plain, peaks, settings.shares), settings.timing)
    except Exception as error:  # whatever a planner raises: this model has no result, the others go on
        raise BenchmarkError(f"planning failed: {type(error).__name__}: {error}") from error
    for one in found:
        foretold = one.predicted
        say(f"  {one.name}: {one.refusal if foretold is None else f'{foretold.step_seconds:.3f} s foretold'}")
    rows = rows_of(found)
    contenders = _contenders(found, rows)
    say(f"  {len(found)} plans asked for, {len(contenders)} different ones")
    running = paired([entry for entry in entries if entry.row.state is State.MEASURED], contenders)
    groups = heats(running, "plain", int(SHARE_OF_MEMORY * psutil.virtual_memory().available), footprint)
    done = merged(_raced(groups, settings, start, say))
    return Field(model.name, job.batch, plain, _ordered(entries, left_out, rows, done))


def paired(rivals: Sequence[Entry], contenders: Sequence[Entry]) -> list[list[Entry]]:
    """Everyone: each rival with what has its peak for a budget, to come into one heat, then each of the others."""
    running = [[rival, *(entry for entry in contenders if entry.row.label == AS + rival.row.name)] for rival in rivals]
    taken = [entry for company in running for entry in company]
    return running + [[entry] for entry in contenders if entry not in taken]


def _raced(
    groups: Sequence[Sequence[Entry]], settings: Settings, start: Start, say: Callable[[str], None]
) -> list[Row]:
    """The rows of all heats, whose rounds are numbered through."""
    raced: list[Row] = []
    for number, group in enumerate(groups, 1):
        say(f"  heat {number} of {len(groups)}: {', '.join(entry.row.name for entry in group)}")
        share = len(group) / sum(map(len, groups))
        pace = replace(settings.pace, seconds=share * settings.pace.seconds)
        if any(entry.row.label.startswith(AS) for entry in group):
            pace = replace(pace, least=min(max(pace.least, DUEL), pace.most))
        first = max((index + 1 for row in raced for index in row.rounds), default=0)
        with set_up(group, start):
            raced += race(group, "plain", pace, say, first=first)
    return raced


def footprint(row: Row) -> int:
    """Bytes that the process of a contender takes: by its peaks if they were counted, else as they are foretold."""
    foretold = row.predicted
    device = row.device or (foretold.device if foretold else 0)
    host = row.host or (foretold.host if foretold else 0)
    return PROCESS + int(FRAGMENTS * (device + host))


def _ordered(
    rivals: Sequence[Entry], left_out: Sequence[Row], rows: Sequence[Row], done: Mapping[str, Row]
) -> tuple[Row, ...]:
    """Every row once, rivals first: as it came out of the race if it ran (``done``), else as it was."""
    own = follow([done.get(row.name, row) for row in rows])
    return (*(done.get(entry.row.name, entry.row) for entry in rivals), *left_out, *own)


def _rivals(model: ZooModel, settings: Settings) -> tuple[list[Entry], list[Row]]:
    """Those that run, plain first, and the rows of those that do not."""
    from benchmarks.activations.rivals import CHECKPOINT, PLAIN, PLAIN_AGAIN, SAVE_ON_CPU, Compiled

    eager = [PLAIN, *((PLAIN_AGAIN, CHECKPOINT, SAVE_ON_CPU) if settings.eager else ())]
    compiled = [
        Compiled(name=f"compile {share:g}", what=f"torch.compile, activation_memory_budget={share:g}", share=share)
        for share in settings.compiled
    ]
    absent = [Row("rockmate", "rockmate", "Rockmate", "", None, State.LEFT_OUT, detail=ROCKMATE)]
    if compiled and model.draws:
        if not settings.eager:
            raise BenchmarkError(REDRAWN)
        absent += [replace(_entry(rival).row, state=State.LEFT_OUT, detail=REDRAWN) for rival in compiled]
        compiled = []
    return [_entry(rival) for rival in (*eager, *compiled)], absent


def _entry(rival: Contender) -> Entry:
    exact = not rival.name.startswith("compile")
    return Entry(rival, Row(rival.name, rival.name.partition(" ")[0], rival.what, "", None, State.MEASURED, exact))


def _budgets(plain: int, peaks: dict[str, int | None], shares: Sequence[int]) -> list[tuple[str, int]]:
    """Shares of plain's peak, and the peak of every rival that takes less than plain: there they are held against each
    other."""
    grid = [(f"{share} %", plain * share // 100) for share in shares]
    # The rivals' come first: of several budgets with one plan the first is the one that runs, in its rival's heat.
    return [(f"{AS}{name}", peak) for name, peak in peaks.items() if peak is not None and peak < plain] + grid


def _apart(function: Callable[..., T], *args: Any) -> T:
    """What ``function`` returns in a process of its own, which holds the memory that it frees as the contenders' do."""
    with multiprocessing.get_context("spawn").Pool(1, hold_freed_memory) as pool:
        return pool.apply(function, args)


def _measured() -> Machine:
    """This machine as it is now."""
    from forebay.profiler.probe import probe

    return probe("cpu", refresh=True)


def rows_of(found: Sequence[Candidate]) -> list[Row]:
    """A row for every candidate; of several with one plan, the first one is measured for all. What is held against a
    rival takes turns with it, though another heat may have its plan, too."""
    rows: list[Row] = []
    ran: list[Candidate] = []
    for candidate in found:
        plan = candidate.plan
        held = candidate.series in (AUTO, COMPILED_AUTO) and candidate.label.startswith(AS)
        near = [one for one in ran if one.label == candidate.label] if held else ran
        twin = next(
            (c for c in near if plan and c.plan and c.share == candidate.share and same_plan(c.plan, plan)), None
        )
        if plan is not None and twin is None:
            ran.append(candidate)
        rows.append(
            Row(
                name=candidate.name,
                series=candidate.series,
                what=_words(candidate),
                label=candidate.label,
                budget=candidate.nbytes,
                state=State.MEASURED if plan is not None else State.NO_PLAN,
                exact=candidate.series != COMPILED_AUTO,
                detail=candidate.refusal,
                predicted=candidate.predicted,
                measured_as=None if twin is None else twin.name,
            )
        )
    return rows


def follow(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with the figures of the row that ran their plan."""
    by_name = {row.name: row for row in rows}
    done = []
    for row in rows:
        if row.measured_as is not None:
            ran = by_name[row.measured_as]
            row = replace(
                row,
                state=ran.state,
                detail=ran.detail,
                device=ran.device,
                host=ran.host,
                seconds=ran.seconds,
                ratios=ran.ratios,
                rounds=ran.rounds,
            )
        done.append(row)
    return done


def _contenders(found: Sequence[Candidate], rows: Sequence[Row]) -> list[Entry]:
    from benchmarks.activations.loop import Planned

    return [
        Entry(Planned(name=row.name, what=row.what, plan=candidate.plan, share=candidate.share), row)
        for candidate, row in zip(found, rows, strict=True)
        if candidate.plan is not None and row.measured_as is None
    ]


def _words(candidate: Candidate) -> str:
    """What the plan does, in a few words."""
    plan = candidate.plan
    if plan is None:
        return candidate.series
    blocks = len(plan.placements)
    away = sum(not p.resident for p in plan.placements)
    treated = sum(len(s.blocks) for s in plan.activations)
    parts = [
        f"{away} of {blocks} blocks leave the device" if away else "",
        f"{len(plan.recompute)} run again" if plan.recompute else "",
        f"{treated} by op" if treated else "",
        f"{plan.streaming.host_activations / 2**20:.0f} MiB offloaded" if plan.streaming.host_activations else "",
    ]
    how = f"activation memory budget {candidate.share:g}: " if candidate.series == COMPILED_AUTO else ""
    return how + (", ".join(part for part in parts if part) or "all is kept")
