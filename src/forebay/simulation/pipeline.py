"""One model in a pipeline over several devices of one host, a stage on each, with one forward and one backward in turn.
No torch.

A stage stays on its device, and so do its gradients and states. Device p of P begins with the forward of P - 1 - p
micro-batches, goes on with one forward and one backward in turn, and ends with the backwards that are left; then all
stages are updated (Narayanan et al., "PipeDream", SOSP 2019, 1F1B; Fan et al., "DAPPLE", PPoPP 2021, with the update
behind all micro-batches: the numbers of plain training). Between its forward and its backward a micro-batch's
activations are on the device: of ``in_flight(p, P, m)`` = min(P - p, m) micro-batches at a time, the most on the first.

A stage is some *chunks*, that compute one after the other. What a chunk's forward saves may go to the host or to other
devices, and comes back for its backward. A chunk does not begin before what was saved two chunks earlier has left, and
what one needs comes from when the chunk before the last one is done: so no more than ``UNDER_WAY`` chunks of what
moves are on their own device at a time.

What a stage hands to the next one goes over links between devices, or by way of the host where there are none. A step
begins when the one before it is over; what other devices send costs the device that is given it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from forebay.errors import ConfigError
from forebay.program import Verb
from forebay.servers import Server
from forebay.simulation.costs import Costs
from forebay.simulation.schedule import Schedule
from forebay.simulation.several import Act, SeveralForecast
from forebay.trace import Phase

__all__ = ["UNDER_WAY", "Chunk", "PipelineStage", "in_flight", "order", "pipelined"]

UNDER_WAY: Final = 3
"""Chunks of what moves that are on their device at a time: one computes, one leaves, one comes."""


@dataclass(frozen=True)
class Chunk:
    """Some layers of a stage and one micro-batch: seconds of ``forward`` and of ``backward``, with what runs again in
    it; bytes that go ``to_host`` and ``to_peers`` behind the forward, and come back."""

    forward: float
    backward: float
    to_host: int = 0
    to_peers: int = 0


@dataclass(frozen=True)
class PipelineStage:
    """What a device does with a micro-batch, in the order of the forward; bytes that it hands to the next stage, and
    gets back as a gradient; seconds of the update of its parameters."""

    chunks: tuple[Chunk, ...]
    handed: int = 0
    update: float = 0.0

    @property
    def seconds(self) -> float:
        """Of computation for one micro-batch."""
        return sum(chunk.forward + chunk.backward for chunk in self.chunks)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations ``stage`` holds at a time, at most."""
    return min(stages - stage, micro_batches)


def order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Phase, int]]:
    """The passes of ``stage`` in a step, each with its micro-batch."""
    ahead = in_flight(stage, stages, micro_batches) - 1
    for number in range(ahead):
        yield Phase.FORWARD, number
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            yield Phase.FORWARD, number + ahead
        yield Phase.BACKWARD, number


def pipelined(stages: Sequence[PipelineStage], costs: Costs, server: Server, micro_batches: int) -> SeveralForecast:
    """A step of ``micro_batches`` through ``stages``, one on each device of ``server``. ``costs`` are those of the
    model on one of the devices. Raises ``ConfigError`` where there are not as many stages as devices, or no
    micro-batch, and for what moves to other devices without links between them."""
    if micro_batches < 1 or len(stages) != server.devices:
        raise ConfigError(
            f"a pipeline has a stage on each device and one micro-batch or more, got {len(stages)} stages on "
            f"{server.devices} devices and {micro_batches} micro-batches"
        )
    return _Pipeline(stages, costs, server, micro_batches).played(1, micro_batches)


@final
class _Pipeline(Schedule):
    def __init__(self, stages: Sequence[PipelineStage], costs: Costs, server: Server, micro_batches: int) -> None:
        super().__init__(costs, server)
        self._stages = stages
        self._micro_batches = micro_batches
        # By stage and micro-batch: what brings its input, and the gradient of its output.
        self._given: dict[tuple[Phase, int, int], Act] = {}
        # By stage, micro-batch and chunk: what takes its activations away, to the host and to other devices.
        self._gone: dict[tuple[int, int, int], list[Act]] = {}
        # By stage: the chunks that have computed, and what each waits for to have left.
        self._computed: list[list[Act]] = [[] for _ in stages]
        self._leaving: list[list[list[Act]]] = [[] for _ in stages]

    def step(self) -> None:
        todo = [list(order(p, len(self._stages), self._micro_batches))[::-1] for p in range(len(self._stages))]
        while any(todo):
            # Whatever some stage can do next: what it is given was made by an action that is there already.
            for stage, passes in enumerate(todo):
                if passes and self._is_given(*passes[-1], stage):
                    self._pass(stage, *passes.pop())
        for stage, one in enumerate(self._stages):
            if one.update:
                self.add(stage, Verb.COMPUTE, 0, self._computed[stage][-1:], one.update)

    def _is_given(self, phase: Phase, number: int, stage: int) -> bool:
        first = stage == (0 if phase is Phase.FORWARD else len(self._stages) - 1)
        return first or (phase, stage, number) in self._given

    def _pass(self, stage: int, phase: Phase, number: int) -> None:
        """One micro-batch through the chunks of a stage, and on to the next stage."""
        chunks = self._stages[stage].chunks
        forward = phase is Phase.FORWARD
        places = list(range(len(chunks)) if forward else reversed(range(len(chunks))))
        for chunk in places:
            needs = [] if forward else self._back(stage, number, chunk)
            if chunk == places[0]:
                needs += self._received(stage, phase, number)  # the link waits for it: what is there already goes first
            seconds = chunks[chunk].forward if forward else chunks[chunk].backward
            self._compute(stage, seconds, needs)
            if chunk == places[-1]:
                self._hand_on(stage, phase, number)  # somebody waits for it: it goes before what only leaves
            self._leaving[stage].append(self._sent_away(stage, number, chunk) if forward else [])

    def _hand_on(self, stage: int, phase: Phase, number: int) -> None:
        following = stage + (1 if phase is Phase.FORWARD else -1)
        if 0 <= following < len(self._stages):
            handed, done = self._stages[min(stage, following)].handed, self._computed[stage][-1:]
            send = self.add if self.server.peer is None else self.between
            self._given[phase, following, number] = send(stage, Verb.OFFLOAD, handed, done)

    def _received(self, stage: int, phase: Phase, number: int) -> list[Act]:
        """What has to be there before a pass begins: by way of the host it is fetched from there."""
        sent = self._given.get((phase, stage, number))
        if sent is None:
            return []
        if self.server.peer is not None:
            return [sent]
        handed = self._stages[stage - 1 if phase is Phase.FORWARD else stage].handed
        return [self.add(stage, Verb.RELOAD, handed, [sent])]

    def _compute(self, stage: int, seconds: float, needs: Sequence[Act]) -> None:
        leaving = self._leaving[stage]
        # What was saved two chunks earlier has to have left: else a third one would be here.
        room = leaving[-2] if len(leaving) > 1 else []
        self._computed[stage].append(self.add(stage, Verb.COMPUTE, 0, [*needs, *room], seconds))

    def _sent_away(self, stage: int, number: int, chunk: int) -> list[Act]:
        one, done, found = self._stages[stage].chunks[chunk], self._computed[stage][-1], list[Act]()
        if one.to_host:
            found.append(self.add(stage, Verb.OFFLOAD, one.to_host, [done]))
        if one.to_peers:
            found.append(self.between(stage, Verb.OFFLOAD, one.to_peers, [done]))
        self._gone[stage, number, chunk] = found
        return found

    def _back(self, stage: int, number: int, chunk: int) -> list[Act]:
        """What brings back what a chunk has saved: while the chunk before it computes, and not earlier."""
        one, gone = self._stages[stage].chunks[chunk], self._gone[stage, number, chunk]
        waits = [*gone, *self._computed[stage][-2:-1]]
        found = []
        if one.to_host:
            found.append(self.add(stage, Verb.RELOAD, one.to_host, waits))
        if one.to_peers:
            found.append(self.between(stage, Verb.RELOAD, one.to_peers, waits))
        return found
