"""What every table of ours in a terminal is made of: readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.memory import TierUsage
from forebay.reporting.rows import kind_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["bullets", "figure_table", "kinds_at_peak"]


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
    *kinds, peaks = kind_rows(usages)
    for row in kinds:
        table.add_row(*row, end_section=row is kinds[-1])
    table.add_row(*peaks, style="bold")
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
