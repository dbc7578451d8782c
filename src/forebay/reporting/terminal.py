"""What every table of ours in a terminal is made of: readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.memory import Kind, TierUsage
from forebay.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["NONE", "bullets", "figure_table", "kinds_at_peak", "rate_while_busy", "size"]

NONE = "-"
"""In the place of a figure that there is not."""


def figure_table(title: str, first: str, others: Sequence[str]) -> Table:
    """An empty table: a column called ``first`` of names, and one of figures for each of ``others``."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def kinds_at_peak(title: str, usages: Sequence[TierUsage]) -> Table:
    """What each tier held at its peak (bytes), kind by kind, and the peaks."""
    table = figure_table(title, "kind", [usage.tier.value for usage in usages])
    kinds = [kind for kind in Kind if any(usage.at_peak.get(kind, 0) for usage in usages)]
    for kind in kinds:
        cells = [size(usage.at_peak.get(kind, 0) or None) for usage in usages]
        table.add_row(kind.value, *cells, end_section=kind is kinds[-1])
    table.add_row("peak", *(size(usage.peak) for usage in usages), style="bold")
    return table


def bullets(sentences: Sequence[str]) -> list[RenderableType]:
    """A list of sentences."""
    # The hanging indent keeps a wrapped sentence apart from the next one where there is no colour.
    rows = []
    for sentence in sentences:
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row("-", Text(sentence))
        rows.append(Padding(row, (0, 0, 0, 2)))
    return [*rows]


def size(nbytes: int | None, none: str = NONE) -> str:
    """``nbytes`` in words; ``none`` where there is no figure."""
    return none if nbytes is None else format_bytes(nbytes)


def rate_while_busy(moved: int, busy: float) -> str:
    """``moved`` bytes over ``busy`` seconds."""
    return format_rate(moved / busy) if moved and busy > 0 else NONE
