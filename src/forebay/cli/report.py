"""``forebay report``: the folder of a run to a page, a picture and a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.cli.recapture import captured_again
from forebay.cli.runfolder import OWN, REPORT, RUN, begun_with, kept_config, kept_plan
from forebay.errors import ConfigError, ForebayError, StorageError
from forebay.reporting.chrome_trace import chrome_trace
from forebay.reporting.files import expect_apart, expect_folder_of, writing
from forebay.reporting.losses import LOSSES, read_losses
from forebay.reporting.run import RunReport
from forebay.reporting.run_page import RunPage, render

if TYPE_CHECKING:
    from forebay.config import TrainConfig
    from forebay.timeline import Timeline
    from forebay.trace import Trace

__all__ = ["Written", "gather", "report"]

T = TypeVar("T")

PAGE = "report.html"

SLACK = 0.005
"""A step that is simulated again and differs by more from the plan's was simulated at other rates."""


@dataclass(frozen=True)
class Written:
    """What was shown and where it lies: the page, and the picture and the trace if they were asked for."""

    shown: RunPage
    page: Path
    plot: Path | None = None
    trace: Path | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints: sizes are bytes, times seconds, rates per second."""
        shown = self.shown
        figures = {} if shown.report is None else shown.report.to_json_dict()
        return {
            **figures,
            "steps": len(shown.losses) or figures.get("steps", 0),
            "loss": [line.loss for line in shown.losses],
            "policy": shown.plan.planner,
            "cautions": list(shown.cautions),
            "notes": list(shown.notes),
            "dtypes": [entry.to_json_dict() for entry in shown.dtypes],
            "page": str(self.page),
            "plot": None if self.plot is None else str(self.plot),
            "trace": None if self.trace is None else str(self.trace),
        }


def report(source: Path, out: Path | None = None, plot: Path | None = None, trace: Path | None = None) -> Written:
    """Writes the page of the run in ``source``, a folder of ``--run`` or a report as JSON, to ``out`` (None: beside
    it); with ``plot`` a picture too, with ``trace`` a Chrome trace.

    Raises ``ConfigError`` for what is no run and ``StorageError`` for files that cannot be read or written.
    """
    page = out or (source / PAGE if source.is_dir() else source.with_suffix(".html"))
    for path, flag in ((page, "--out"), (trace, "--trace")):
        if path is not None:
            expect_folder_of(path, flag)
    if plot is not None:
        from forebay.reporting.plot import expect_plottable

        expect_plottable(plot)
    asked = {"--out": page, "--plot": plot, "--trace": trace}
    expect_apart(asked)
    _expect_kept(source, asked)
    shown = gather(source)
    _write("the page", page, render(shown))
    if trace is not None:
        _write("the trace", trace, chrome_trace(_timelines(shown)))
    if plot is not None:
        from forebay.reporting.run_plot import plot_run

        plot_run(shown, plot)
    return Written(shown, page, plot, trace)


def _expect_kept(source: Path, asked: Mapping[str, Path | None]) -> None:
    """Raises ``ConfigError`` for files to write, by their flags, of which one would take the place of ``source``, or of
    what its run has kept."""
    folder = (source if source.is_dir() else source.parent).resolve()
    is_run = (folder / RUN).exists()
    for flag, path in asked.items():
        if path is None:
            continue
        found = path.resolve()
        if found == source.resolve() and not source.is_dir():
            raise ConfigError(f"{flag} {path} is the report that is to be read; give another name, like {_free(path)}")
        if not is_run or not found.is_relative_to(folder) or found.is_dir():
            continue
        if found.relative_to(folder).parts[0] in OWN or (found.exists() and found != folder / PAGE):
            raise ConfigError(
                f"{flag} {path}: the files of {folder} are the run's, and a report takes the place of none but its "
                f"{PAGE}; give a file elsewhere, or a name that is not there, like {_free(folder / found.name)}"
            )


def _free(path: Path) -> Path:
    """A file beside ``path`` that is not there."""
    names = (path.with_name(f"{path.stem}-{place}{path.suffix}") for place in count(2))
    return next(name for name in names if not name.exists())


def gather(source: Path) -> RunPage:
    """What there is to show of the run in ``source``. Raises as ``report`` does."""
    if not source.exists():
        raise ConfigError(f"there is no {source}; give the folder of forebay train --run, or a report as JSON")
    if not source.is_dir():
        found = _record(RunReport.from_json, source, "forebay.report(model).to_json() writes one")
        return RunPage(source.stem, found.plan, found)
    config = kept_config(source)
    if config is None:
        raise ConfigError(f"no run was begun in {source}: it has no {RUN}; give the folder of forebay train --run")
    plan = kept_plan(source)
    rid = "put it back as it was, or remove it: the page does without"
    kept = _record(RunReport.from_json, source / REPORT, rid) if (source / REPORT).exists() else None
    shown = RunPage(
        title=f"{Path(config.model).name}: {source.resolve().name}",
        plan=plan,
        report=kept,
        losses=read_losses(source / LOSSES),
        steps=config.steps,
        tokens_per_step=config.tokens_per_step,
        settings=begun_with(source),
    )
    return _foretold(shown, config)


def _foretold(shown: RunPage, config: TrainConfig) -> RunPage:
    """``shown`` with what the plan foretells and with what is known of the model, which is looked at again, without its
    weights. Where that cannot be, the page says why and does without."""
    try:
        trace, timeline, micro_batches, notes = _simulated(shown, config)
    except ForebayError as error:
        return replace(shown, notes=(*shown.notes, f"what was predicted over a step is not shown: {error}"))
    from forebay.reporting.dtypes import dtype_ledger

    return replace(
        shown,
        forecast=timeline,
        forecast_micro_batches=micro_batches,
        blocks={block.name: block.nbytes for block in trace.model.blocks},
        dtypes=dtype_ledger(trace, shown.plan),
        notes=(*shown.notes, *notes),
    )


def _simulated(shown: RunPage, config: TrainConfig) -> tuple[Trace, Timeline, int, tuple[str, ...]]:
    """The step of the run, what happens under its plan on this machine, the micro-batches of that, and remarks."""
    from forebay.checking import check
    from forebay.profiler.here import this_machine
    from forebay.simulation import simulate
    from forebay.timeline import typical_seconds

    machine, _ = this_machine(config.device, shown.plan.budget.disk)
    trace = captured_again(config, shown.plan, machine.device_kind)
    check(trace, machine, shown.plan)
    micro_batches = 1 if shown.report is None or shown.report.together > 1 else shown.report.micro_batches
    timeline = simulate(trace, machine, shown.plan, micro_batches=micro_batches)
    predicted = shown.plan.seconds_of_step(micro_batches)
    every = shown.plan.streaming.update_every
    if not predicted or abs(typical_seconds(timeline.step_seconds[-every:], every) / predicted - 1) <= SLACK:
        return trace, timeline, micro_batches, ()
    words = "the step is drawn at the rates of this machine as they are known now; the run was planned at others"
    return trace, timeline, micro_batches, (words,)


def _timelines(shown: RunPage) -> dict[str, Timeline]:
    found = {} if shown.forecast is None else {"predicted": shown.forecast}
    return found if shown.report is None else {**found, "measured": shown.report.timeline}


def _record(load: Callable[[bytes], T], path: Path, instead: str) -> T:
    """The record in ``path``. Raises ``ConfigError`` naming the file, what is wrong in it and what to do."""
    try:
        return load(_read(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {instead}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from None


def _write(what: str, path: Path, text: str) -> None:
    with writing(what, path):
        path.write_text(text, encoding="utf-8")
