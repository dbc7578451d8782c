"""Where buffers lie: the table that ``forebay layout`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text

from forebay.buffers import Addresses
from forebay.reporting.rows import size
from forebay.reporting.terminal import bullets, figure_table
from forebay.units import format_bytes, format_seconds

__all__ = ["addresses_table"]

SHOWN = 40
"""Buffers of which the addresses are printed: more are for a file."""


def addresses_table(found: Addresses, name: str, out: Path | None, order: Sequence[str] = ()) -> Group:
    """The addresses, the height beside its lower bound, and the answer. ``out`` is where they were written, ``order``
    is what there is to say of the order of the ops that make the buffers."""
    given = found.given
    where = figure_table("addresses", "buffer", ["from", "to", "bytes", "offset"])
    for buffer, offset in list(zip(given.buffers, found.offsets, strict=True))[:SHOWN]:
        where.add_row(buffer.id, *(str(cell) for cell in (buffer.lower, buffer.upper, buffer.size, offset)))
    figures = figure_table("memory", "", ["bytes", "size"])
    rows = {"height": found.height, "lower bound": found.lower_bound, "capacity": given.capacity}
    for what, nbytes in rows.items():
        if nbytes is not None:
            figures.add_row(what, str(nbytes), size(nbytes))
    notes = [*order, f"{found.gap:.2%} over the lower bound, which is the most bytes that are live at one time"]
    notes.append(f"found by {found.found_by}, in {format_seconds(found.solve_seconds)}")
    if len(given.buffers) > SHOWN:
        notes.append(f"{SHOWN} of {len(given.buffers)} addresses are shown; --out FILE writes all of them")
    if out is not None:
        notes.append(f"addresses written to {out}" if found.feasible else f"nothing was written to {out}")
    title = Text(f"{name}: {len(given.buffers)} buffers", style="bold")
    answer = Text(_answer(found), style="bold" if found.feasible else "bold red")
    return Group(title, where, figures, *bullets(notes), answer)


def _answer(found: Addresses) -> str:
    room = found.given.capacity
    if found.feasible:
        lowest = ", which no layout can better" if found.proven else ""
        return f"Laid out within {format_bytes(found.height)}{lowest}."
    assert room is not None  # without a capacity everything fits
    if found.lower_bound > room:
        return f"Does not fit: {found.lower_bound} bytes are live at one time, and the capacity is {room}."
    if found.proven:
        return f"Does not fit: the search is complete, and no layout takes {room} bytes or less."
    return (
        f"Not laid out: {found.height} bytes is the lowest layout found in time, and the capacity is {room}; raise "
        f"--capacity, or --seconds."
    )
