"""The plot of ``forebay compare``: step time over device budget, one line a policy; and how every picture is written.
Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError
from forebay.reporting.comparison import Candidate
from forebay.reporting.files import expect_folder_of, writing
from forebay.units import GiB, MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SUFFIXES", "expect_plottable", "figure_of", "plot", "write_figure"]

SUFFIXES: Final = (".png", ".svg")
"""Of the files that a plot is written to."""

INSTALL: Final = "pip install 'forebay[report]'"

# Okabe and Ito's colours, which people who see colours differently can tell apart; black is auto's.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")

WIDE: Final = 10.0
"""From so many times between the fastest and the slowest step on, the axis of seconds is logarithmic."""

DOTS_PER_INCH: Final = 160

LINES: Final = 16
"""Policies in a column of the legend, which is as high as the plot."""


def expect_plottable(path: Path, more: Sequence[str] = ()) -> None:
    """Raises ``ConfigError`` for a file that a plot cannot be written to, and where matplotlib is missing. ``more`` are
    the names of what else would do."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a plot is a {' or '.join((*SUFFIXES, *more))} file; give it such a name")
    expect_folder_of(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"--plot needs matplotlib, which is not installed; {INSTALL}") from None


def plot(title: str, candidates: Sequence[Candidate], path: Path) -> None:
    """Writes the plot of ``candidates`` to ``path``. Raises ``ConfigError`` as ``expect_plottable`` does, and
    ``StorageError`` where the file cannot be written."""
    expect_plottable(path)
    write_figure(figure_of(title, candidates), path)


def write_figure(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib to ``path``. Raises ``StorageError`` where the file cannot be written."""
    with writing("the plot", path):
        figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight")


def figure_of(title: str, candidates: Sequence[Candidate]) -> Any:
    """The plot as a figure of matplotlib: a full line and full markers for what is predicted, dashes and empty markers
    for what was measured. A policy that fits no budget has no line, and one that misses a budget a gap there."""
    from matplotlib.figure import Figure

    budgets = sorted({one.budget for one in candidates})
    unit, name = (GiB, "GiB") if budgets and budgets[-1] >= GiB else (MiB, "MiB")
    figure = Figure(figsize=(8.0, 4.5))
    axes = figure.add_subplot()
    policies = [p for p in dict.fromkeys(one.policy for one in candidates) if any(_of(candidates, p))]
    for number, policy in enumerate(sorted(policies, key=lambda policy: _at_right(candidates, policy), reverse=True)):
        _line(axes, number, policy, {one.budget: one for one in _of(candidates, policy)}, budgets, unit)
    seconds = [one.step_seconds for one in candidates if one.step_seconds]
    measured = [one.measured_seconds for one in candidates if one.measured_seconds]
    if seconds and max(seconds + measured) > WIDE * min(seconds + measured):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_xticks([budget / unit for budget in budgets], [f"{budget / unit:.3g}" for budget in budgets])
    axes.set_xlabel(f"device budget ({name})")
    axes.set_ylabel("step (seconds)")
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    if policies:
        heading = "\n".join([*(["dashed: measured here"] if measured else []), "no point: does not fit"])
        columns = 1 + (len(policies) - 1) // LINES
        style = {"fontsize": "small", "title_fontsize": "x-small", "ncols": columns}
        axes.legend(title=heading, loc="upper left", bbox_to_anchor=(1, 1), **style)
    return figure


def _of(candidates: Sequence[Candidate], policy: str) -> list[Candidate]:
    """Those of ``policy`` that fit."""
    return [one for one in candidates if one.policy == policy and one.feasible]


def _at_right(candidates: Sequence[Candidate], policy: str) -> float:
    """Where its line ends at the right, so that the legend is in the order of the lines."""
    return max(_of(candidates, policy), key=lambda one: one.budget).step_seconds or 0.0


def _line(axes: Axes, number: int, policy: str, found: dict[int, Candidate], budgets: Sequence[int], unit: int) -> None:
    first = policy == "auto"
    style: dict[str, Any] = {
        "color": "black" if first else COLOURS[number % len(COLOURS)],
        "marker": "*" if first else MARKERS[number // len(COLOURS) % len(MARKERS)],
        "linewidth": 2.2 if first else 1.4,
        "zorder": 3 if first else 2,
    }
    places = [budget / unit for budget in budgets]
    predicted = [_or_gap(found[budget].step_seconds if budget in found else None) for budget in budgets]
    axes.plot(places, predicted, label=policy, **style)
    measured = [_or_gap(found[budget].measured_seconds if budget in found else None) for budget in budgets]
    if not all(map(isnan, measured)):
        axes.plot(places, measured, linestyle="--", markerfacecolor="white", **style)


def _or_gap(seconds: float | None) -> float:
    """What a line is not drawn through where there is no figure."""
    return nan if seconds is None else seconds
