"""Updates in backward: a block is updated as soon as its gradients are complete, which uses them up.

Liao et al., "LoHan" (2024), call it active gradient offloading; Lv et al., "LOMO" (2023), fuse the update of SGD with
backward for the same reason, and torchtune has it as ``optimizer_in_bwd``. The host then holds the gradients of a few
blocks and not of the whole model, and the device, of the blocks that stay there, those of one. The numbers are those of
a step after backward, because the update of a block reads nothing but its own gradients, states and parameters, and
because nobody can have changed those in between: that is what the user has given up with ``update="backward"``. No
second backward is added to a gradient, nothing is clipped, and the hyperparameters are those that are set while
backward runs.

Whatever would make other numbers is refused, at the latest by ``optimizer.step()``: a gradient that was dropped or put
in another's place, other hyperparameters, a parameter that was taken out of the optimizer, a block that backward reads
again after its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import nn
from torch.autograd.graph import increment_version

from forebay.errors import GradientUsedUp
from forebay.runtime.applying import Task
from forebay.runtime.blockstate import BlockState, InBackward, Passing
from forebay.runtime.gradients import LandedGradient, is_gone
from forebay.runtime.spent import SpentGradient, gradient_used_up
from forebay.runtime.tensors import elements
from forebay.runtime.updates import Updater

__all__ = ["BackwardUpdates"]

Tasks = Mapping[str, Task]


@final
class BackwardUpdates:
    """Those of one session. ``tasks_now`` says what a step over a block would ask for if it came now, of all
    parameters that have a gradient."""

    def __init__(
        self,
        blocks: Mapping[str, BlockState],
        updater: Updater,
        parameters: Mapping[str, nn.Parameter],
        tasks_now: Callable[[BlockState], Tasks],
    ) -> None:
        # The mapping itself: who closes it lets go of the memory, whoever holds this.
        self._blocks = blocks
        self._updater = updater
        self._parameters = parameters
        self._tasks_now = tasks_now
        # By parameter, what it was updated for in backward: the step that takes it over asks for the same.
        self._made: dict[str, Task] = {}
        # The block on the device whose gradient came last.
        self._latest = ""

    def _early(self) -> list[tuple[BlockState, InBackward]]:
        return [(state, state.early) for state in self._blocks.values() if state.early is not None]

    def begin(self) -> None:
        """A pass begins: no gradient of it is complete."""
        for _, early in self._early():
            early.complete.clear()

    def make_room(self, state: BlockState, name: str) -> None:
        """Before the gradient of ``name`` lands: its block has a slot. Raises ``GradientUsedUp`` for a second gradient
        before the first one's step."""
        early = state.early
        if early is None or early.passing is None:
            return
        passing = early.passing
        if name in early.used_up:
            raise gradient_used_up(name)
        if passing.slots.of(state.block.name) is not None:
            return
        while (other := passing.slots.in_the_way(passing.nbytes)) is not None:
            # Not all that it trains has a gradient in this pass, which only the end of backward would tell.
            self._use_up(self._blocks[other])
        slot = passing.slots.take(state.block.name, passing.nbytes)
        for other, buffer in state.gradients.items():
            if other not in early.used_up:
                place: torch.Tensor = elements(slot.buffer, buffer.parameter, passing.offsets[other])
                buffer.lend(place, slot.read)

    def landed(self, state: BlockState, name: str) -> None:
        """The gradient of ``name``, of ``state``, is complete. With the last one of the block its update is made, or
        queued if that is on the host."""
        early = state.early
        if early is None:
            return
        if early.passing is None:
            before, self._latest = self._latest, state.block.name
            if before not in ("", self._latest):
                # As where its slot is wanted: not all that it trains has a gradient in this pass.
                self._use_up(self._blocks[before])
        early.complete.add(name)
        if early.names <= early.complete | early.used_up:
            self._use_up(state)

    def _use_up(self, state: BlockState, tasks: Tasks | None = None) -> None:
        """Updates a block with those of its gradients that are complete (None: as a step would that came now), and lets
        them go."""
        early = state.early
        if early is None:
            return
        if early.passing is not None:
            self._use_up_landed(state, early, early.passing, tasks)
        else:
            self._use_up_there(state, early, tasks)
        early.complete.clear()

    def _use_up_landed(self, state: BlockState, early: InBackward, passing: Passing, tasks: Tasks | None) -> None:
        """Queues the update of a block at home on the host or on disk, and gives its slot back."""
        if passing.slots.of(state.block.name) is None:
            return
        landed = [name for name, buffer in state.gradients.items() if buffer.landings]
        made = self._wanted(state, landed, tasks)
        done = self._updater.submit(state, made) if made else None
        for name, buffer in state.gradients.items():
            if buffer.landings:
                early.used_up.add(name)
            buffer.use_up()
        # What has no update has been copied there all the same, by the lane that brings the next occupant's.
        passing.slots.give_back(state.block.name, () if done is None else (done,))

    def _use_up_there(self, state: BlockState, early: InBackward, tasks: Tasks | None) -> None:
        """Updates a block that stays on the device, in the compute order: whatever runs next finds it updated. torch
        counts the change, so that what backward still needs of the block as it was is refused."""
        there = {name: g for name in early.complete if (g := self._parameters[name].grad) is not None}
        made = self._wanted(state, there, tasks)
        early.used_up.update(there)  # first: nobody is to go on from an update that fails halfway
        if made:
            with torch.no_grad():
                self._updater.resident.begin()
                self._updater.resident.run(state, made, {name: there[name] for name in made})
            increment_version([self._parameters[name] for name in made])
        for name, gradient in there.items():
            self._parameters[name].grad = SpentGradient(name, gradient)

    def _wanted(self, state: BlockState, names: Iterable[str], tasks: Tasks | None) -> Tasks:
        """What of ``names`` is updated, which is noted."""
        wanted = self._tasks_now(state) if tasks is None else tasks
        made = {name: wanted[name] for name in names if name in wanted}
        self._made |= made
        return made

    def expect_taken_over(self, groups: Mapping[str, Mapping[str, object]]) -> None:
        """Raises ``GradientUsedUp`` where a step over ``groups`` is not the one that was made in backward."""
        for state, early in self._early():
            for name in early.names:
                task = self._made.get(name)
                if task is not None:
                    self._expect_same(state, name, task, groups)
                    continue
                gradient = self._parameters[name].grad
                if name in groups and gradient is not None and is_gone(gradient):
                    raise gradient_used_up(name)  # a second step over the same gradients

    def _expect_same(
        self, state: BlockState, name: str, task: Task, groups: Mapping[str, Mapping[str, object]]
    ) -> None:
        gradient = self._parameters[name].grad
        spent = isinstance(gradient, SpentGradient) and gradient.parameter == name
        if not spent and not (isinstance(gradient, LandedGradient) and gradient.was_used_up(state.gradients[name])):
            why = "its gradient was dropped or replaced between backward and step()"
        elif name not in groups:
            why = "the optimizer does not hold it any more"
        elif groups[name] != task.group:
            why = "its hyperparameters were changed between backward and step(); change them after step()"
        else:
            return
        raise GradientUsedUp(
            f"parameter {name} was updated in backward as the optimizer was then, and {why}; the step cannot be taken "
            f"back: load the parameters of a step that is whole, or prepare the model with update='step'"
        )

    def left(self, state: BlockState, tasks: Tasks) -> Tasks:
        """Those of ``tasks`` that no update in backward was made for."""
        return {name: task for name, task in tasks.items() if name not in self._made} if state.early else tasks

    def finish(self, state: BlockState, tasks: Tasks) -> None:
        """The rest of a step: ``tasks`` are those of ``left``, and all of their gradients are complete."""
        if state.early is None:
            return
        state.early.complete.update(tasks)
        self._use_up(state, tasks)
        state.early.used_up.clear()  # whoever reads the block from here on reads what the step has made

    def has_used(self, state: BlockState) -> bool:
        """Whether gradients of ``state`` were used up that no step has been taken for: it is not to be read."""
        return state.early is not None and bool(state.early.used_up)

    def forget(self) -> None:
        """Forgets what was made for a step: it has been taken, or will not come, since all values are replaced. Slots
        are free again."""
        for state, early in self._early():
            self._use_up(state, {})  # gradients of parameters that the optimizer does not hold
            early.used_up.clear()
        self._made.clear()
        self._latest = ""

    def expect_whole(self) -> None:
        """Raises ``GradientUsedUp`` between a backward and its step: some blocks are updated and others are not."""
        for state, _ in self._early():
            state.expect_not_updated()
