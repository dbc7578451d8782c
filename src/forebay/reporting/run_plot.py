"""The picture of ``forebay report --plot``: loss, memory and lanes of a run as a PNG or SVG file. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.memory import Kind, Tier
from forebay.reporting.plot import COLOURS as LINES
from forebay.reporting.plot import expect_plottable, write_figure
from forebay.reporting.run_page import RunPage
from forebay.reporting.steps import Step, kinds_in, lanes_in
from forebay.timeline import Lane, Level
from forebay.units import GiB, MiB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

__all__ = ["plot_run", "run_figure"]

SIDES: Final = ("predicted", "measured")

COLOURS: Final = (*LINES, "#7A7F87")
"""As many as there are kinds of bytes."""


def plot_run(shown: RunPage, path: Path) -> None:
    """Writes the picture to ``path``. Raises ``ConfigError`` for a file that is none of a picture, and where matplotlib
    is missing, ``StorageError`` where it cannot be written."""
    expect_plottable(path)
    write_figure(run_figure(shown), path)


def run_figure(shown: RunPage) -> Any:
    """The picture as a figure of matplotlib: the loss, what the device held over a step and what lanes did in one, each
    as predicted and as measured. What there is nothing of is left out."""
    from matplotlib.figure import Figure

    lanes = dict(zip(SIDES, (shown.predicted_step(), shown.measured_step()), strict=True))
    held = dict(zip(SIDES, (shown.predicted_step(), shown.seen()), strict=True))
    memory = [name for name, step in held.items() if step is not None and step.levels.get(Tier.DEVICE)]
    busy = [name for name, step in lanes.items() if step is not None]
    rows = bool(shown.losses) + bool(memory) + bool(busy)
    figure = Figure(figsize=(9.0, 2.8 * max(1, rows)), layout="constrained")
    figure.suptitle(shown.title, fontsize="medium")
    parts = iter(figure.subfigures(max(1, rows), 1, squeeze=False)[:, 0])
    if shown.losses:
        _losses(next(parts).subplots(), shown)
    if memory:
        panels = next(parts).subplots(1, len(memory), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, memory, strict=True):
            step = held[name]
            assert step is not None  # one that is missing is not in the list
            _memory(axes, name, step.levels[Tier.DEVICE], step.seconds, shown.limits()[Tier.DEVICE])
        panels[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    if busy:
        panels = next(parts).subplots(1, len(busy), sharey=True, squeeze=False)[0]
        order = lanes_in(lanes.values())
        for axes, name in zip(panels, busy, strict=True):
            _lanes(axes, name, lanes[name], order)
    return figure


def _losses(axes: Axes, shown: RunPage) -> None:
    axes.plot([line.step for line in shown.losses], [line.number for line in shown.losses], color=COLOURS[0])
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(visible=True, alpha=0.3)


def _memory(axes: Axes, name: str, levels: Sequence[Level], seconds: float, limit: int | None) -> None:
    top = max(level.high for level in levels)
    unit, word = (GiB, "GiB") if top >= GiB else (MiB, "MiB")
    times = [*(level.time for level in levels), seconds]
    kinds = kinds_in(levels)
    held = [[level.live.get(kind, 0) / unit for level in (*levels, levels[-1])] for kind in kinds]
    colours = [COLOURS[list(Kind).index(kind) % len(COLOURS)] for kind in kinds]
    if kinds:
        axes.stackplot(times, held, labels=[kind.value for kind in kinds], colors=colours, step="post")
    highs = [level.high / unit for level in (*levels[1:], levels[-1])]
    axes.step([level.time for level in levels], highs, where="post", color="black", linewidth=0.8)
    if limit is not None and limit < 4 * top:
        axes.axhline(limit / unit, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(f"device, {name}", fontsize="small")
    axes.set_xlabel("seconds")
    axes.set_ylabel(word)


def _lanes(axes: Axes, name: str, step: Step | None, order: Sequence[Lane]) -> None:
    events = () if step is None else step.events
    for row, lane in enumerate(reversed(order)):
        spans = [(event.start, event.end - event.start) for event in events if event.lane is lane]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLOURS[row % len(COLOURS)])
    axes.set_yticks(range(len(order)), [lane.value for lane in reversed(order)])
    axes.set_title(f"lanes, {name}", fontsize="small")
    axes.set_xlabel("seconds")
