"""Steps of small random graphs, for the tests of the literature's planners. No torch.

A *join network* is drawn block by block: each block reads what one or two blocks before it have made, or the step's
input, and its ops are a graph of their own, each of which reads one or two of those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from forebay.memory import Kind
from forebay.model import Model
from forebay.planners import Bench
from forebay.planners.activations.literature.layers import Layer, layers_of
from forebay.plans import Plan
from forebay.trace import Phase, Trace
from tests.null.planning import ENOUGH, asked, machine
from tests.null.synthetic import block
from tests.null.tracing import TraceBuilder, VisitBuilder

__all__ = ["KIB", "ON", "Made", "account", "drawn", "graph_trace", "layers_in", "tried", "two_towers"]

KIB = 1024

ON = machine(compute=1e10, h2d=1e9, d2h=1e9, disk=5e8)


@dataclass(frozen=True)
class Made:
    """One op: the places of the ops of its block that it reads (none: what comes in), the KiB that it makes, and
    whether they are saved."""

    reads: tuple[int, ...]
    kib: int
    saved: bool


Graph = Sequence[tuple[Sequence[int], Sequence[Made]]]
"""Of each block the places of the blocks that it reads (none: the step's input), and its ops; the last one makes what
leaves the block, which is saved."""


def drawn(random: Random, blocks: int, ops: int, *, joins: bool = False) -> Graph:
    """``blocks`` blocks of one to ``ops`` ops and the one that leaves; a chain of blocks unless they may meet."""
    graph = []
    for number in range(blocks):
        before = [number - 1] if number else []
        if joins and number:
            before = sorted(random.sample(range(number), random.randint(0, min(2, number))))
        made = []
        for place in range(random.randint(1, ops) + 1):
            reads = tuple(sorted(random.sample(range(place), random.randint(1, min(2, place))))) if place else ()
            made.append(Made(reads, 4 * random.randint(1, 24), saved=not place or random.random() < 0.7))
        graph.append((before, made))
    return graph


def two_towers(length: int) -> Graph:
    """Two chains of ``length`` blocks each, one after the other, that meet in one more block."""
    ops = (Made((), 64, True), Made((0,), 32, True), Made((0, 1), 16, True))
    left = [([number - 1] if number else [], ops) for number in range(length)]
    right = [([length + number - 1] if number else [], ops) for number in range(length)]
    return [*left, *right, ([length - 1, 2 * length - 1], ops)]


def graph_trace(graph: Graph) -> Trace:
    """The step of ``graph``: what nobody reads goes into a loss, and backward comes back in reverse."""
    blocks = tuple(block(f"layers.{number}", ((32, 32), "float32", True)) for number in range(len(graph)))
    b = TraceBuilder(Model(blocks, 0), {"input_ids": 16 * KIB})
    readers = {number: [r for r, (before, _) in enumerate(graph) if number in before] for number in range(len(graph))}
    outs, runs = list[int](), list[_Run]()
    for number, (before, ops) in enumerate(graph):
        came = [outs[other] for other in before] or [b.ids["input_ids"]]
        last = [outs[other] for other in before if readers[other][-1] == number]
        first = [outs[other] for other in before if readers[other][0] == number]
        made, place = _forward(b, f"layers.{number}", came, ops, last)
        outs.append(made[-1])
        runs.append(_Run(f"layers.{number}", came, first, made, ops, place))
    gradients = _loss(b, [outs[number] for number, own in readers.items() if not own])
    for run in reversed(runs):
        _backward(b, run, gradients)
        b.let_go(run.place)
    return b.trace()


@dataclass(frozen=True)
class _Run:
    """The forward of a block: what came in, of that what nobody has read before, what it made, and where it is."""

    name: str
    came: Sequence[int]
    first: Sequence[int]
    made: Sequence[int]
    ops: Sequence[Made]
    place: int


def _forward(
    b: TraceBuilder, name: str, came: Sequence[int], ops: Sequence[Made], last: Sequence[int]
) -> tuple[list[int], int]:
    """``last``: of what came in that which nobody reads behind this block."""
    v = b.begin(name, Phase.FORWARD)
    v.given = tuple(came)
    made: list[int] = []
    for place, op in enumerate(ops):
        leaves = place == len(ops) - 1
        reads = [made[other] for other in op.reads] if place else [*came, b.ids[f"{name}.0"]]
        made.append(v.make(f"op{place}", reads, op.kib * KIB, saved=op.saved or leaves))
        if op.saved or leaves:
            v.pack(made[-1])
        if op.saved and not leaves:
            v.save()
    v.drop(*made[:-1], *last)
    return made, b.end(v)


def _loss(b: TraceBuilder, ends: Sequence[int]) -> dict[int, int]:
    """The gradients of ``ends``, by what they are of."""
    v = b.begin("", Phase.FORWARD)
    loss = v.make("nll_loss", ends, 4)
    v.drop(*ends)
    b.end(v)
    v = b.begin("", Phase.BACKWARD)
    gradients = {end: v.make("nll_loss_backward", [loss, end], b.nbytes[end], Kind.TEMPORARY) for end in ends}
    v.drop(loss)
    v.unsave(*ends)
    b.end(v)
    return gradients


def _backward(b: TraceBuilder, run: _Run, gradients: dict[int, int]) -> None:
    v = b.begin(run.name, Phase.BACKWARD)
    g = gradients.pop(run.made[-1])
    for one, op in reversed(list(zip(run.made[:-1], run.ops[:-1], strict=True))):
        if op.saved:
            g = _next(v, "op_backward", [g, one], b.nbytes[one])
            v.unsave(one, own=True)
    weight = v.make("wgrad", [g, run.came[0]], b.nbytes[b.ids[f"{run.name}.0"]], Kind.GRADIENT)
    v.complete(b.ids[f"{run.name}.0"], weight)
    for source in run.came:
        if source < len(b.sources):
            continue
        part = v.make("dgrad", [g, source], b.nbytes[source], Kind.TEMPORARY)
        if source in gradients:
            part = _next(v, "add", [gradients[source], part], b.nbytes[source], part)
        gradients[source] = part
    v.drop(g)
    v.unsave(*run.first)
    b.end(v)


def _next(v: VisitBuilder, op: str, inputs: Sequence[int], nbytes: int, *gone: int) -> int:
    """An op that takes the place of the first of its inputs, and of what is ``gone``."""
    made = v.make(op, inputs, nbytes, Kind.TEMPORARY)
    v.drop(inputs[0], *gone)
    return made


def layers_in(trace: Trace) -> tuple[Layer, ...]:
    """What the planners see of it."""
    return layers_of(Bench(asked(trace, ON, device=ENOUGH)))


def tried(layers: Sequence[Layer], allowed: float) -> float | None:
    """The least seconds that run again within ``allowed`` bytes, of all ways of keeping and making again; None if
    nothing fits."""
    best = None
    for ways in product(*(_every_way(layer) for layer in layers)):
        held, fits = 0.0, True
        for own, workspace, _ in ways:
            held += own
            fits = fits and held + workspace <= allowed
        seconds = sum(way[2] for way in ways)
        if fits and (best is None or seconds < best):
            best = seconds
    return best


def _every_way(layer: Layer) -> list[tuple[float, float, float]]:
    """Bytes held, bytes of workspace and seconds of every choice for a block."""
    items = layer.items
    found = [(float(items.held), 0.0, 0.0)]
    for on in product((False, True), repeat=len(items.again or ())):
        pairs = list(zip(items.again or (), on, strict=True))
        if items.again is None or any(again and not item.reruns for item, again in pairs):
            continue
        held = sum(item.held for item, again in pairs if not again)
        made_again = [item for item, again in pairs if again]
        workspace = items.kept_held + sum(item.saved for item in made_again)
        found.append((held, workspace, items.again_seconds + sum(item.seconds for item in made_again)))
    return found


def account(layers: Sequence[Layer], plan: Plan) -> tuple[float, float]:
    """Bytes that activations take at their fullest under ``plan``, which moves nothing, and the seconds that run
    again: by the account that ``checkmate`` solves for."""
    held = fullest = seconds = 0.0
    for layer in layers:
        items, workspace = layer.items, 0.0
        if layer.name not in plan.recompute:
            held += items.held
        else:
            named = {(t.op, t.occurrence) for s in plan.activations if layer.name in s.blocks for t in s.treatments}
            again = [item for item in items.again or () if item.reruns and (item.op, item.occurrence) not in named]
            held += sum(item.held for item in items.again or () if item not in again)
            workspace = items.kept_held + sum(item.saved for item in again)
            seconds += items.again_seconds + sum(item.seconds for item in again)
        fullest = max(fullest, held + workspace)
    return fullest, seconds
