"""In which order the ops of a step run: what ``forebay layout`` says of it. No torch."""

from __future__ import annotations

from typing import Any

from forebay.op_graph import Ordered
from forebay.units import format_bytes, format_seconds

__all__ = ["order_lines", "order_object"]


def order_lines(found: Ordered) -> tuple[str, ...]:
    """What the ops are, the most bytes live in the order that was found and in program order, and what no order is
    below."""
    ops, tensors = len(found.given.ops), len(found.given.tensors)
    live = f"{format_bytes(found.peak)} live at one time at most"
    if found.peak < found.program_peak:
        live += f" ({format_bytes(found.program_peak)} in program order)"
    least = "which no order can better" if found.peak == found.lower_bound else _over(found)
    took = format_seconds(found.solve_seconds)
    return (
        f"{ops} ops make {tensors} tensors; updates of parameters are ops too",
        f"in the order of {found.found_by}, found in {took}: {live}, {least}",
    )


def _over(found: Ordered) -> str:
    return f"{found.gap:.2%} over {format_bytes(found.lower_bound)}, which no order is below"


def order_object(found: Ordered) -> dict[str, Any]:
    """The object that ``--json`` prints of it; ``ops`` are places in program order."""
    return {
        "order": found.found_by,
        "peak": found.peak,
        "program_peak": found.program_peak,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "solve_seconds": found.solve_seconds,
        "ops": list(found.order),
    }
