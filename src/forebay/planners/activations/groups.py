"""Blocks that are alike, what may be done with each, and what that costs every tier and lane.

The costs of a block are those of its home and those of its activations, added: the one does not change the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import final

from forebay.arenas import home_nbytes
from forebay.layout import MOVED_LEAST, gradient_offsets, state_layout, states_nbytes, touched_nbytes
from forebay.lowering.liveness import Liveness
from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.activations.items import Items, items_of, together
from forebay.planners.activations.menu import Option, menu, option
from forebay.planners.parts import DEDICATED, HOSTED, RESIDENT, recomputable
from forebay.planners.problem import Problem
from forebay.simulation import Costs
from forebay.states import is_fp32
from forebay.trace import Phase, Trace

__all__ = ["ON_DISK", "STATES_ON_DISK", "Group", "Home", "Use", "groups_of", "memory_seconds"]

STATES_ON_DISK = (Tier.HOST, Tier.HOST, Tier.DISK)
ON_DISK = (Tier.DISK, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, slots=True)
class Use:
    """Seconds of every lane in a step, and bytes of every tier.

    A step has two halves: forward, and backward to the next forward, which waits until all gradients have landed. What
    is offloaded leaves in forward and comes back in backward. ``stores`` go to the host at any time: what an update on
    the device makes of a block that is at home elsewhere. ``memory`` are seconds of the host's memory, which updates
    and copies share (``memory_seconds``).
    """

    forward: float = 0.0
    fetches: float = 0.0
    offloads: float = 0.0
    update: float = 0.0
    backward: float = 0.0
    reloads: float = 0.0
    gradients: float = 0.0
    stores: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    memory: float = 0.0
    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True, slots=True)
class Home:
    """Where parameters, gradients and states of a block are, and what that costs. ``shared`` are the bytes of the
    shared slot that it takes when its turn comes; if it is still there at the next turn, ``spared`` of the seconds on
    the link are not needed, and ``spared_memory`` of those of the host's memory. What is trained comes once a step at
    least: its update made the copy in the slot stale.
    """

    tiers: tuple[Tier, Tier, Tier]
    use: Use
    shared: int = 0
    spared: float = 0.0
    spared_memory: float = 0.0


@dataclass(frozen=True)
class Group:
    """Blocks that are alike, in the order of the forward, and what each may be.

    ``inputs`` names, for each block, what makes its input: (block, op, occurrence); None where a plan cannot say that
    it moves. ``options`` are put together from ``items``, what each op makes. ``least`` are choices at the vertices of
    the hull: none for a block takes less than some mixture of them.
    ``moved`` are those of ``homes`` that are elsewhere once more, with the update on the device, at the best that the
    links can do: none where that may not be. ``copied``: seconds of the host's memory for a byte over the link.
    """

    blocks: tuple[str, ...]
    inputs: tuple[tuple[str, str, int] | None, ...]
    homes: tuple[Home, ...]
    options: tuple[Option, ...]
    items: Items
    held: int
    least: tuple[Use, ...]
    moved: tuple[Home, ...] = ()
    copied: float = 0.0

    @property
    def uses(self) -> list[Use]:
        """What each of the options costs."""
        return [
            Use(
                forward=o.encode_seconds,
                offloads=o.out_seconds,
                backward=o.seconds,
                reloads=o.back_seconds,
                memory=2 * o.moved * self.copied,
                device=float(o.held),
                host=float(o.moved),
            )
            for o in self.options
        ]

    def whole(self, code: int) -> Option:
        """A block that does not run again and does ``code`` (``menu.KEEP``, ``MOVE``) with all that it saves, where
        that may be. It need not be among ``options``, where each that does not run again may be beaten."""
        return option(self.items, False, [code] * len(self.items.kept))


def memory_seconds(costs: Costs) -> tuple[float, float]:
    """Seconds of the host's memory that a byte touched by an update takes, and one that crosses the link: no step is
    shorter than what all of them take together.

    With an update running, at most U bytes/s are its own, and M in all (``simulation.sharing``); without, copies run at
    R at most. So with ``r = max(R, M)`` and a copied byte counted as 1 / r, there is no instant at which more than a
    second a second is counted if an updated byte counts as (1 - (M - U) / r) / U.
    """
    machine, updates = costs.machine, costs.fastest_update_rate
    # On a cpu a copied byte is in host memory twice.
    twice = 2.0 if machine.device_kind == "cpu" else 1.0
    links = [twice * rate for rate in (machine.h2d.curve.best, machine.out_rate)]
    together = max(machine.host_bandwidth, updates, *links)
    rest = max(together, *links, machine.duplex * sum(links))
    return (1 - (together - updates) / rest) / updates, twice / rest


def groups_of(problem: Problem, liveness: Liveness, costs: Costs) -> tuple[Group, ...]:
    """The blocks of a trace, grouped, in the order in which the forward comes to the first of each group."""
    return _Grouping(problem, liveness, costs).groups()


@final
class _Grouping:
    def __init__(self, problem: Problem, liveness: Liveness, costs: Costs) -> None:
        trace, index = liveness.trace, liveness.index
        self._problem, self._trace, self._index, self._costs = problem, trace, index, costs
        self._recomputable = frozenset(recomputable(trace))
        self._updated, self._copied = memory_seconds(costs)
        self._items: dict[object, tuple[Items, tuple[Option, ...]]] = {}
        self._forward = _forward_visits(trace)
        self._otherwise = [(one.index, _forward_visits(one.trace)) for one in liveness.extremes]
        self._reads: dict[str, set[Phase]] = {}
        for place, visit in enumerate(trace.visits):
            for _, block in index.block_reads(place):
                self._reads.setdefault(block, set()).add(visit.phase)
        self._trained: dict[str, set[int]] = {}
        for visits in index.completed:
            for done in visits:
                self._trained.setdefault(index.blocks[done.parameter], set()).add(index.places[done.parameter])

    def groups(self) -> tuple[Group, ...]:
        alike: dict[tuple[object, object], list[tuple[Block, tuple[str, str, int] | None]]] = {}
        first = {name: places[0] for name, places in self._forward.items()}
        for block in sorted(self._trace.model.blocks, key=lambda b: first.get(b.name, len(self._trace.visits))):
            arriving, source = self._arriving(block)
            key = (self._activations(block, arriving, source), self._parameters(block))
            alike.setdefault(key, []).append((block, source))
        found = []
        for (activations, _), members in alike.items():
            items, options = self._menu(activations)
            found.append(
                Group(
                    tuple(block.name for block, _ in members),
                    tuple(source for _, source in members),
                    self._homes(members[0][0]),
                    options,
                    items,
                    items.held,
                    _least(items, self._costs, self._copied),
                    self._moved(members[0][0]),
                    self._copied,
                )
            )
        return tuple(found)

    # Activations.

    def _visits(self, block: Block) -> Sequence[int]:
        """The places of the visits that are the forward of ``block``; none where each of them is not known to be all of
        a call of its one module, nor where its ops have no names and it may not run again as a whole."""
        places = () if block.module is None else self._forward.get(block.name, ())
        chooses = block.name in self._recomputable or self._is_named(block.name)
        return places if chooses and self._index.are_calls(places) else ()

    def _is_named(self, block: str) -> bool:
        """Whether ops of ``block`` go by names however a step goes: where it runs several times by chance, each of
        those has to be all of a call, too."""
        others = [(index, visits.get(block, ())) for index, visits in self._otherwise]
        return all(len(there) < 2 or index.are_calls(there) for index, there in others)

    def _activations(self, block: Block, arriving: int, source: object) -> object:
        named = self._is_named(block.name)
        runs = tuple(
            (self._trace.visits[place].segment, frozenset(self._index.named(place).items() if named else ()))
            for place in self._visits(block)
        )
        return (runs, block.name in self._recomputable, arriving, source is not None) if runs else None

    def _menu(self, key: object) -> tuple[Items, tuple[Option, ...]]:
        if key not in self._items:
            items = self._items_of(*key) if isinstance(key, tuple) else Items(())
            self._items[key] = items, menu(items)
        return self._items[key]

    def _items_of(
        self,
        runs: Iterable[tuple[int, Collection[tuple[tuple[str, int], int]]]],
        recomputes: bool,
        arriving: int,
        moves: bool,
    ) -> Items:
        """The items of a block with such ``runs``: of each the segment, and the places of ops by name."""
        found = []
        for segment, places in runs:
            found.append(
                items_of(
                    self._costs,
                    self._trace.segments[segment],
                    dict(sorted(places, key=lambda pair: pair[1])),
                    recomputes=recomputes,
                    arriving=arriving,
                    arriving_moves=moves,
                    bits=self._problem.compress,
                )
            )
            arriving = 0  # it is what comes in of all runs
        return together(found)

    def _arriving(self, block: Block) -> tuple[int, tuple[str, str, int] | None]:
        """Bytes that a recomputed ``block`` holds of what came in, and who made them if that is one op of a block that
        runs as often."""
        places = self._visits(block)
        if not places or block.name not in self._recomputable:
            return 0, None
        total, sources = 0, set()
        for place in places:
            for number in self._index.port_roots(place):
                root = self._index.roots.get(number)
                if root is None or root.saved or not self._drops(place, root.drop):
                    continue  # it is there in any case, or held for other blocks too
                total += root.nbytes
                maker = self._maker(root.visit, root.birth) if root.nbytes >= MOVED_LEAST else None
                sources.add(maker if maker and len(self._forward[maker[0]]) == len(places) else None)
        return total, sources.pop() if len(sources) == 1 else None

    def _drops(self, place: int, op: int) -> bool:
        return self._trace.visits[place].first_op <= op <= self._index.last_op(place)

    def _maker(self, place: int, op: int) -> tuple[str, str, int] | None:
        """What a treatment calls op ``op`` of visit ``place``: the block has to recompute, or nothing may move that
        backward does not ask for."""
        visit = self._trace.visits[place]
        if visit.block not in self._recomputable or not self._is_named(visit.block):
            return None
        name = next((n for n, place_ in self._index.named(place).items() if place_ == op - visit.first_op), None)
        return None if name is None else (visit.block, *name)

    # Parameters, gradients, states.

    def _parameters(self, block: Block) -> object:
        shapes = tuple(p.sort for p in block.parameters)
        trained = frozenset(self._trained.get(block.name, ()))
        return shapes, block.held, trained, frozenset(self._reads.get(block.name, ()))

    def _homes(self, block: Block) -> tuple[Home, ...]:
        """The homes that ``block`` may have; those on disk only where there is one."""
        machine = self._costs.machine
        trained = [block.parameters[i] for i in sorted(self._trained.get(block.name, ()))]
        layout = state_layout(block, self._problem.state_names, 1 << 22, self._problem.masters)
        states = layout.nbytes
        touched = sum(touched_nbytes(layout.streams, p) for p in trained)
        # Where they are used up in backward a few slots hold all of them: nothing is the least.
        gradients = 0 if self._problem.update == "backward" else gradient_offsets(block)[1]
        fetch = machine.h2d.seconds(block.nbytes)
        leave = sum(machine.d2h.seconds(p.nbytes) for p in trained)
        update = self._costs.update_seconds(block.name, touched)
        hosted = block.nbytes + gradients + states
        on_device = self._costs.device_update_seconds(block.name, touched) if trained else 0.0
        # Gradients that no forward finds there are none at the turning point, nor those that backward uses up.
        found_there = self._problem.accumulates and self._problem.update == "step"
        standing = block.nbytes + block.gradient_nbytes * found_there + states
        written = touched * self._updated + sum(p.nbytes for p in trained) * self._copied
        copied = block.nbytes * self._copied
        turns = [Phase.FORWARD in self._reads.get(block.name, ()), Phase.BACKWARD in self._reads.get(block.name, ())]
        forward, again = (fetch * turn for turn in turns)
        memory = written + copied * bool(trained)
        once = Use(0.0, fetch * bool(trained), 0.0, update, 0.0, 0.0, leave, memory=memory, device=block.nbytes)
        once = replace(once, host=hosted)
        found = [Home(RESIDENT, Use(backward=on_device, device=standing)), Home(DEDICATED, once)]
        if block.held:
            return tuple(found)
        shared = block.nbytes, again if trained else forward + again, copied * (turns[1] if trained else sum(turns))
        memory = written + copied * sum(turns)
        use = Use(0.0, forward, 0.0, update, 0.0, again, leave, memory=memory, host=hosted)
        found.append(Home(HOSTED, use, *shared))
        disk = machine.disk
        if disk is not None and self._problem.limit(Tier.DISK):
            read, write = (states / link.curve.best for link in (disk.read, disk.write))
            use = replace(use, disk_read=read, disk_write=write, host=hosted - states, disk=states)
            found.append(Home(STATES_ON_DISK, use, *shared))
            home = home_nbytes(block)
            read += home / disk.read.curve.best * bool(trained)
            write += home / disk.write.curve.best * bool(trained)
            use = replace(use, disk_read=read, disk_write=write, host=gradients, disk=states + home)
            found.append(Home(ON_DISK, use, *shared))
        return tuple(found)

    def _moved(self, block: Block) -> tuple[Home, ...]:
        """The homes of ``block`` that are not on the device, with its update there (``planners.device_updates``).
        States and gradients come, and of the parameters what has no whole master; states and parameters go."""
        machine, states = self._costs.machine, self._problem.state_names
        trained = [block.parameters[i] for i in sorted(self._trained.get(block.name, ()))]
        if not trained or "cpu" in (self._trace.device, machine.device_kind) or not is_fp32(states):
            return ()
        layout = state_layout(block, states, 1 << 22, self._problem.masters)
        held = sum(states_nbytes(layout.streams, p) for p in trained)
        nbytes = sum(p.nbytes for p in trained)
        touched = sum(touched_nbytes(layout.streams, p) for p in trained)
        come = held + nbytes + sum(p.nbytes for p in trained if layout.reads(p))
        seconds, stores = come / machine.h2d.curve.best, (held + nbytes) / machine.d2h.curve.best
        crossing = (come + held + nbytes) * self._copied
        found = []
        for home in self._homes(block):
            if home.tiers != RESIDENT:
                fetches, use = home.use.fetches + seconds, home.use
                memory = use.memory - touched * self._updated + crossing
                use = replace(use, fetches=fetches, update=0.0, stores=stores, memory=memory)
                found.append(replace(home, use=use))
        return tuple(found)


def _forward_visits(trace: Trace) -> dict[str, list[int]]:
    """The places of the forward visits of each block, by its name."""
    found: dict[str, list[int]] = {}
    for place, visit in enumerate(trace.visits):
        if visit.phase is Phase.FORWARD and visit.block:
            found.setdefault(visit.block, []).append(place)
    return found


def _least(items: Items, costs: Costs, copied: float) -> tuple[Use, ...]:
    """The vertices of a hull below all choices for a block.

    As ``menu.thresholds``, but every item can move, at the links' best rates and without latencies. Then the best
    choice, at any prices, keeps or moves exactly the items above some ratio of seconds to bytes: so the vertices here
    are all there are, and no choice lies below their hull. What may be codes is taken as codes that cost nothing to
    make.
    """
    back, out = (1 / link.curve.best for link in (costs.machine.h2d, costs.machine.leaving))
    # Bytes that nothing can move, bytes that are kept or moved, seconds that run again.
    found = [(items.kept_held, sum(item.least for item in items.kept), 0.0)]
    if items.again is not None:
        fixed = sum(item.least for item in items.again if not item.reruns)
        rerun = [item for item in items.again if item.reruns]
        rerun.sort(key=lambda item: -item.seconds / item.least if item.least else -inf)
        seconds = items.again_seconds + sum(item.seconds for item in rerun)
        found.append((0, fixed, seconds))
        for item in rerun:
            fixed, seconds = fixed + item.least, seconds - item.seconds
            found.append((0, fixed, seconds))
    uses = [Use(backward=seconds, device=stays + held) for stays, held, seconds in found]
    uses += [
        Use(0.0, 0.0, held * out, 0.0, seconds, held * back, memory=2 * held * copied, device=stays, host=held)
        for stays, held, seconds in found
    ]
    return tuple(dict.fromkeys(uses))
