"""All blocks together: a linear programme over how many blocks of each group get which home and which option.

The least sum of the two halves of a step, forward and backward, such that each is at least as long as compute with all
that runs again; as each direction of the link with parameters, gradients and activations on it; as both together where
they slow each other (``Machine.duplex``); as compute and host lanes together where they share cores
(``Machine.shared_cores``); as the updates on the host; as the host's memory, which updates and copies share; as both
directions of the disk; and such that every tier has room. Of the activations that move, as many bytes as needed go on
to disk. What is on the device at the turning point, when forward is over and no block has gone backward, is counted in
full.

With the choices at the vertices of the hull (``Group.least``) and shares instead of whole blocks, the optimum is below
the step of every plan that these choices can make: each of its rows is something that no step can avoid. That is the
``bound``. With the options of the menu and what the bench says of the room, it is where the search begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from operator import attrgetter
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from forebay.lowering.liveness import Liveness
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners.activations.groups import Group, Home, Use
from forebay.planners.problem import Problem
from forebay.simulation.costs import Costs
from forebay.simulation.sharing import Sharing
from forebay.trace import Phase

__all__ = ["ANYTHING", "EXTRA", "Chain", "Programme", "Scope", "Shares", "standing_nbytes"]

TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)

EXTRA = 4
"""Variables beside the shares: bytes in slots that spare a fetch, bytes of activations on disk, and the two halves."""

LEAN = 0.01
"""Seconds of a step that a second of work on any lane is worth where it binds nothing: of plans that are equally fast
the one that does less is taken, and lanes that are not full leave less to wait for."""

_PLACES = {field.name: place for place, field in enumerate(fields(Use))}
DEVICE, RELOADS, HOST, DISK = (_PLACES[name] for name in ("device", "reloads", "host", "disk"))
MEMORY = _PLACES["memory"]
DISK_READ, DISK_WRITE = _PLACES["disk_read"], _PLACES["disk_write"]
_FIELDS = attrgetter(*_PLACES)


@dataclass(frozen=True)
class Scope:
    """What a programme may do beside the device: ``host`` are bytes there (None: all that are allowed), ``disk`` says
    whether anything may be there, ``moves`` whether any activation may leave the device, ``ahead`` whether updates may
    run under backward too."""

    host: int | None = None
    disk: bool = True
    moves: bool = True
    ahead: bool = False


ANYTHING = Scope()
"""All that the problem allows."""


@dataclass(frozen=True)
class Shares:
    """A solution: ``seconds`` of a step; of each group, how many of its blocks have which of its homes and which of its
    options."""

    seconds: float
    homes: tuple[tuple[float, ...], ...]
    options: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Programme:
    """Least ``target @ x`` with ``upper @ x <= most``, ``equal @ x = counts`` and 0 <= x <= ``highest``. All variables
    but the last ``EXTRA`` are numbers of blocks."""

    target: NDArray[Any]
    upper: NDArray[Any]
    most: NDArray[Any]
    equal: NDArray[Any]
    counts: NDArray[Any]
    highest: NDArray[Any]

    def solution(self) -> NDArray[Any] | None:
        """The best, in shares of blocks; None if there is none."""
        limits = np.c_[np.zeros(len(self.target)), self.highest]
        found = linprog(self.target, self.upper, self.most, self.equal, self.counts, limits, method="highs")
        return None if found.x is None else np.asarray(found.x)


@final
class Chain:
    """The programme of one problem.

    ``standing`` are the bytes of the device that are there in any case when forward is over, beside all arenas, with
    nothing moved and nothing made again; what the groups hold is part of them.
    """

    def __init__(self, problem: Problem, groups: Sequence[Group], costs: Costs, standing: int) -> None:
        self.groups = tuple(groups)
        self.limits = {tier: problem.limit(tier) for tier in TIERS}
        self.copies_between_ops = costs.machine.copies_between_ops
        halves = {phase: 0.0 for phase in Phase}
        for _, visit, op in costs.trace.ops():
            halves[visit.phase] += costs.work(op.work).seconds
        self.base = Use(
            forward=halves[Phase.FORWARD],
            backward=halves[Phase.BACKWARD],
            device=standing - sum(group.held * len(group.blocks) for group in self.groups),
        )
        self._solved: dict[tuple[int, int, Scope], Shares | None] = {}
        self._certain = _certain(costs.machine)
        self._likely = {ahead: _likely(costs.machine, problem.overlap_update, ahead) for ahead in (False, True)}
        homes = [home for group in self.groups for home in group.homes if home.shared]
        counts = [len(group.blocks) for group in self.groups]
        self._menus = _Columns.of([group.homes for group in self.groups], [group.uses for group in self.groups], counts)
        self._least = _Columns.of(
            [(*group.homes, *group.moved) for group in self.groups], [group.least for group in self.groups], counts
        )
        # Seconds of h2d, and of the host's memory, that a byte of shared slots spares at most.
        self._spared = max((home.spared / home.shared for home in homes), default=0.0)
        self._spared_memory = max((home.spared_memory / home.shared for home in homes), default=0.0)
        self._disk = costs.machine.disk if self.limits[Tier.DISK] else None
        self._byte = float(sum(max((h.shared for h in g.homes), default=0) * len(g.blocks) for g in self.groups)) or 1.0
        self._moving = sum(max(u.host for u in (*g.uses, *g.least)) * len(g.blocks) for g in self.groups) or 1.0
        self._second = halves[Phase.FORWARD] + halves[Phase.BACKWARD] or 1.0

    def bound(self) -> float:
        """Seconds below which no step is; infinite if nothing fits."""
        x = self._programme(self._least, self.limits[Tier.DEVICE], None, self._certain, 0.0, ANYTHING).solution()
        return inf if x is None else self._read(self._least, x).seconds

    def shares(self, device: int, slots: int, scope: Scope = ANYTHING) -> Shares | None:
        """The best shares of the menus with ``device`` bytes of the device and ``slots`` bytes of them in shared slots,
        within ``scope``; None if nothing fits."""
        key = device, slots, scope
        if key not in self._solved:
            x = self.programme(device, slots, scope).solution()
            self._solved[key] = None if x is None else self.read(x)
        return self._solved[key]

    def programme(self, device: int, slots: int, scope: Scope = ANYTHING) -> Programme:
        """The programme that ``shares`` solves. With whole blocks it takes branch and bound, for which the library
        writes to stdout now and then; and rounding comes as near (``tests/null/test_chain.py``)."""
        return self._programme(self._menus, device, slots, self._likely[scope.ahead], LEAN, scope)

    def read(self, x: NDArray[Any]) -> Shares:
        """What a solution of ``programme`` says."""
        return self._read(self._menus, x)

    def _programme(
        self, columns: _Columns, device: int, slots: int | None, lanes: Lanes, lean: float, scope: Scope
    ) -> Programme:
        table, allowed = columns.table, self.limits[Tier.HOST]
        on_host = allowed if scope.host is None else min(scope.host, allowed)
        there = self.limits[Tier.DISK] if scope.disk else 0
        limits = [device - (slots or 0), on_host, there]
        spare, away = self._spare(slots is None), self._away()
        upper, most = self._rows(columns, limits, lanes, spare, away)
        # What is done on the lanes; the host's memory has its part in that.
        work = np.r_[table[:MEMORY].sum(axis=0), 0.0, away[:MEMORY].sum()]
        target = np.r_[lean * work / self._second, 1.0, 1.0]
        in_slots = inf if slots is None else slots / self._byte
        on_disk = inf if self._disk is not None and scope.disk else 0.0
        most_each = np.full(table.shape[1], inf)
        if not scope.moves:
            options = columns.first_option
            most_each[options:][table[HOST, options:] > 0] = 0.0
        highest = np.r_[most_each, in_slots, on_disk, inf, inf]
        return Programme(target, upper, most, columns.equal, columns.counts, highest)

    def _read(self, columns: _Columns, x: NDArray[Any]) -> Shares:
        shares = [tuple(x[start:stop].tolist()) for start, stop in columns.spans]
        half = len(self.groups)
        return Shares(float(x[-2] + x[-1]) * self._second, tuple(shares[:half]), tuple(shares[half:]))

    def _spare(self, in_device: bool) -> NDArray[Any]:
        """What ``_byte`` bytes in slots that spare a fetch change; ``in_device``: whether they take room there."""
        spare = np.zeros(len(_PLACES))
        spare[RELOADS], spare[DEVICE] = -self._spared * self._byte, self._byte * in_device
        spare[MEMORY] = -self._spared_memory * self._byte
        return spare

    def _away(self) -> NDArray[Any]:
        """What ``_moving`` bytes of activations change that go on to disk from the host."""
        away = np.zeros(len(_PLACES))
        if self._disk is not None:
            away[HOST], away[DISK] = -self._moving, self._moving
            away[DISK_READ] = self._moving / self._disk.read.curve.best
            away[DISK_WRITE] = self._moving / self._disk.write.curve.best
        return away

    def _rows(
        self, columns: _Columns, limits: Sequence[float], lanes: Lanes, spare: NDArray[Any], away: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """What is at most what: seconds of the lanes below those of their half of the step, bytes below the room of
        every tier, bytes in slots that spare a fetch below those that stream, bytes of activations on disk below those
        that move. Variables: the shares, what is in slots, what is on disk, the two halves. All in units that make the
        figures neither large nor small: solvers drop what is below 1e-9."""
        second, table = self._second, columns.table
        base = np.array(_FIELDS(self.base), dtype=float)
        both = np.c_[table, spare, away]
        time = np.c_[lanes.rows @ both / second, -lanes.halves]
        room = np.c_[both[DEVICE:], np.zeros((len(TIERS), 2))]
        left = np.array(limits, dtype=float) - base[DEVICE:]
        unit = np.maximum(np.abs(room).max(axis=1), 1.0)
        options = columns.first_option
        through = np.r_[-columns.shared / self._byte, np.zeros(table.shape[1] - options), 1.0, 0.0, 0.0, 0.0]
        moved = np.r_[np.zeros(options), -table[HOST, options:] / self._moving, 0.0, 1.0, 0.0, 0.0]
        upper = np.vstack([time, room / unit[:, None], through, moved])
        return upper, np.r_[-(lanes.rows @ base) / second, left / unit, 0.0, 0.0]


def standing_nbytes(liveness: Liveness, groups: Sequence[Group]) -> int:
    """The most bytes beside the arenas between the forward of the last block of ``groups`` that has a choice and the
    backward of the first: then all that any of them holds is there. With nothing moved and nothing made again."""
    trace, profile = liveness.trace, liveness.profile()
    choosing = {name for group in groups if len(group.options) > 1 for name in group.blocks}
    start, stop = 0, len(profile.with_outputs)
    for run in profile.runs:
        visit = trace.visits[run.visit]
        if visit.block in choosing and visit.phase is Phase.FORWARD:
            start = run.position + run.length
        elif visit.block in choosing:
            stop = run.position
            break
    # Of a block that ends the forward, what it holds is there before the next op; of others, when that runs.
    between = profile.with_outputs[start:stop]
    turning = sum(level[start] for level in profile.levels.values())
    return max((turning, *between)) + trace.outside_nbytes


@dataclass(frozen=True)
class _Columns:
    """The choices of a programme: the homes of every group, then the options of every group.

    ``table`` has one column for each and the fields of ``Use`` as rows; ``shared`` are the bytes of the shared slot of
    each home; ``spans`` are the first and the last column
    (not included) of each list of choices. The sum over a list is the number of blocks of its group: ``equal @ x =
    counts``.
    """

    table: NDArray[Any]
    shared: NDArray[Any]
    spans: tuple[tuple[int, int], ...]
    equal: NDArray[Any]
    counts: NDArray[Any]

    @property
    def first_option(self) -> int:
        """The column behind those of the homes, which are those of half of the lists."""
        return self.spans[len(self.spans) // 2][0] if self.spans else 0

    @classmethod
    def of(cls, homes: Sequence[Sequence[Home]], options: Sequence[Sequence[Use]], blocks: Sequence[int]) -> _Columns:
        """From the homes and the options of every group; ``blocks`` are the numbers of blocks of the groups."""
        lists: list[Sequence[Use]] = [*([home.use for home in own] for own in homes), *options]
        shared = np.array([home.shared for own in homes for home in own], dtype=float)
        table = np.array([_FIELDS(use) for uses in lists for use in uses], dtype=float).T
        stops = np.cumsum([len(uses) for uses in lists]).tolist()
        spans = tuple(zip([0, *stops], stops, strict=False))
        equal = np.zeros((len(lists), table.shape[1] + EXTRA))
        for row, (start, stop) in enumerate(spans):
            equal[row, start:stop] = 1.0
        return cls(table, shared, spans, equal, np.array([*blocks, *blocks], dtype=float))


@dataclass(frozen=True)
class Lanes:
    """Rows of seconds over the fields of ``Use``, and which halves of the step (1 or 0 each) are at least as long."""

    rows: NDArray[Any]
    halves: NDArray[Any]

    @classmethod
    def of(cls, rows: Sequence[tuple[str, Mapping[str, float]]]) -> Lanes:
        """From pairs of halves (letters of "fb") and seconds by field."""
        table = [[row.get(name, 0.0) for name in _PLACES] for _, row in rows]
        return cls(np.array(table), np.array([[float("f" in half), float("b" in half)] for half, _ in rows]))


def _certain(machine: Machine) -> Lanes:
    """What no step avoids.

    What is offloaded has left before backward begins, comes back after that, and all gradients have landed before the
    next forward. Fetches for the forward may begin before it. Updates on the host follow each other, and those ahead of
    their step run under backward too (``planners.speculation``). A block may also be updated on the device
    (``Group.moved``): the host has that much less to do, and the links more, at any time of the step.
    """
    crossing, crowding = _crossing(machine), Sharing(machine).crowding
    h2d, d2h = {"fetches": 1.0, "reloads": 1.0}, {"offloads": 1.0, "gradients": 1.0, "stores": 1.0}
    compute = {"forward": 1.0, "backward": 1.0}
    host = dict.fromkeys(("fetches", "reloads", "offloads", "gradients", "update"), crowding)
    rows = [
        ("f", {"forward": 1.0}),
        ("f", {"offloads": 1.0}),
        ("b", {"backward": 1.0}),
        ("b", {"reloads": 1.0, "gradients": crossing}),
        ("b", {"gradients": 1.0, "reloads": crossing}),
        ("fb", {**h2d, **dict.fromkeys(d2h, crossing)}),
        ("fb", {**d2h, **dict.fromkeys(h2d, crossing)}),
        ("fb", {"update": 1.0}),
        ("fb", {"memory": 1.0}),
        ("fb", {"disk_read": 1.0}),
        ("fb", {"disk_write": 1.0}),
    ]
    return Lanes.of([*rows, ("fb", {**compute, **host})] if crowding else rows)


def _likely(machine: Machine, overlap_update: bool, ahead: bool) -> Lanes:
    """What a step comes near to: updates run under the next forward, or before it where they do not overlap, and
    fetches for the forward wait for them; those ``ahead`` of their step under backward too."""
    crossing, crowding = _crossing(machine), Sharing(machine).crowding
    rows = [
        ("f", {"forward": 1.0} if overlap_update else {"forward": 1.0, "update": 1.0}),
        ("fb" if ahead else "f", {"update": 1.0}),
        ("f", {"fetches": 1.0, "offloads": crossing}),
        ("f", {"offloads": 1.0, "fetches": crossing}),
        ("b", {"backward": 1.0}),
        ("b", {"reloads": 1.0, "gradients": crossing}),
        ("b", {"gradients": 1.0, "reloads": crossing}),
        ("fb", {"disk_read": 1.0}),
        ("fb", {"disk_write": 1.0}),
    ]
    if crowding:
        # Compute runs on all of C cores and a host lane on one: together never more than the time of C cores.
        rows.append(("f", {"forward": 1.0, **dict.fromkeys(("fetches", "offloads", "update"), crowding)}))
        rows.append(("b", {"backward": 1.0, **dict.fromkeys(("reloads", "gradients"), crowding)}))
    return Lanes.of(rows)


def _crossing(machine: Machine) -> float:
    """While both directions run, each keeps ``duplex`` of its rate: what the shorter one takes longer, both do."""
    return min(1.0, 1 / machine.duplex - 1)
