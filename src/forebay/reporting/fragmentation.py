"""What allocators would have reserved: the record, and the table that ``forebay fragmentation`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.recording import Replay
from forebay.reporting.rows import NONE
from forebay.reporting.terminal import bullets, figure_table
from forebay.simulation.allocators.base import SMALL_SEGMENT
from forebay.units import format_bytes

__all__ = ["Fragmentation", "fragmentation_table"]


@dataclass(frozen=True)
class Fragmentation:
    """One recording, called ``title``, played to several allocators. ``lower_bound`` is the most bytes that were live
    at one time; ``fits_in`` are the least bytes of a device on which each of them has room, giving back what it can
    before it goes over; ``observed`` is what the program's own allocator had reserved in the end (None: nobody knows).
    """

    title: str
    lower_bound: int
    replays: tuple[Replay, ...]
    fits_in: tuple[int, ...]
    observed: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def tiny(self) -> bool:
        """Whether less was live than an allocator asks the device for at the least: what it reserves is that, and no
        share of anything."""
        return 0 < self.lower_bound < SMALL_SEGMENT

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "live": self.lower_bound,
            "observed_reserved": self.observed,
            "allocators": [_object(*one) for one in zip(self.replays, self.fits_in, strict=True)],
            "notes": list(self.notes),
        }


def _object(one: Replay, fits_in: int) -> Mapping[str, Any]:
    return {
        "allocator": one.allocator,
        "peak_reserved": one.peak_reserved,
        "over": one.over,
        "fits_in": fits_in,
        "worst_event": one.worst,
        "worst_unused": one.unused,
        "holders": [
            {"what": h.what, "bytes": h.nbytes, "segment": h.segment, "free_in_segment": h.free} for h in one.holders
        ],
    }


def fragmentation_table(found: Fragmentation) -> Group:
    """Reserved over live for each allocator, the worst moment of each, and who held the memory then."""
    table = figure_table("allocators", "allocator", ["reserved", "over live", "fits in", "most unused", "at event"])
    for one, fits_in in zip(found.replays, found.fits_in, strict=True):
        cells = (
            format_bytes(one.peak_reserved),
            NONE if found.tiny else f"{one.over:.2%}",
            format_bytes(fits_in),
            format_bytes(one.unused),
            NONE if one.worst is None else str(one.worst),
        )
        table.add_row(one.allocator, *cells)
    notes = [f"live at one time, at most: {format_bytes(found.lower_bound)}"]
    if found.tiny:
        notes.append(
            f"an allocator asks the device for {format_bytes(SMALL_SEGMENT)} at the least, which says nothing of less "
            "(sizes in a CSV are bytes)"
        )
    if found.observed is not None:
        notes.append(f"reserved at the end of the recording: {format_bytes(found.observed)}")
    return Group(
        Text(found.title, style="bold"),
        table,
        *_holders(found.replays),
        *bullets([*notes, *found.notes]),
        _answer(found),
    )


def _holders(replays: Sequence[Replay]) -> list[RenderableType]:
    """Who held what at the worst moment of each allocator under which anything was held."""
    shown: list[RenderableType] = []
    for one in replays:
        if not one.holders:
            continue
        table = figure_table(f"{one.allocator}: who holds segments at event {one.worst}", "request", _HELD)
        for holder in one.holders:
            table.add_row(holder.what[:40], *(format_bytes(n) for n in (holder.nbytes, holder.free, holder.segment)))
        shown.append(table)
    return shown


_HELD = ("bytes", "unused beside it", "of")


def _answer(found: Fragmentation) -> Text:
    if not found.replays:
        return Text("Nothing was asked for.")
    needs = {one.allocator: nbytes for one, nbytes in zip(found.replays, found.fits_in, strict=True)}
    best, worst = min(needs, key=needs.__getitem__), max(needs, key=needs.__getitem__)
    spared = needs[worst] - needs[best]
    words = f"{best} does with the smallest device: {format_bytes(spared)} less than {worst}."
    return Text(words if spared else "All of them need the same.", style="bold")
