"""What the policies of the literature see of a model: its blocks in the order of the forward, with the ops of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forebay.planners.activations.choosing import level_of
from forebay.planners.activations.groups import Group
from forebay.planners.activations.items import INPUT, Item, Items
from forebay.planners.activations.literature.fewest import fewest_that_fit
from forebay.planners.activations.literature.graph import Name, OpGraph
from forebay.planners.activations.menu import AGAIN, KEEP, MOVE, Option, option
from forebay.planners.bench import Bench
from forebay.planners.parts import KEPT, Level
from forebay.trace import Phase

__all__ = [
    "Choice",
    "Layer",
    "all_again",
    "all_moved",
    "every_again",
    "every_moved",
    "fewest",
    "layers_of",
    "level_with",
    "moves",
    "read_by_products",
    "reruns",
]

Choice = Mapping[str, Option]
"""What becomes of each block by its name; of those that are not there everything is kept."""


@dataclass(frozen=True)
class Layer:
    """One block whose forward is one run of one module. ``place`` is that of its forward visit, ``seconds``
    are those of its forward."""

    name: str
    place: int
    group: Group
    graph: OpGraph
    seconds: float

    @property
    def items(self) -> Items:
        """What its ops make."""
        return self.group.items

    @property
    def may_rerun(self) -> bool:
        """Whether it may run again."""
        return self.items.again is not None

    def kept(self, moves: Callable[[Item], bool] = lambda item: False) -> Option:
        """It does not run again, and what ``moves`` names goes to the host as far as it can."""
        return option(self.items, False, [MOVE if moves(item) else KEEP for item in self.items.kept])

    def again(self, done: Callable[[Item], int]) -> Option:
        """It runs again, and ``done`` says what becomes of what each op makes; of what it says ``AGAIN`` and cannot be
        made again, that is kept. As ``kept`` where it may not run again."""
        if self.items.again is None:
            return self.kept()
        return option(self.items, True, [done(item) for item in self.items.again])

    def worth_it(self, option: Option) -> Option:
        """``option``, or all kept where that holds no more: nothing runs again then."""
        kept = self.kept()
        return kept if kept.held <= option.held else option

    def unnamed(self, item: Item) -> int:
        """What becomes of an op of which a policy says nothing, in a block that runs again for the sake of others.

        What is saved stays, as it would have. Of what is not saved a plan says one of two things: it takes bytes that
        plain PyTorch does not hold, or it runs again for nothing. So what is arithmetic stays, and the rest runs again.
        """
        own = item.op == INPUT or item.saved or (item.op, item.occurrence) in self.graph.products
        return KEEP if own else AGAIN


def layers_of(bench: Bench) -> tuple[Layer, ...]:
    """The blocks of the model that a plan can say anything about, in the order of the forward. None without a trace."""
    trace, chain = bench.problem.trace, bench.chain
    if trace is None or chain is None:
        return ()
    module = {block.name: block.module for block in trace.model.blocks}
    places: dict[str, list[int]] = {}
    for place, visit in enumerate(trace.visits):
        if visit.phase is Phase.FORWARD and visit.block:
            places.setdefault(visit.block, []).append(place)
    graphs: dict[int, OpGraph] = {}
    found = []
    for group in chain.groups:
        for block in group.blocks:
            if module[block] is None or len(places.get(block, ())) != 1:
                continue
            visit = trace.visits[places[block][0]]
            segment = trace.segments[visit.segment]
            if visit.segment not in graphs:
                graphs[visit.segment] = OpGraph.of(bench.costs, segment)
            seconds = bench.costs.ops(visit.first_op, visit.first_op + len(segment.ops))
            found.append(Layer(block, places[block][0], group, graphs[visit.segment], seconds))
    return tuple(sorted(found, key=lambda layer: layer.place))


def level_with(bench: Bench, choice: Choice, window: int | None = None) -> Level:
    """What a plan says of ``choice``; ``window``: bytes that may be under way each way (None: as ``level_of``)."""
    if bench.chain is None or bench.liveness is None or not choice:
        return KEPT
    chosen = [
        [choice[block] if block in choice else group.whole(KEEP) for block in group.blocks]
        for group in bench.chain.groups
    ]
    level = level_of(bench.liveness, bench.chain, chosen)
    if window is None or not level.moved:
        return level
    return Level(level.recompute, level.activations, window, level.moved)


def reruns(option: Option) -> bool:
    """Whether a block with ``option`` runs again."""
    return option.recompute


def moves(option: Option) -> bool:
    """Whether anything of a block with ``option`` goes to the host."""
    return option.moved > 0


def all_moved(layer: Layer) -> Option:
    """All that it saves and that can move."""
    return layer.kept(lambda item: True)


def all_again(layer: Layer) -> Option:
    """It runs again, from what comes in."""
    return layer.again(lambda item: KEEP if item.op == INPUT else AGAIN)


def every_again(layers: Sequence[Layer]) -> Choice:
    """Every block that may runs again, from what comes in."""
    return {layer.name: all_again(layer) for layer in layers if layer.may_rerun}


def every_moved(layers: Sequence[Layer]) -> Choice:
    """All that can move, of every block."""
    return {layer.name: all_moved(layer) for layer in layers}


def fewest(
    layers: Sequence[Layer],
    base: Choice,
    change: Callable[[Layer], Option],
    level: Callable[[Choice], Level],
    over: Callable[[Level], int],
) -> tuple[Choice, Level | None]:
    """``base`` with the fewest of ``layers``, from the first on, as ``change`` makes them, such that nothing is
    ``over`` (bytes that lack); None beside all of them changed where that does not do either.

    From the first on: when their turn comes in backward, what the later ones held is gone.
    """

    def changed(count: int) -> Choice:
        return {**base, **{layer.name: change(layer) for layer in layers[:count]}}

    count = fewest_that_fit(len(layers), lambda count: over(level(changed(count))))
    if count is None:
        return changed(len(layers)), None
    return changed(count), level(changed(count))


def read_by_products(bench: Bench, layers: Sequence[Layer]) -> frozenset[tuple[str, Name]]:
    """By block and name, the ops of ``layers`` of which a product reads what they make in forward, in their own block
    or in another one."""
    trace, liveness = bench.problem.trace, bench.liveness
    if trace is None or liveness is None:
        return frozenset()
    index, found = liveness.index, set[int]()
    for place, visit in enumerate(trace.visits):
        if visit.phase is Phase.FORWARD:
            ops = trace.segments[visit.segment].ops
            for root, readers in index.port_roots(place).items():
                if any(trace.works[ops[reader].work].flops for reader in readers):
                    found.add(root)
    named = set()
    for layer in layers:
        read = {place for node in layer.graph.nodes if node.flops for place in node.reads}
        for name, place in index.named(layer.place).items():
            if place in read or not found.isdisjoint(index.made_by(layer.place, place)):
                named.add((layer.name, name))
    return frozenset(named)
