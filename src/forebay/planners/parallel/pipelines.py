"""Pipelines of stages that stay on their devices: what each stage gives up, what it then holds, how long a step takes.

A stage holds its parameters, gradients and states; what it has saved of the micro-batches that are under way
(``simulation.pipeline.in_flight``); of what moves some chunks (``UNDER_WAY``), where the rest is elsewhere; and what
one pass takes beside. Stages are alike long in forward; their update runs on their device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Final, final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.activations.literature.layers import Choice, Layer, layers_of
from forebay.planners.activations.menu import Option
from forebay.planners.parallel.bench import ServerBench
from forebay.servers import DeviceShare, ServerPlan
from forebay.simulation.pipeline import UNDER_WAY, Chunk, PipelineStage, in_flight, pipelined
from forebay.simulation.stages import Stage

__all__ = ["KEPT", "Decision", "Line", "Seat", "fastest", "on_devices", "refused"]

CHUNKS: Final = 4
"""Chunks of a stage at most: what moves of one leaves while the next one computes."""


@dataclass(frozen=True)
class Decision:
    """What a stage gives up: ``choice`` for its blocks (of those that are not there all is kept); the share of what
    moves that goes ``to_peers``, the rest goes to the host."""

    choice: Choice
    to_peers: float = 0.0


KEPT: Final = Decision({})


@final
@dataclass(frozen=True, eq=False)
class Seat:
    """A stage on its device. ``layers`` are those of its blocks that anything can be said about, ``parts`` all of them;
    ``flight`` micro-batches are under way, of each of which ``saved`` bytes are held if all is kept. ``standing`` bytes
    are there throughout, ``passing`` in a pass."""

    stage: Stage
    parts: tuple[Stage, ...]
    layers: tuple[Layer, ...]
    flight: int
    standing: int
    saved: int
    passing: int

    @cached_property
    def _kept(self) -> dict[str, Option]:
        return {layer.name: layer.kept() for layer in self.layers}

    def held(self, decision: Decision) -> int:
        """Bytes of a micro-batch that stay on the device from forward to backward."""
        return self.saved - sum(self._kept[name].held - option.held for name, option in decision.choice.items())

    def moved(self, decision: Decision) -> int:
        """Bytes of a micro-batch that leave, and come back."""
        return sum(option.moved for option in decision.choice.values())

    def elsewhere(self, decision: Decision) -> int:
        """Bytes on other devices, of all micro-batches under way."""
        return self.flight * round(self.moved(decision) * decision.to_peers)

    def need(self, decision: Decision) -> int:
        """Bytes that the device holds at most."""
        largest = max(_moved(parts, decision) for parts in self._chunks)
        here = min(self.flight * self.moved(decision), UNDER_WAY * largest)
        again = max((option.workspace for option in decision.choice.values() if option.recompute), default=0)
        return self.standing + self.flight * self.held(decision) + here + again + self.passing

    def hiding(self, sharers: int) -> tuple[float, float]:
        """Seconds of a link's two directions that hide under the forward and the backward of a micro-batch, where as
        many devices have a part in it; none on the last stage, whose backward follows its forward."""
        if self.flight == 1:
            return 0.0, 0.0
        return self.stage.forward / sharers, (self.stage.backward - self.stage.forward) / sharers

    @property
    def _chunks(self) -> list[tuple[Stage, ...]]:
        size = ceil(len(self.parts) / CHUNKS)
        return [self.parts[at : at + size] for at in range(0, len(self.parts), size)]

    def pipeline(self, decision: Decision, update: float) -> PipelineStage:
        """What the device does with a micro-batch."""
        chunks = []
        for parts in self._chunks:
            moved = _moved(parts, decision)
            to_peers = round(moved * decision.to_peers)
            forward = sum(part.forward for part in parts)
            backward = sum(part.backward - part.forward for part in parts) + _again(parts, decision)
            chunks.append(Chunk(forward, backward, moved - to_peers, to_peers))
        return PipelineStage(tuple(chunks), self.stage.handed, update)


def _moved(parts: Sequence[Stage], decision: Decision) -> int:
    return sum(decision.choice[part.blocks[0]].moved for part in parts if part.blocks[0] in decision.choice)


def _again(parts: Sequence[Stage], decision: Decision) -> float:
    return sum(decision.choice[part.blocks[0]].seconds for part in parts if part.blocks[0] in decision.choice)


@final
class Line:
    """The stages of a pipeline over all devices of a server, for ``policy``. Raises ``CannotServe`` for one device, and
    where there are more devices than blocks."""

    def __init__(self, bench: ServerBench, policy: str) -> None:
        why = "puts a stage of the model on each of several devices"
        alone = f"{policy} without --devices" if policy in ("mpress", "ppaware") else "resident, recompute or auto"
        bench.expect_several(policy, why, alone)
        self.bench = bench
        self.policy = policy
        self.seats = tuple(self._seats(bench.stages(policy, bench.server.devices)))

    def _seats(self, stages: Sequence[Stage]) -> list[Seat]:
        bench = self.bench
        layers = {layer.name: layer for layer in layers_of(bench.bench)}
        seats = []
        for place, (stage, parts) in enumerate(zip(stages, bench.parts(stages), strict=True)):
            before = stages[place - 1] if place else None
            own = tuple(layers[name] for name in stage.blocks if name in layers)
            flight = in_flight(place, len(stages), bench.micro_batches)
            saved = bench.saved(stage, before)
            seats.append(Seat(stage, parts, own, flight, bench.standing(stage), saved, bench.passing(stage)))
        return seats

    def over(self, seat: Seat, decision: Decision) -> int:
        """Bytes that a device lacks; less than 0: bytes that are left."""
        return seat.need(decision) - self.bench.limit

    def fits(self, decisions: Sequence[Decision]) -> bool:
        """Whether every device has room for its stage, and for what others have swapped to it."""
        left = [-self.over(*pair) for pair in zip(self.seats, decisions, strict=True)]
        elsewhere = [seat.elsewhere(one) for seat, one in zip(self.seats, decisions, strict=True)]
        room = sum(left)
        others = all(own <= room - mine for own, mine in zip(elsewhere, left, strict=True) if own)
        return min(left) >= 0 and others and sum(elsewhere) <= room

    def plan(self, decisions: Sequence[Decision], *reasons: str) -> ServerPlan:
        """What ``decisions`` come to. Raises ``DoesNotFit`` where the host has no room for what goes there."""
        bench = self.bench
        rate = bench.costs.machine.device_bandwidth
        pairs = list(zip(self.seats, decisions, strict=True))
        found = [seat.pipeline(one, seat.stage.touched / rate) for seat, one in pairs]
        host = sum(
            seat.flight * sum(chunk.to_host for chunk in stage.chunks)
            for (seat, _), stage in zip(pairs, found, strict=True)
        )
        bench.expect_host(self.policy, host)
        played = pipelined(found, bench.costs, bench.server, bench.micro_batches)
        left = [-self.over(seat, one) for seat, one in pairs]
        given = _given(left, sum(seat.elsewhere(one) for seat, one in pairs))
        shares = [
            DeviceShare(len(seat.parts), bench.micro_batches * stage.seconds + stage.update, seat.need(one) + more)
            for (seat, one), stage, more in zip(pairs, found, given, strict=True)
        ]
        return ServerPlan(self.policy, played.seconds, tuple(shares), host, played.moved, reasons)


def _given(left: Sequence[int], nbytes: int) -> list[int]:
    """``nbytes`` of others on each device, the one with the most room ``left`` first."""
    given = [0] * len(left)
    for place in sorted(range(len(left)), key=lambda place: -left[place]):
        given[place] = min(max(0, left[place]), nbytes)
        nbytes -= given[place]
    return given


def on_devices(bench: ServerBench, policy: str, decide: Callable[[Seat], Decision], said: str) -> ServerPlan:
    """Every stage gives up what ``decide`` says. Raises ``DoesNotFit`` and ``CannotServe``."""
    line = Line(bench, policy)
    decisions = [decide(seat) for seat in line.seats]
    if not line.fits(decisions):
        raise refused(line, decisions)
    return line.plan(decisions, said)


def fastest(line: Line, among: Sequence[tuple[Sequence[Decision], str]]) -> ServerPlan | None:
    """The fastest of ``among`` that fit, each with what is said of it; None where none does."""
    plans = []
    for decisions, said in among:
        if line.fits(decisions):
            with suppress(DoesNotFit):  # on the host
                plans.append(line.plan(decisions, said))
    return min(plans, key=lambda plan: plan.step_seconds, default=None)


def refused(line: Line, least: Sequence[Decision]) -> DoesNotFit:
    """``least`` is what needs the least of every device."""
    needs = [seat.need(one) for seat, one in zip(line.seats, least, strict=True)]
    place = needs.index(max(needs))
    seat = line.seats[place]
    where = f"for stage {place + 1} of {len(needs)} ({len(seat.parts)} blocks, {seat.flight} micro-batches under way)"
    more = "policy mobius or harmony, whose stages are at home on the host"
    return line.bench.refusal(line.policy, Tier.DEVICE, needs[place], line.bench.limit, where, more)
