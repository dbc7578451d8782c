"""How fast the host updates parameters: the runtime's own updater over one block, chunk by chunk."""

from __future__ import annotations

from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import Any, Final, final

import torch

from forebay.device.base import Completion, Device
from forebay.kernels.team import Team, cores
from forebay.layout import STATE_ITEMSIZE, align, state_layout
from forebay.memory import Kind, Ledger, Tier
from forebay.optim.rules import AdamRule
from forebay.plans import Placement, Streaming
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import ColdStopwatch, medians, span
from forebay.runtime.blockstate import BlockState
from forebay.runtime.gradients import GradientBuffer, Landing
from forebay.runtime.homes import MemoryHome
from forebay.runtime.tensors import dtype_of
from forebay.runtime.updates import Task, Updater
from forebay.tiers.arena import HostArena
from forebay.timeline import Event, Lane
from forebay.trace import Block, Parameter

__all__ = ["UpdateTrial", "update_rate"]

_NAME: Final = "weight"

_ADAMW: Final = MappingProxyType(
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
    }
)


@final
class UpdateTrial:
    """One block of ``elements`` parameters of ``dtype`` on the host, its gradients and its AdamW states."""

    def __init__(self, device: Device, elements: int, dtype: str) -> None:
        itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        parameter = Parameter(_NAME, (elements,), (1,), dtype, elements * itemsize, 0, True)
        block = Block("probe", (parameter,), ("probe",), align(parameter.nbytes))
        rule = AdamRule(decoupled=True, amsgrad=False)
        layout = state_layout(block, rule.state_names, Streaming().update_chunk)
        workspace = max(chunk.elements for chunk in layout.chunks) * STATE_ITEMSIZE
        sizes = (block.nbytes, block.nbytes, layout.nbytes, workspace)
        self._device = device
        self._arena = HostArena(sum(map(align, sizes)), Kind.STATE, ledger=Ledger(Tier.HOST), what="probe")
        # Zeros everywhere are the numbers of a model that has converged; pages exist from here on.
        self._arena.memory.zero_()
        parameters, gradients, states, work = (self._arena.carve(size) for size in sizes)
        landing = Landing(device, 0, torch.empty(0, dtype=torch.uint8))
        landed = gradients[: parameter.nbytes].view(dtype_of(parameter)).fill_(1e-3)
        self._state = BlockState(
            block,
            Placement(block.name, Tier.HOST, Tier.HOST, Tier.HOST),
            layout,
            MemoryHome(device, parameters, block.name),
            MemoryHome(device, states, block.name),
            {_NAME: GradientBuffer(parameter, landed, landing)},
        )
        self._team = Team(cores())
        self._updater = Updater(device, rule, work, self._team)
        self._steps = 0

    def __enter__(self) -> UpdateTrial:
        with ExitStack() as opened:
            opened.push(self)
            # The first update of a process loads the kernels, or makes them: not what a step costs.
            self.step()
            opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.synchronize()
        self._team.close()
        self._arena.close()

    def submit(self) -> Completion:
        """Queues one step of the block on the update lane; returns the end of it."""
        self._steps += 1
        group: dict[str, Any] = dict(_ADAMW)
        self._updater.submit(self._state, {_NAME: Task(self._steps, group)})
        done = self._state.parameters.written
        if done is None:
            raise RuntimeError("an update of a block with trainable parameters queued nothing")
        return done

    def step(self) -> list[Event]:
        """One step from end to end; returns the events of its update jobs."""
        self._device.drain_events()
        self.submit().wait()
        return [event for event in self._device.drain_events() if event.lane is Lane.UPDATE]

    def rate(self) -> float:
        """Bytes/s of one step, in the bytes that the program counts for an update."""
        events = self.step()
        return sum(event.nbytes for event in events) / span(events)


def update_rate(device: Device, effort: Effort) -> float:
    """Bytes/s of AdamW on the host, with the update lane to itself."""
    cold = ColdStopwatch()

    def after_compute() -> float:
        # As in a step: the caches hold other bytes, and the threads that computed have not gone to sleep yet.
        cold.cool()
        return trial.rate()

    with UpdateTrial(device, effort.update_elements, effort.update_dtype) as trial:
        return medians({"update": after_compute}, effort.rounds, effort.bound)["update"]
