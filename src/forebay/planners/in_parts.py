"""What a refusal says of the largest weight in tiles (``forebay.tile``) and of a loss in pieces (``loss="chunked"``).

Estimates: no tile is planned. In the trace of the step, what is as large as the weight or as the logits gets the size
of a part, and the bytes beside the arenas are added up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

from forebay.layout import align
from forebay.loss import CHUNKED_FLAG, ITEMSIZE, VOCABULARY, Cut
from forebay.lowering.index import TraceIndex
from forebay.lowering.liveness import Liveness
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft
from forebay.remedies import Remedy
from forebay.trace import Parameter, Trace
from forebay.units import format_bytes, format_enough, parse_bytes

__all__ = ["in_parts"]

PANELS = (8, 16, 32)
"""Parts of a weight in tiles of which one is there at a time, where a refusal proposes a size: the more tiles, the
longer planning takes."""

NOTABLE = 0.8
"""What still does not fit in parts is named where it needs at most this share of what it needs as a whole."""

NEARLY = 1.1
"""Fewer tiles, or one of both alone, are named where they need no more than so many times the least."""


@final
@dataclass(frozen=True)
class _Tiles:
    """``weight`` in tiles: ``size`` as a user gives it, ``panel`` bytes are there at a time, of ``tile`` bytes each."""

    weight: Parameter
    size: str
    panel: int
    tile: int

    @classmethod
    def of(cls, weight: Parameter, parts: int) -> _Tiles:
        size = format_enough(-(-weight.nbytes // parts))
        return cls(weight, size, parse_bytes(size), parse_bytes(size) // parts)

    @property
    def words(self) -> str:
        """What to type, and what it does."""
        tied = ", whose gradient is there as a whole since it is tied" if self.weight.aliases else ""
        return (
            f"forebay.tile(model, '{self.size}') (--tile {self.size}), which cuts {self.weight.name}, "
            f"{format_bytes(self.weight.nbytes)}{tied}, into tiles"
        )


def in_parts(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """The largest weight in tiles, and the loss in pieces where that is not so yet, in the place of ``draft``: each by
    itself where it would do, else both; and where that does not do either, the device memory with which it would."""
    limit, cut, cuts = bench.problem.limit(Tier.DEVICE), bench.problem.cut, _tilings(bench, draft)
    tried = [(tiles, None) for tiles in cuts] + ([] if cut is None else [(tiles, cut) for tiles in (None, *cuts)])
    found = sorted(
        ((_needed(bench, draft, tiles, pieces), tiles, pieces) for tiles, pieces in tried),
        key=lambda one: (one[1] is not None and one[2] is not None, one[0] > limit),
    )
    done = set[tuple[bool, bool]]()
    for need, tiles, pieces in found:
        kind = tiles is not None, pieces is not None
        if need <= limit and kind not in done and (kind != (True, True) or not done):
            done.add(kind)
            yield Remedy(
                "loss" if tiles is None else "tile",
                need,
                limit,
                f"{_words(tiles, pieces)} (an estimate)",
                estimate=True,
            )
    least = min((need for need, *_ in found), default=0)
    if found and not done and least <= NOTABLE * bench.device(draft):
        need, tiles, pieces = next(one for one in found if one[0] <= NEARLY * least)
        words = f"device_memory {format_enough(need)} with {_words(tiles, pieces)} (an estimate)"
        yield Remedy("loss" if tiles is None else "tile", need, limit, words, estimate=True)


def _words(tiles: _Tiles | None, cut: Cut | None) -> str:
    said = [] if tiles is None else [tiles.words]
    if cut is not None:
        said.append(
            f"loss='chunked' ({CHUNKED_FLAG}), which takes {format_bytes(cut.piece)} of logits at a time instead of "
            f"{format_bytes(cut.logits)}"
        )
    return ", and ".join(said)


def _tilings(bench: Bench, draft: Draft) -> list[_Tiles]:
    """The largest weight of what streams, the larger tiles first; none where it is too small for any."""
    weights = [p for block in bench.streamed(draft) for p in block.parameters if len(p.shape) == 2]
    weight = max(weights, key=lambda parameter: parameter.nbytes, default=None)
    if weight is None:
        return []
    most = min(weight.shape) // VOCABULARY
    return [_Tiles.of(weight, parts) for parts in sorted({min(most, parts) for parts in PANELS}) if parts > 1]


def _needed(bench: Bench, draft: Draft, tiles: _Tiles | None, cut: Cut | None) -> int:
    """Bytes of the device. Of a weight in tiles a panel, and tiles, are in the place of the slot for its block; other
    weights that are larger than a panel go with it."""
    need = bench.device(draft)
    if tiles is not None:
        left = [
            sum(align(p.nbytes) for p in b.parameters if len(p.shape) != 2 or p.nbytes <= tiles.panel)
            for b in bench.streamed(draft)
        ]
        need += tiles.panel + max(tiles.tile, *left) + tiles.tile - max(draft.streaming.slots, default=0)
    return need - _spared(bench, draft, tiles, cut)


def _spared(bench: Bench, draft: Draft, tiles: _Tiles | None, cut: Cut | None) -> int:
    """Bytes beside the arenas that parts spare, with balanced routes."""
    trace = bench.problem.trace
    if trace is None:
        return min(tiles.weight.nbytes, bench.beside(draft)) if tiles is not None and tiles.weight.trainable else 0
    whole = Liveness(replace(trace, extremes=()))
    roots, sizes = whole.index.roots, dict[int, int]()
    if cut is not None:
        logits = cut.logits, cut.logits // ITEMSIZE * 2  # as the loss reads them, and in 16 bits
        complete = {done.root for visit in whole.index.completed for done in visit}
        large = {n: root for n, root in roots.items() if root.nbytes in logits and n not in complete}
        sizes |= {number: min(root.nbytes, cut.piece) for number, root in large.items()}
    if tiles is not None:
        sizes |= _gradients(whole.index, tiles)
    hosted = [p.block for p in draft.placements if not p.resident]
    parts = Liveness(_resized(trace, sizes))
    before, after = (one.beside(draft.recompute, hosted, draft.streaming, draft.activations) for one in (whole, parts))
    return before - after


def _gradients(index: TraceIndex, tiles: _Tiles) -> Mapping[int, int]:
    """Bytes of the roots that are gradients of the weight, with the weight in tiles. Of a tied one the first part of
    the sum is there as a whole until the last comes."""
    name = tiles.weight.name
    sums = {done.root for visit in index.completed for done in visit if index.names[done.parameter] == name}
    sizes = dict.fromkeys(sums & index.roots.keys(), tiles.tile)
    if not tiles.weight.aliases:
        return sizes
    roots_of = {number: tensor.root for number, tensor in index.trace.tensors()}
    births = {index.roots[number].birth for number in sizes}
    terms = {
        roots_of[visit.resolve(read)]
        for number, visit, op in index.trace.ops()
        if number in births
        for read in op.inputs
    }
    terms = {n for n in terms & index.roots.keys() if index.roots[n].nbytes == tiles.weight.nbytes}
    first = min(terms, key=lambda number: index.roots[number].birth, default=-1)
    return sizes | dict.fromkeys(terms - {first}, tiles.tile)


def _resized(trace: Trace, sizes: Mapping[int, int]) -> Trace:
    """``trace`` with roots of other ``sizes``, by their ids, and with balanced routes alone."""
    segments, visits = list(trace.segments), list(trace.visits)
    for place, visit in enumerate(visits):
        segment = trace.segments[visit.segment]
        mine = {
            n - visit.first_tensor: sizes[n]
            for n in range(visit.first_tensor, visit.first_tensor + len(segment.tensors))
            if n in sizes
        }
        if mine:
            tensors = tuple(replace(t, nbytes=mine.get(i, t.nbytes)) for i, t in enumerate(segment.tensors))
            visits[place] = replace(visit, segment=len(segments))
            segments.append(replace(segment, tensors=tensors))
    return replace(trace, segments=tuple(segments), visits=tuple(visits), extremes=())
