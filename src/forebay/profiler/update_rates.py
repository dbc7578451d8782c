"""How fast the host updates parameters: the runtime's own updater over one block, chunk by chunk.

AdamW with fp32 moments is bound by memory, so that bytes/s say how long any such update takes. Where states have few
bits, or a rule few of them, the cores bind before memory does: of those the elements/s are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, final

import torch

from forebay.device.base import Completion, Device
from forebay.kernels.team import Team, cores, cores_beside_compute
from forebay.layout import STATE_ITEMSIZE, align, state_layout
from forebay.machine import SPARED_CORES
from forebay.memory import Kind, Ledger, Tier
from forebay.model import Block, Parameter
from forebay.optim.rules import AdamRule, LionRule, UpdateRule
from forebay.plans import Placement, Streaming
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import ColdStopwatch, medians, span
from forebay.runtime.applying import Task
from forebay.runtime.blockstate import BlockState
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.homes import MemoryHome
from forebay.runtime.landing import Landing
from forebay.runtime.tensors import dtype_of
from forebay.runtime.updates import Updater
from forebay.states import Masters, update_kind
from forebay.tiers.arena import HostArena
from forebay.timeline import Event, Lane

__all__ = ["UpdateTrial", "core_bound_rates", "spared_by", "spared_cores", "update_rate"]

_NAME: Final = "weight"

_ADAMW: Final = AdamRule(decoupled=True, amsgrad=False)

_CORE_BOUND: Final[tuple[UpdateRule, ...]] = (
    AdamRule(decoupled=True, amsgrad=False, moments="bfloat16"),
    AdamRule(decoupled=True, amsgrad=False, moments="8bit"),
    AdamRule(decoupled=True, amsgrad=False, moments="4bit"),
    LionRule(),
)

_SHARE: Final = 4
"""The part of the elements of the AdamW trial that each of the others has: they are in memory at one time."""

_WORTH: Final = 1.25
"""Times as fast as without it: what the last core makes of updates that shall have it beside compute."""

_NUMBERS: Final = MappingProxyType(
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
    """One block of ``elements`` parameters of ``dtype`` on the host, its gradients and the states of ``rule``, updated
    by ``threads``."""

    def __init__(self, device: Device, elements: int, dtype: str, threads: int, rule: UpdateRule = _ADAMW) -> None:
        itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        parameter = Parameter(_NAME, (elements,), (1,), dtype, elements * itemsize, 0, True)
        block = Block("probe", (parameter,), ("probe",), align(parameter.nbytes))
        layout = state_layout(block, rule.state_names, Streaming().update_chunk, Masters.WHOLE)
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
        self._team = Team(threads)
        self._updater = Updater(device, rule, work, self._team)
        self._steps = 0
        self._elements = elements

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
        group: dict[str, Any] = dict(_NUMBERS)
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

    def elements_rate(self) -> float:
        """Elements/s of one step."""
        return self._elements / span(self.step())


def spared_cores(device: Device, effort: Effort) -> int:
    """How many cores updates that run beside compute leave to others: one, or none where the last one makes them so
    much faster that it is of use to them for most of the time that it has.

    Threads that move bytes wait for memory together: where it has little more for the last one, each byte takes more of
    the cores' time, and what wants a core beside the updates gets it later.
    """
    if cores_beside_compute(SPARED_CORES) == cores():
        return SPARED_CORES
    elements = max(effort.update_elements // 2, 1)
    with ExitStack() as opened:
        trials = {
            spared: opened.enter_context(
                UpdateTrial(device, elements, effort.update_dtype, cores_beside_compute(spared))
            )
            for spared in (0, SPARED_CORES)
        }
        rates = medians({spared: trial.rate for spared, trial in trials.items()}, effort.rounds, effort.bound)
    return spared_by(rates[0], rates[SPARED_CORES])


def spared_by(every: float, less: float) -> int:
    """The cores to spare where updates have a rate of ``every`` on all of them and of ``less`` on all but one."""
    return 0 if every >= _WORTH * less else SPARED_CORES


def update_rate(device: Device, effort: Effort, threads: int) -> float:
    """Bytes/s of AdamW on the host by ``threads``, with the update lane to itself."""
    cold = ColdStopwatch()

    def after_compute() -> float:
        # As in a step: the caches hold other bytes, and the threads that computed have not gone to sleep yet.
        cold.cool()
        return trial.rate()

    with UpdateTrial(device, effort.update_elements, effort.update_dtype, threads) as trial:
        return medians({"update": after_compute}, effort.rounds, effort.bound)["update"]


def core_bound_rates(device: Device, effort: Effort, threads: int) -> Mapping[str, float]:
    """Elements/s of the updates that cores bind, by ``update_kind``, by ``threads``, with the update lane to
    themselves."""
    cold = ColdStopwatch()

    def after_compute(trial: UpdateTrial) -> float:
        cold.cool()
        return trial.elements_rate()

    with ExitStack() as opened:
        elements = max(effort.update_elements // _SHARE, 1)
        trials = {
            update_kind(rule.state_names): opened.enter_context(
                UpdateTrial(device, elements, effort.update_dtype, threads, rule)
            )
            for rule in _CORE_BOUND
        }
        cases = {kind: partial(after_compute, trial) for kind, trial in trials.items()}
        return medians(cases, effort.rounds, effort.bound)
