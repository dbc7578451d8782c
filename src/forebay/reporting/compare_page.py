"""``forebay compare --plot FILE.html``: policies side by side as one page that needs no network. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from forebay.memory import Tier
from forebay.reporting.comparison import Candidate
from forebay.reporting.markup import bullet_list, chart, page, section, table
from forebay.units import format_bytes, format_seconds

__all__ = ["render_comparison"]

HEADER = ("policy", "budget", "step", "device peak", "host peak", "disk peak", "numbers", "how")


def render_comparison(title: str, candidates: Sequence[Candidate], notes: Sequence[str] = ()) -> str:
    """The page as HTML: the seconds of a step over the most bytes of the device, for every policy that fits."""
    points = list(_points(candidates))
    parts = [f"<h1>{escape(title)}</h1>"]
    if points:
        said = (
            "A full point is predicted, an empty one was measured here. Further left is less memory, lower is faster."
        )
        parts.append(section("Step time over device peak", chart("policies", said)))
    rows = [_row(one) for one in sorted(points, key=lambda one: (one["budget"], one["seconds"]))]
    if rows:
        parts.append(section("Figures", table("What fits, the fastest first", HEADER, rows)))
    missing = [f"{one.policy} with {format_bytes(one.budget)}: {one.reason}" for one in candidates if not one.feasible]
    if missing:
        parts.append(section("Does not fit", bullet_list(missing)))
    if notes:
        parts.append(section("Where the figures come from", bullet_list(notes)))
    return page(title, "\n".join(parts), {"points": points}, ("compare.js",))


def _points(candidates: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
    for one in candidates:
        if one.step_seconds is not None:
            yield _point(one, one.step_seconds, one.peaks, measured=False)
        if one.measured is not None and one.measured.step_seconds is not None:
            yield _point(one, one.measured.step_seconds, one.measured.peaks, measured=True)


def _point(one: Candidate, seconds: float, peaks: Mapping[Tier, int], *, measured: bool) -> dict[str, Any]:
    return {
        "policy": one.policy,
        "budget": one.budget,
        "seconds": seconds,
        "peak": peaks.get(Tier.DEVICE, 0),
        "host": peaks.get(Tier.HOST, 0),
        "disk": peaks.get(Tier.DISK, 0),
        "exact": one.exact,
        "measured": measured,
    }


def _row(point: dict[str, Any]) -> tuple[str, ...]:
    sizes = (format_bytes(point[tier]) if point[tier] else "-" for tier in ("peak", "host", "disk"))
    numbers = "as in plain PyTorch" if point["exact"] else "others"
    how = "measured" if point["measured"] else "predicted"
    return (point["policy"], format_bytes(point["budget"]), format_seconds(point["seconds"]), *sizes, numbers, how)
