"""``mpress`` over several devices: stages with too little room swap to devices that have some, then to the host, and
the rest runs again.

Zhou et al., "MPress", HPCA 2023; source in ``activations.literature.mpress``, which is one stage of it. The stage that
lacks the most is served first: its tensors go to the room that others leave, of every layer those that lie idle for
longest first (what moves of a few layers alone would be under way at once). What there is no room for is swapped to
the host as far as that hides under a micro-batch's forward and backward, or runs again. The emulator
(``simulation.pipeline``) is asked about three assignments, and the fastest is taken: nothing is swapped; devices alone;
devices and host. O(P n log n) in P stages and n tensors.

Ours departs in three things. Which stage is on which device does not matter: all links between devices are alike, in
stripes over all of them, so nothing is searched there. The search over assignments is over these three. And a device
that is given what others swap takes no time for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Final

from forebay.planners.activations.literature.mixing import Move
from forebay.planners.activations.literature.moments import Idle, idle_of, under
from forebay.planners.activations.literature.mpress import by_idleness, with_swapped
from forebay.planners.parallel.bench import ServerBench
from forebay.planners.parallel.giving_up import as_little_as_fits
from forebay.planners.parallel.pipelines import KEPT, Decision, Line, Seat, fastest, refused
from forebay.planners.states.drafting import cannot_serve
from forebay.remedies import Remedy
from forebay.servers import ServerPlan

__all__ = ["mpress"]

WAYS: Final = (
    (False, False, "what has no room runs again"),
    (True, False, "what has no room goes to other devices, and runs again where they have none"),
    (True, True, "what has no room goes to other devices, then to the host as far as that hides, then runs again"),
)
"""Whether devices take what is swapped, and whether the host does."""


def mpress(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``, and ``CannotServe`` for one device, fewer blocks than devices, or no links between
    devices."""
    line = Line(bench, "mpress")
    if bench.server.peer is None:
        links = Remedy(
            "devices", 0, 0, f"links between devices, said in bytes/s (--devices {bench.server.groups}:25GB)"
        )
        raise cannot_serve("mpress", "swaps to other devices, and there are no links between them", "ppaware", links)
    kept = [KEPT] * len(line.seats)
    if line.fits(kept):
        return line.plan(kept, "every stage keeps what it saves")
    ways = [(_assigned(line, devices=devices, host=host), said) for devices, host, said in WAYS]
    plan = fastest(line, ways)
    if plan is None:
        raise refused(line, ways[-1][0])
    return plan


def _assigned(line: Line, *, devices: bool, host: bool) -> list[Decision]:
    """What every stage gives up."""
    over = [line.over(seat, KEPT) for seat in line.seats]
    room = sum(max(0, -lacking) for lacking in over) if devices else 0
    decisions = [KEPT] * len(over)
    for place in sorted(range(len(over)), key=lambda place: -over[place]):
        if over[place] > 0:
            decisions[place] = _decided(line, line.seats[place], room, host=host)
            room -= line.seats[place].elsewhere(decisions[place])
    return decisions


def _from_every_layer(waiting: Sequence[Idle]) -> list[Idle]:
    """``waiting`` with the first of every layer first, then the second of every layer."""
    ranks, seen = [], Counter[str]()
    for one in waiting:
        ranks.append(seen[one.layer.name])
        seen[one.layer.name] += 1
    return [one for _, _, one in sorted(zip(ranks, range(len(ranks)), waiting, strict=True))]


def _decided(line: Line, seat: Seat, room: int, *, host: bool) -> Decision:
    """``room`` bytes are left on other devices."""
    idle = idle_of(line.bench.bench, seat.layers)
    waiting = _from_every_layer(by_idleness(idle))
    sums = accumulate(seat.flight * one.kept.moved for one in waiting)
    there = sum(1 for _ in takewhile(lambda nbytes: nbytes <= room, sums))
    hidden = under(waiting[there:], *seat.hiding(line.bench.server.sharers)) if host else []

    def to_peers(taken: Sequence[Move]) -> float:
        moved = [move.what.kept.moved for move in taken if not move.again]
        return sum(moved[:there]) / sum(moved) if moved else 0.0

    return as_little_as_fits(line, seat, with_swapped(idle, [*waiting[:there], *hidden]), to_peers)
