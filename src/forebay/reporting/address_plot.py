"""The picture of ``forebay fragmentation``: addresses over time, one panel an allocator. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.recording import Replay
from forebay.reporting.plot import COLOURS, expect_plottable, write_figure
from forebay.units import MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["address_figure", "plot_addresses"]

GAP: Final = 1 << 40
"""Bytes without anything after which addresses are drawn as if they came next: regions lie far apart."""


def plot_addresses(title: str, replays: Sequence[Replay], path: Path) -> None:
    """Writes the picture to ``path``. Raises ``ConfigError`` for a file that is none of a picture, and where matplotlib
    is missing, ``StorageError`` where it cannot be written."""
    expect_plottable(path)
    write_figure(address_figure(title, replays), path)


def address_figure(title: str, replays: Sequence[Replay]) -> Any:
    """The picture as a figure of matplotlib: what is coloured is live, what is white below the line was reserved and
    nobody's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.6 * max(1, len(replays))))
    panels = figure.subplots(max(1, len(replays)), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, one in zip(panels, replays, strict=False):
        _panel(axes, one)
    panels[0].set_title(title, fontsize="medium")
    panels[-1].set_xlabel("event")
    return figure


def _panel(axes: Axes, one: Replay) -> None:
    from matplotlib.collections import PolyCollection

    places = _drawn_at(one)
    corners, colours = [], []
    for life in one.lives:
        low = places[life.box.address] / MiB
        high = low + life.box.nbytes / MiB
        corners.append([(life.made, low), (life.gone, low), (life.gone, high), (life.made, high)])
        colours.append(COLOURS[life.box.number % len(COLOURS)])
    axes.add_collection(PolyCollection(corners, facecolors=colours, linewidths=0))
    # What an event takes is there until the next one, and what the last one takes until the end of the boxes.
    levels = [reserved / MiB for reserved in (*one.reserved, *one.reserved[-1:])]
    axes.plot(levels, color="black", linewidth=0.8, drawstyle="steps-post")
    axes.set_ylabel("address (MiB)")
    axes.set_ylim(bottom=0.0)
    axes.text(0.01, 0.97, f"{one.allocator}: {one.over:.1%} over live", transform=axes.transAxes, va="top")
    axes.autoscale_view()


def _drawn_at(one: Replay) -> dict[int, int]:
    """Where each address is drawn: regions that lie far apart come one after the other."""
    found: dict[int, int] = {}
    shift = top = 0
    for life in sorted(one.lives, key=lambda life: life.box.address):
        address = life.box.address
        if address - shift - top > GAP:
            shift = address - top
        found[address] = address - shift
        top = max(top, found[address] + life.box.nbytes)
    return found
