"""A model in stages: some consecutive blocks each, and what a micro-batch of them takes. No torch.

A block that is used in two places (an embedding that is the head as well) is a block at each of them, with a copy of
its parameters: they may be on different devices. It is updated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from forebay.errors import ConfigError
from forebay.simulation.costs import Costs
from forebay.trace import Phase, Trace, Visit

__all__ = ["Span", "Stage", "block_stages", "stages_of"]

Span = tuple[int, int]
"""The first of some ops, by their numbers in the trace, and the one behind the last."""


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch in ``forward``, and in ``backward`` with the forward again; bytes of its
    ``parameters``, its ``gradients``, what an update has ``touched``, and of a micro-batch's output (``handed`` on).
    ``blocks`` are its blocks, ``spans`` the ops of their forward and of their backward, where it is of a trace."""

    forward: float
    backward: float
    parameters: int
    gradients: int
    touched: int
    handed: int
    blocks: tuple[str, ...] = ()
    spans: tuple[Span, Span] = ((0, 0), (0, 0))


def stages_of(costs: Costs, count: int) -> tuple[Stage, ...]:
    """The model of ``costs`` in ``count`` stages of consecutive blocks, whose forwards are as long as each other as
    nearly as whole blocks allow. Raises ``ConfigError`` for fewer blocks than that."""
    layers = block_stages(costs)
    if not 0 < count <= len(layers):
        raise ConfigError(f"a model of {len(layers)} blocks has 1 to as many stages, got {count}")
    total, done, stages, taken = sum(layer.forward for layer in layers), 0.0, list[Stage](), list[Stage]()
    for left, layer in zip(range(len(layers) - 1, -1, -1), layers, strict=True):
        taken.append(layer)
        done += layer.forward
        after = count - len(stages) - 1  # stages that are still to come, each of a block at least
        full = done + layer.forward / 2 > total * (len(stages) + 1) / count
        if left == 0 or left == after or (full and left > after > 0):
            stages.append(_joined(taken))
            taken = []
    return tuple(stages)


def block_stages(costs: Costs) -> tuple[Stage, ...]:
    """Every block by itself, in the order of the forward. What is outside of blocks counts to the one before it."""
    trace = costs.trace
    places = _blocks_of(trace, Phase.FORWARD)
    names = [name for name, _ in places]
    back = _behind(trace, names)
    blocks = {block.name: block for block in trace.model.blocks}
    layers, seen = list[Stage](), set[str]()
    for (name, span), behind in zip(places, back, strict=True):
        forward, block = costs.ops(*span), blocks[name]
        layers.append(
            Stage(
                forward,
                forward + costs.ops(*behind),
                block.nbytes,
                block.gradient_nbytes,
                costs.touched(block) if name not in seen else 0,
                _handed(trace, span),
                (name,),
                (span, behind),
            )
        )
        seen.add(name)
    return tuple(layers)


def _blocks_of(trace: Trace, phase: Phase) -> list[tuple[str, Span]]:
    """The blocks that the visits of ``phase`` come to, one after the other, each with its ops and those outside of
    blocks that follow; those before the first count to it."""
    visits = [visit for visit in trace.visits if visit.phase is phase]
    found: list[tuple[str, int]] = []
    for visit in visits:
        if visit.block and (not found or found[-1][0] != visit.block):
            found.append((visit.block, visit.first_op))
    if not found:
        return []
    firsts = [visits[0].first_op, *(first for _, first in found[1:]), _end(trace, visits[-1])]
    return [(name, span) for (name, _), span in zip(found, pairwise(firsts), strict=True)]


def _behind(trace: Trace, names: Sequence[str]) -> list[Span]:
    """The ops of backward that belong to each of ``names``, the blocks in the order of the forward: backward comes to
    them in reverse order, and passes by those in which nothing is trained."""
    runs = _blocks_of(trace, Phase.BACKWARD)
    first = runs[0][1][0] if runs else 0
    lengths = [0] * len(names)
    at = len(names) - 1
    for name, (begin, end) in runs:
        at = next((place for place in range(at, -1, -1) if names[place] == name), at)
        lengths[at] += end - begin
    ends = list(accumulate(reversed(lengths), initial=first))
    return list(pairwise(ends))[::-1]


def _handed(trace: Trace, span: Span) -> int:
    """Bytes of what the last op of a block's forward makes, of the ops in ``span``: what the next block is given."""
    for visit in _reversed(trace, span):
        segment = trace.segments[visit.segment]
        made = [reference for op in segment.ops for reference in op.outputs if reference >= 0]
        if visit.block and made:
            return segment.tensors[made[-1]].nbytes
    return 0


def _reversed(trace: Trace, span: Span) -> Iterator[Visit]:
    return (visit for visit in reversed(trace.visits) if span[0] <= visit.first_op < span[1])


def _end(trace: Trace, visit: Visit) -> int:
    return visit.first_op + len(trace.segments[visit.segment].ops)


def _joined(layers: Sequence[Stage]) -> Stage:
    (first, _), (_, end) = layers[0].spans[0], layers[-1].spans[0]
    (begin, _), (_, last) = layers[-1].spans[1], layers[0].spans[1]
    return Stage(
        sum(one.forward for one in layers),
        sum(one.backward for one in layers),
        sum(one.parameters for one in layers),
        sum(one.gradients for one in layers),
        sum(one.touched for one in layers),
        layers[-1].handed,
        tuple(name for one in layers for name in one.blocks),
        ((first, end), (begin, last)),
    )
