"""``ppaware`` over several devices: of each stage the link moves what it can hide, and the cheapest runs again.

Yuan et al. (Kuaishou), USENIX ATC 2024; source, formulas and departures in ``activations.literature.ppaware``, which is
one stage of it. Stage p of P holds min(P - p, m) micro-batches in flight, so each decides by itself: as few tensors go
as its device has room for, those first that hide under the forward and the backward of one micro-batch, in its share of
a root complex. The last stage, whose backward follows its forward, has nothing to hide under.
"""

from __future__ import annotations

from forebay.planners.activations.literature.moments import idle_of
from forebay.planners.activations.literature.ppaware import balanced
from forebay.planners.parallel.bench import ServerBench
from forebay.planners.parallel.giving_up import as_little_as_fits
from forebay.planners.parallel.pipelines import Decision, Line, Seat, refused
from forebay.servers import ServerPlan

__all__ = ["ppaware"]


def ppaware(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``, and ``CannotServe`` for one device or fewer blocks than devices."""
    line = Line(bench, "ppaware")
    decisions = [_decided(line, seat) for seat in line.seats]
    if not line.fits(decisions):
        raise refused(line, decisions)
    pairs = zip(line.seats, decisions, strict=True)
    shares = ", ".join(f"{seat.moved(one) / max(1, seat.saved):.0%}" for seat, one in pairs)
    again = sum(option.recompute for one in decisions for option in one.choice.values())
    return line.plan(decisions, f"offloaded of what stages save: {shares}; of {again} blocks some ops run again")


def _decided(line: Line, seat: Seat) -> Decision:
    moves = balanced(idle_of(line.bench.bench, seat.layers), *seat.hiding(line.bench.server.sharers))
    return as_little_as_fits(line, seat, moves)
