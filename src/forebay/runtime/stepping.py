"""Gradients land, and steps are taken: which parameters have a part in a step, and which update is queued when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import final

import torch
from torch import nn
from torch.autograd.graph import increment_version

from forebay.errors import ModelError
from forebay.runtime.applying import Task
from forebay.runtime.blockstate import BlockState
from forebay.runtime.delay import Delay
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.gradients import LandedGradient, is_gone
from forebay.runtime.in_backward import BackwardUpdates
from forebay.runtime.measure import Measurement
from forebay.runtime.speculation import Speculation, SpeculationPolicy
from forebay.runtime.store import Store
from forebay.runtime.updates import Updater
from forebay.runtime.waiting import Waiting
from forebay.scheduling.rounds import Rounds
from forebay.scheduling.slots import SlotPool

__all__ = ["Groups", "Hyperparameters", "Stepping"]

Groups = Mapping[str, Mapping[str, object]]
"""Hyperparameters by parameter: a copy for each group, the same object for all parameters of one."""

Hyperparameters = Callable[[Collection[str]], Groups]
"""The groups, as they are now, of those of the parameters named that the optimizer holds."""


def _nobody(names: Collection[str]) -> Groups:
    return {}


@final
class Stepping:
    """The way of gradients from autograd into the parameters. ``hyperparameters`` is the optimizer's, once there is
    one: what a step would be asked for if it came now."""

    def __init__(
        self,
        store: Store,
        pool: SlotPool,
        updater: Updater,
        parameters: Mapping[str, nn.Parameter],
        measure: Measurement,
        device: torch.device,
        delay_after: int | None,
        rounds: Rounds,
    ) -> None:
        self._store = store
        self._pool = pool
        self._updater = updater
        self._parameters = parameters
        self._measure = measure
        self._device = device
        self.hyperparameters: Hyperparameters = _nobody
        self.delay = Delay(pool, delay_after)
        self.waiting = Waiting(store.blocks, rounds)
        self.speculation = Speculation(store.blocks.values(), updater, SpeculationPolicy())
        self.in_backward = BackwardUpdates(store.blocks, updater, parameters, self._tasks_now)

    def land(self, state: BlockState, parameter: nn.Parameter, gradient: torch.Tensor, buffer: GradientBuffer) -> None:
        """Has ``gradient``, of a parameter of the block ``state``, go to the host, and ``parameter.grad`` stand for
        it."""
        since = self._measure.now()
        self.in_backward.make_room(state, buffer.parameter.name)
        self.waiting.receive(buffer, gradient)
        self._measure.waited(since)
        parameter.grad = LandedGradient(buffer, self._device)

    def landed(self, state: BlockState, name: str) -> None:
        """The gradient of a parameter of a block is complete, and has landed if it does not stay on the device."""
        self.in_backward.landed(state, name)
        if state.spare is None:
            return
        for other, buffer in state.gradients.items():
            if self._parameters[other].grad is None:
                buffer.landings = 0  # dropped since then, by zero_grad say
        self.speculation.landed(state, self._tasks_now)

    def expect_possible(self, groups: Groups) -> None:
        """Raises what keeps a step for ``groups`` from being taken, before anything has changed: ``ModelError`` for a
        gradient that the plan has no room and no state for, ``UsageError`` for one that is no longer what was put in
        its place, ``GradientUsedUp`` for a step that is not the one that was made in backward, ``ForebayError`` for a
        block that changes while something looks at its bytes on the device, the error of an update that ran ahead and
        failed."""
        for state in self._store.blocks.values():
            for spec in state.block.parameters:
                gradient = self._parameters[spec.name].grad if spec.name in groups else None
                if gradient is None or not spec.numel:
                    continue
                if isinstance(gradient, LandedGradient):
                    gradient.expect_same_source()
                if not spec.trainable:
                    raise ModelError(
                        f"parameter {spec.name} was frozen when the model was prepared and has a gradient now; "
                        f"forebay.close() the model and prepare it anew to train it, or set requires_grad=False again "
                        f"and its grad to None"
                    )
        self.in_backward.expect_taken_over(groups)
        self._expect_unread(groups)
        self.speculation.raise_failed(self._store.blocks)

    def _expect_unread(self, groups: Groups) -> None:
        """Of all blocks that the step changes, since the first of them must not change where the last cannot."""
        if self.delay.holds(self._taken):
            return  # the slots keep what they hold
        for name, state in self._store.blocks.items():
            slot = self._pool.slot_of(name)
            if slot is not None and slot.readers and self.waiting.has_turn(name) and self._is_due(state, groups):
                slot.expect_unread()

    def _taken(self) -> int:
        """Steps so far, of the parameter that has had most."""
        return max((n for state in self._store.blocks.values() for n in state.steps.values()), default=0)

    def begin(self) -> None:
        """A training step begins."""
        self.delay.begin()
        self.waiting.begin()
        self.in_backward.begin()

    def give_up(self) -> None:
        """No step follows the passes since the last one."""
        self.delay.end()
        self.waiting.end()

    def show(self) -> None:
        """Has whatever reads parameters and states next see every update, those too for whose turn gradients wait.
        Raises ``UsageError`` in the middle of a step."""
        self.delay.show()
        owed = {state.block.name for state in self.waiting.owed()}
        for state in self._in_order_of_use() if owed else ():
            if state.block.name in owed:
                names = [name for name, buffer in state.gradients.items() if buffer.waiting]
                groups = self.hyperparameters(names)
                self._update(state, {n: Task(state.steps[n] + 1, groups[n]) for n in names if n in groups})
        self.waiting.begin_round()

    def forget(self) -> None:
        """What steps have left to be done is not done any more: all values are replaced. Raises what ``Delay.show``
        raises."""
        self.delay.show()
        self.waiting.forget()
        self.in_backward.forget()

    def step(self, groups: Groups) -> None:
        """Queues the updates of a step, or takes over those that were made ahead of it, in the order in which the next
        forward will want the blocks. Those on the device are queued when they are needed (``deferred``)."""
        self._keep_apart(groups)
        self.waiting.end()
        if self.delay.holds(self._taken):
            self._step_late(groups)
            return
        self.delay.end()
        self._updater.resident.begin()
        states = list(self._in_order_of_use())
        # A gradient that backward has used up and no step is for is forgotten behind them all: nothing reads it before.
        changing = {s.block.name for s in states if self._is_due(s, groups) or self.in_backward.has_used(s)}
        first = self._pool.upcoming()
        for state in states:
            # Not for all of them beforehand: the device waits for the first one's update.
            tasks = self._tasks(state, groups)
            if not tasks:
                self.speculation.drop(state)
                continue
            self._step_block(state, tasks)
            changing.discard(state.block.name)
            if state.block.name in first:
                # Now, and not behind the last of them all: until its first block is there the device has nothing to do.
                self._pool.prefetch(changing)
        self.waiting.turn()
        self.in_backward.forget()
        self.speculation.end_step(self._store.blocks)

    def _step_block(self, state: BlockState, tasks: Mapping[str, Task]) -> None:
        """Queues the update of one block, or takes it over, or has its gradients wait for its turn."""
        left = self.in_backward.left(state, tasks)
        if state.placement.resident:
            if state.early is not None:
                self.in_backward.finish(state, left)
            else:
                gradients = {n: g for n in tasks if (g := self._parameters[n].grad) is not None}
                self._updater.resident.run(state, tasks, gradients)
            self._count(state, tasks)
            return
        self._land_replaced(state, left)
        if self.waiting.has_turn(state.block.name):
            self._update(state, tasks, left)
        else:
            self._keep_waiting(state, tasks)

    def _update(self, state: BlockState, tasks: Mapping[str, Task], left: Mapping[str, Task] | None = None) -> None:
        """Queues the update of a block whose gradients have landed; ``left`` are those of ``tasks`` that no update in
        backward has used up."""
        self._pool.invalidate(state.block.name)
        if state.streamed is not None:
            state.streamed.deferred.put(partial(self._updater.submit, state, tasks))
        elif state.early is not None:
            self.in_backward.finish(state, tasks if left is None else left)
        elif not self.speculation.commit(state, tasks):
            self._updater.submit(state, tasks)
        for name in tasks:
            state.gradients[name].waiting = False
        self._count(state, tasks)

    def _keep_waiting(self, state: BlockState, tasks: Mapping[str, Task]) -> None:
        """What has landed waits for the turn of the block, and is no longer ``param.grad``, which zero_grad() drops."""
        for name in tasks:
            if self._parameters[name].grad is not None:
                self.waiting.put(state.gradients[name])
                self._parameters[name].grad = None

    def _step_late(self, groups: Groups) -> None:
        """``step`` where updates are delayed (``delay``): the device does not see this one before the next step."""
        every = [(state, self._tasks(state, groups)) for state in self._in_order_of_use()]
        updated = [(state, tasks) for state, tasks in every if tasks]
        for state, tasks in updated:
            self._land_replaced(state, tasks)
        self.delay.turn([state.block.name for state, _ in updated])
        # The last block first: its gradient is the first to land in the next backward, and waits until this update has
        # read the one that it replaces.
        for state, tasks in reversed(updated):
            self._updater.submit(state, tasks)
            self._count(state, tasks)

    def _tasks(self, state: BlockState, groups: Groups) -> dict[str, Task]:
        """What a step has for the parameters of a block: for those of which there is a gradient, or what waits of
        earlier ones."""
        return {name: Task(state.steps[name] + 1, groups[name]) for name in self._due(state, groups)}

    def _is_due(self, state: BlockState, groups: Groups) -> bool:
        """Whether a step has anything for a block."""
        return next(self._due(state, groups), None) is not None

    def _due(self, state: BlockState, groups: Groups) -> Iterator[str]:
        for spec in state.block.parameters:
            name = spec.name
            if name not in groups or name not in state.steps:
                continue
            landed = state.gradients.get(name)
            if self._parameters[name].grad is not None or (landed is not None and landed.waiting):
                yield name

    def _tasks_now(self, state: BlockState) -> dict[str, Task]:
        return self._tasks(state, self.hyperparameters(state.steps.keys()))

    def _keep_apart(self, groups: Groups) -> None:
        """Copies gradients of other parameters (``a.grad, b.grad = b.grad, a.grad``) in whose place another one lands
        in the same step. Raises what reading them raises, before anything has changed."""
        replaced: dict[GradientBuffer, nn.Parameter] = {}
        for state in self._store.blocks.values():
            for name, buffer in state.gradients.items():
                gradient = self._parameters[name].grad if name in groups else None
                own = isinstance(gradient, LandedGradient) and gradient.buffer is buffer
                if gradient is not None and not own and not is_gone(gradient):
                    replaced[buffer] = self._parameters[name]
        for parameter in replaced.values():
            gradient = parameter.grad
            if isinstance(gradient, LandedGradient) and gradient.buffer in replaced:
                parameter.grad = gradient.value().to(self._device, copy=True)

    def _land_replaced(self, state: BlockState, tasks: Mapping[str, Task]) -> None:
        """Lands gradients that the user put in the place of landed ones (``p.grad = p.grad * 2``)."""
        for name in tasks:
            parameter, buffer = self._parameters[name], state.gradients[name]
            gradient = parameter.grad
            if isinstance(gradient, LandedGradient):
                if gradient.stands_for(buffer):
                    continue
                # Another parameter's, or a view: a copy, since landing it must not overwrite what is being read.
                gradient = gradient.value().to(self._device, copy=True)
            if gradient is not None:
                buffer.waiting = False  # it takes the place of all that has landed
                self.land(state, parameter, gradient.detach(), buffer)

    def _count(self, state: BlockState, tasks: Mapping[str, Task]) -> None:
        """Updates of ``tasks`` were asked for."""
        for name in tasks:
            state.steps[name] += 1
        # torch counts changes in place, and no kernel of forebay's does: a backward that still needs what forward has
        # read is refused, as after a step in plain PyTorch.
        increment_version([self._parameters[name] for name in tasks])

    def _in_order_of_use(self) -> Iterator[BlockState]:
        blocks = self._store.blocks
        return (blocks[name] for name in self._pool.order.in_order_of_use(blocks))
