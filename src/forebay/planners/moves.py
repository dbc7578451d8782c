"""Drafts that move less than another: some of what it sends to the host stays on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, selected
from forebay.treatments import Fate, Treatment

__all__ = ["fewer_moves", "one_move_less"]

TRIES = 64
"""Drafts that are looked at to find out what may stay: each costs the lives of all that a step makes."""


def one_move_less(bench: Bench, base: Draft) -> Iterator[Draft]:
    """Drafts in which one op of one block, the last first, leaves on the device what it moves in ``base``."""
    for move in _moves(base):
        yield _staying(bench, base, (move,))


def fewer_moves(bench: Bench, base: Draft, most: int) -> Iterator[Draft]:
    """Drafts in which more and more of what ``base`` moves, the last block's first, stays on the device, as far as that
    has room: those that move ``most`` bytes to the host at most; where none does, the one that moves the least. What
    has had no room once has none beside more that stays."""
    moves, place, count = _moves(base), 0, 1
    least = base
    for _ in range(TRIES):
        some = moves[place : place + count]
        if not some:
            break
        fewer = _staying(bench, least, some)
        if bench.fits_device(fewer):
            least, place, count = fewer, place + len(some), 2 * count
            if least.streaming.host_activations <= most:
                yield least
        elif len(some) > 1:
            count = len(some) // 2
        else:
            place += 1
    if least.streaming.host_activations > most:
        yield least


def _moves(draft: Draft) -> list[tuple[str, Treatment]]:
    """What ``draft`` sends to the host, the last block's first."""
    blocks = {block: selection for selection in draft.activations for block in selection.blocks}
    return [(block, t) for block in reversed(blocks) for t in blocks[block].treatments if t.fate is Fate.OFFLOAD]


def _staying(bench: Bench, base: Draft, those: Collection[tuple[str, Treatment]]) -> Draft:
    """``base`` with ``those`` of its moves left on the device. A block that runs again must be told so of each op."""
    liveness, again, gone = bench.liveness, frozenset(base.recompute), frozenset(those)
    if liveness is None:
        return base
    treatments: dict[str, list[Treatment]] = {}
    for selection in base.activations:
        for block in selection.blocks:
            staying = [t for t in selection.treatments if (block, t) in gone and block in again]
            treatments[block] = [t for t in selection.treatments if (block, t) not in gone]
            treatments[block] += [replace(t, fate=Fate.KEEP, split=t.split if t.bits else None) for t in staying]
    chosen = selected(liveness.trace, treatments)
    moved = liveness.host_activations(base.recompute, chosen)
    return replace(base, activations=chosen, streaming=replace(base.streaming, host_activations=moved))
